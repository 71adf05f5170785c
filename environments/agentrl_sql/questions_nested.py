"""Level 3, part one: a number that has to be found first (averages, extremes, shares) to answer with."""

from __future__ import annotations

from agentrl_sql.questions_parts import Builder, Draft, Scene, select, which
from agentrl_sql.schema import NUMERIC, literal


def _above_average(scene: Scene) -> Draft:
    table = scene.table()
    column = scene.column(table, "amount", "measure")
    clause = scene.maybe_clause(table, without=(column.name,))
    at, words = scene.draws.pick(((">", "above"), ("<", "below")))
    label, t, name = table.label.name, table.name, column.name
    text = scene.say(
        "List the {label} of every {noun} whose {column} {verb} {words} the average {column} of all {plural}{also}.",
        "Which {plural} have {column} {words} the average over all {plural}{also}? Give the {label}.",
        "Show the {label} of the {plural} that have {column} {words} the average of all {plural}{also}.",
        label=table.label.words, noun=table.noun, plural=table.plural, column=column.words, verb=column.verb,
        words=words, also=f" and whose {clause.text}" if clause else "",
    )  # fmt: skip
    mean = f"({select(f'AVG({name})', t)})"
    also = f" AND {clause.sql}" if clause else ""
    wrong = [
        select(label, t, f"{name} {'<' if at == '>' else '>'} {mean}{also}"),
        select(label, t, f"{name} {at} ({select(f'MAX({name}) / 2', t)}){also}"),
    ]
    if clause:
        wrong.append(select(label, t, f"{name} {at} {mean}"))
    if other := scene.column_or_none(table, "amount", "measure", without=(name,)):
        wrong.append(select(label, t, f"{other.name} {at} ({select(f'AVG({other.name})', t)}){also}"))
    return Draft(text, select(label, t, f"{name} {at} {mean}{also}"), tuple(wrong), (t,))


def _group_average(scene: Scene) -> Draft:
    """Compared with the rows of the same group: a correlated subquery."""
    table = scene.table()
    column = scene.column(table, "amount", "measure", nullable=False)
    group = scene.column(table, "word", nullable=False)
    clause = scene.maybe_clause(table, "a.", without=(column.name, group.name))
    at, words = scene.draws.pick(((">", "above"), ("<", "below")))
    text = scene.say(
        "List the {label} of every {noun} whose {column} {verb} {words} the average {column} of all {plural} with the"
        " same {group}{also}.",
        "Which {plural} have {column} {words} the average of all {plural} of their {group}{also}? Give the {label}.",
        label=table.label.words, noun=table.noun, plural=table.plural, column=column.words, verb=column.verb,
        words=words, group=group.words, also=f" and whose {clause.text}" if clause else "",
    )  # fmt: skip
    name, t, source = column.name, table.name, f"{table.name} AS a"
    inner = f"({select(f'AVG(b.{name})', f'{t} AS b', f'b.{group.name} = a.{group.name}')})"
    label = f"a.{table.label.name}"
    also = f" AND {clause.sql}" if clause else ""
    wrong = (
        select(label, source, f"a.{name} {at} ({select(f'AVG({name})', t)}){also}"),
        select(label, source, f"a.{name} {'<' if at == '>' else '>'} {inner}{also}"),
        select(label, source, f"a.{name} {at}= {inner.replace('AVG', 'MIN' if at == '>' else 'MAX')}{also}"),
    )
    return Draft(text, select(label, source, f"a.{name} {at} {inner}{also}"), wrong, (t,))


def _superlative(scene: Scene) -> Draft:
    """All rows that share an extreme, among those under a condition."""
    table = scene.table()
    column = scene.column(table, *NUMERIC)
    clause = scene.clause_on(table, scene.column(table, "word", *NUMERIC, without=(column.name,)))
    function, words = scene.draws.pick((("MAX", "highest"), ("MIN", "lowest")))
    label, name, t = table.label.name, column.name, table.name
    text = scene.say(
        "Among the {plural} whose {clause}, list the {label} of every one with the {words} {column}.",
        "Take only the {plural} whose {clause}. Which have the {words} {column} of these? List the {label} of all.",
        plural=table.plural, clause=clause.text, label=table.label.words, words=words, column=column.words,
    )  # fmt: skip
    extreme = f"({select(f'{function}({name})', t, clause.sql)})"
    other = f"({select(f'{OPPOSITE[function]}({name})', t, clause.sql)})"
    wrong = (
        select(label, t, f"{clause.sql} AND {name} = {other}"),
        select(label, t, f"{name} = ({select(f'{function}({name})', t)})"),
        select(label, t, f"{clause.wrong[0]} AND {name} = ({select(f'{function}({name})', t, clause.wrong[0])})"),
    )
    return Draft(text, select(label, t, f"{clause.sql} AND {name} = {extreme}"), wrong, (t,))


OPPOSITE = {"MAX": "MIN", "MIN": "MAX"}


def _group_superlative(scene: Scene) -> Draft:
    table = scene.table()
    column = scene.column(table, *NUMERIC, nullable=False)
    group = scene.column(table, "word", nullable=False)
    clause = scene.maybe_clause(table, without=(column.name, group.name))
    function, words = scene.draws.pick((("MAX", "highest"), ("MIN", "lowest")))
    t, name = table.name, column.name
    text = scene.say(
        "For each {group}, give it and the {label} of the {noun} with the {words} {column}; list all that tie.",
        "Show the {group} and the {label} of every {noun} that has the {words} {column} of its {group}.",
        group=group.words, label=table.label.words, noun=table.noun, words=words, column=column.words,
    )  # fmt: skip
    if clause:
        text = f"Take only the {table.plural} whose {clause.text}. {text}"

    def answer(chosen: str, same_group: str, condition: str) -> str:
        inner = " AND ".join(part for part in (same_group, condition and f"b.{condition}") if part)
        extreme = f"a.{name} = ({select(f'{chosen}(b.{name})', f'{t} AS b', inner)})"
        where = f"{extreme} AND a.{condition}" if condition else extreme
        return select(f"a.{group.name}, a.{table.label.name}", f"{t} AS a", where)

    same_group, condition = f"b.{group.name} = a.{group.name}", clause.sql if clause else ""
    wrong = [
        answer(OPPOSITE[function], same_group, condition),
        answer(function, "", condition),
        select(f"{group.name}, {function}({table.label.name})", t, condition, f"GROUP BY {group.name}"),
    ]
    if clause:
        wrong.append(answer(function, same_group, ""))
    return Draft(text, answer(function, same_group, condition), tuple(wrong), (t,))


def _second(scene: Scene) -> Draft:
    table = scene.table()
    column = scene.column(table, *NUMERIC)
    clause = scene.maybe_clause(table, without=(column.name,))
    highest = scene.draws.chance(0.5)
    t, name, condition = table.name, column.name, clause.sql if clause else ""
    text = scene.say(
        "What is the second {words} {column} of the {plural}{which}? Equal values count once.",
        "Give the second {words} of the different {column} values of all {plural}{which}.",
        words="highest" if highest else "lowest", column=column.words, plural=table.plural, which=which(clause),
    )  # fmt: skip

    def answer(function: str, where: str) -> str:
        beyond = f"{name} {'<' if function == 'MAX' else '>'} ({select(f'{function}({name})', t, where)})"
        return select(f"{function}({name})", t, f"{where} AND {beyond}" if where else beyond)

    function, other = ("MAX", "MIN") if highest else ("MIN", "MAX")
    wrong = [select(f"{function}({name})", t, condition), answer(other, condition)]
    if clause:
        wrong.append(answer(function, ""))
    return Draft(text, answer(function, condition), tuple(wrong), (t,))


def _share(scene: Scene) -> Draft:
    table = scene.table()
    clause = scene.clause(table)
    text = scene.say(
        "What percentage of all {plural} are those whose {clause}? Give a number from 0 to 100.",
        "Of all {plural}, what percentage (0 to 100) are those whose {clause}?",
        plural=table.plural, clause=clause.text,
    )  # fmt: skip
    one = f"COUNT(CASE WHEN {clause.sql} THEN 1 END)"
    wrong = (
        select(f"{one} / COUNT(*)", table.name),
        select(f"100.0 * COUNT(CASE WHEN {clause.sql} THEN 1 ELSE 0 END) / COUNT(*)", table.name),
        select(f"100.0 * COUNT(CASE WHEN {clause.wrong[0]} THEN 1 END) / COUNT(*)", table.name),
        select("COUNT(*)", table.name, clause.sql),
    )
    return Draft(text, select(f"100.0 * {one} / COUNT(*)", table.name), wrong, (table.name,))


def _difference(scene: Scene) -> Draft:
    table = scene.table()
    function, column = scene.aggregate(table, "AVG", "SUM", "MAX")
    group = scene.column(table, "word", nullable=False)
    first, second = (literal(value) for value in scene.draws.sample(scene.distinct(table, group, 2), 2))
    value = scene.aggregate_words(function, column)
    text = scene.say(
        "What is the {value} of the {plural} whose {group} is {first} minus that of the {plural} whose {group} is"
        " {second}?",
        "Subtract the {value} of {plural} with {group} {second} from the {value} of {plural} with {group} {first}.",
        value=value, plural=table.plural, group=group.words, first=first, second=second,
    )  # fmt: skip

    def part(chosen: str, which: str) -> str:
        where = f"{group.name} = {which}" if which else ""
        return f"({select(f'{chosen}({column.name})', table.name, where)})"

    wrong = (
        f"SELECT {part(function, second)} - {part(function, first)}",
        f"SELECT {part('MIN', first)} - {part('MIN', second)}",
        f"SELECT {part(function, first)} - {part(function, '')}",
    )
    return Draft(text, f"SELECT {part(function, first)} - {part(function, second)}", wrong, (table.name,))


BUILDERS: dict[str, Builder] = {
    "above_average": _above_average,
    "group_average": _group_average,
    "superlative": _superlative,
    "group_superlative": _group_superlative,
    "second": _second,
    "share": _share,
    "difference": _difference,
}
