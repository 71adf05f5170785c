"""Level 2, the part on one table: groups and HAVING."""

from __future__ import annotations

from agentrl_sql.questions_parts import (
    AGGREGATES,
    OTHER_AGGREGATES,
    Builder,
    Draft,
    Scene,
    Unfit,
    one,
    select,
    which,
)
from agentrl_sql.schema import NUMERIC, Column, Table


def _grouped(scene: Scene) -> tuple[Table, Column, str]:
    """A table, a word column without NULL to group by, and the clause that groups."""
    table = scene.table()
    group = scene.column(table, "word", nullable=False)
    return table, group, f"GROUP BY {group.name}"


def _group_count(scene: Scene) -> Draft:
    table, group, tail = _grouped(scene)
    clause = scene.maybe_clause(table, without=(group.name,))
    words = {"group": group.words, "noun": table.noun, "plural": table.plural}
    if clause is None:
        text = scene.say(
            "How many {plural} are there for each {group}? Give the {group} and the number.",
            "For each {group}, give the {group} and the number of {plural}.",
            "Count the {plural} by {group}. Give the {group} and the count.",
            **words,
        )
    else:
        text = scene.say(
            "Among the {plural} whose {clause}, how many are there for each {group}? Give the {group} and the number.",
            "Take only the {plural} whose {clause} and count them by {group}. Give the {group} and the count.",
            clause=clause.text,
            **words,
        )
    where = clause.sql if clause else ""
    what = f"{group.name}, COUNT(*)"
    wrong = [select(f"{group.name}, MAX(id)", table.name, where, tail)]
    if number := scene.column_or_none(table, "amount", "measure"):
        wrong.append(select(f"{group.name}, SUM({number.name})", table.name, where, tail))
    if clause:
        wrong += [select(what, table.name, clause.wrong[0], tail), select(what, table.name, "", tail)]
    else:
        wrong.append(select(f"{group.name}, COUNT(DISTINCT {group.name})", table.name, "", tail))
    return Draft(text, select(what, table.name, where, tail), tuple(wrong), (table.name,))


def _group_aggregate(scene: Scene) -> Draft:
    table, group, tail = _grouped(scene)
    function, column = scene.aggregate(table, *AGGREGATES)
    value = scene.aggregate_words(function, column)
    text = scene.say(
        "What is the {value} of the {plural} for each {group}? Give the {group} and the {value}.",
        "For each {group}, give the {group} and the {value} of the {plural}.",
        "Show every {group} with the {value} of the {plural} that have it.",
        value=value, group=group.words, plural=table.plural,
    )  # fmt: skip
    first, second = OTHER_AGGREGATES[function]
    whats = [f"{first}({column.name})", f"{second}({column.name})"]
    if other := scene.column_or_none(table, *NUMERIC, without=(column.name,)):
        whats.append(f"{function}({other.name})")
    wrong = tuple(select(f"{group.name}, {what}", table.name, "", tail) for what in whats)
    return Draft(text, select(f"{group.name}, {function}({column.name})", table.name, "", tail), wrong, (table.name,))


def _having_count(scene: Scene) -> Draft:
    table, group, tail = _grouped(scene)
    n = scene.draws.pick(scene.counts(table, group.name))
    at, words = scene.draws.pick(((">", "more than"), (">=", "at least"), ("<", "fewer than")))
    text = scene.say(
        "Which {group} values do {words} {n} {plural} have?",
        "List every {group} that {words} {n} {plural} have.",
        group=group.words, words=words, n=n, plural=table.plural,
    )  # fmt: skip
    flipped = {">": ">=", ">=": ">", "<": "<="}[at]
    wrong = (
        select(group.name, table.name, "", f"{tail} HAVING COUNT(*) {flipped} {n}"),
        select(group.name, table.name, "", f"{tail} HAVING COUNT(*) {'>' if at == '<' else '<'} {n}"),
        select(group.name, table.name, "", tail),
    )
    return Draft(text, select(group.name, table.name, "", f"{tail} HAVING COUNT(*) {at} {n}"), wrong, (table.name,))


def _having_aggregate(scene: Scene) -> Draft:
    table, group, tail = _grouped(scene)
    function, column = scene.aggregate(table, "AVG", "SUM", "MAX", "MIN")
    value = _typical(scene, table, group, function, column)
    at, words = scene.draws.pick(((">", "greater than"), ("<", "less than")))
    text = scene.say(
        "For which {group} values is the {what} of the {plural} {words} {value}?",
        "List every {group} for which the {what} of the {plural} is {words} {value}.",
        group=group.words, what=scene.aggregate_words(function, column), plural=table.plural, words=words, value=value,
    )  # fmt: skip
    measured, instead = f"{function}({column.name})", f"{OTHER_AGGREGATES[function][0]}({column.name})"
    wrong = (
        select(group.name, table.name, "", f"{tail} HAVING {instead} {at} {value}"),
        select(group.name, table.name, "", f"{tail} HAVING {measured} {'<' if at == '>' else '>'} {value}"),
        select(f"DISTINCT {group.name}", table.name, f"{column.name} {at} {value}"),
    )
    gold = select(group.name, table.name, "", f"{tail} HAVING {measured} {at} {value}")
    return Draft(text, gold, wrong, (table.name,))


def _typical(scene: Scene, table: Table, group: Column, function: str, column: Column) -> int:
    """A whole number near the aggregate of one of the groups."""
    rows = scene.database.rows[table.name]
    by, of = table.position(group.name), table.position(column.name)
    chosen = scene.draws.pick(rows)[by]
    numbers = [float(value) for row in rows if row[by] == chosen and isinstance(value := row[of], int | float)]
    if not numbers:
        raise Unfit
    found = {"AVG": sum(numbers) / len(numbers), "SUM": sum(numbers), "MIN": min(numbers), "MAX": max(numbers)}
    return round(found[function])


def _group_top(scene: Scene) -> Draft:
    table, group, tail = _grouped(scene)
    clause = scene.maybe_clause(table, without=(group.name,))
    rising = scene.draws.chance(0.4)
    text = scene.say(
        "What is the {most} frequent {group} among the {plural}{which}?",
        "Which {group} occurs {most} often among the {plural}{which}?",
        "Give the {most} frequent {group} of the {plural}{which}.",
        most="least" if rising else "most", group=group.words, plural=table.plural, which=which(clause),
    )  # fmt: skip
    if rising:
        text += f" {one(group.words).capitalize()} that none of them has does not count."
    where = clause.sql if clause else ""
    up, down = f"{tail} ORDER BY COUNT(*)", f"{tail} ORDER BY COUNT(*) DESC"
    order, flipped = (up, down) if rising else (down, up)
    wrong = (
        select(group.name, table.name, where, f"{flipped} LIMIT 1"),
        select(group.name, table.name, where, f"{order} LIMIT 2"),
        select(f"{'MIN' if rising else 'MAX'}({group.name})", table.name, where),
    )
    keys = select("COUNT(*)", table.name, where, f"{order} LIMIT 2")
    return Draft(text, select(group.name, table.name, where, f"{order} LIMIT 1"), wrong, (table.name,), keys)


BUILDERS: dict[str, Builder] = {
    "group_count": _group_count,
    "group_aggregate": _group_aggregate,
    "having_count": _having_count,
    "having_aggregate": _having_aggregate,
    "group_top": _group_top,
}
