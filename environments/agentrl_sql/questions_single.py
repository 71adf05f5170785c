"""Level 1: one table; filters, aggregates, lists."""

from __future__ import annotations

from agentrl_sql.questions_parts import OTHER_AGGREGATES, Builder, Clause, Draft, Scene, listing, round_ones, select
from agentrl_sql.schema import NUMERIC, Column, Table, literal

_COUNT = (
    "How many {plural} are there?",
    "How many {plural} are there in total?",
    "Count the {plural}.",
    "Count all {plural}.",
    "What is the number of {plural}?",
    "What is the total number of {plural}?",
    "Give the number of {plural}.",
    "Tell me how many {plural} there are.",
    "How many {plural} exist?",
    "Report the number of all {plural}.",
)
_COUNT_WHERE = (
    "How many {plural} are there {where}?",
    "Count the {plural} {where}.",
    "What is the number of {plural} {where}?",
    "Give the number of {plural} {where}.",
)
_AGGREGATE = (
    "What is the {value} of all {plural}?",
    "Give the {value} of all {plural}.",
    "Find the {value} over all {plural}.",
    "Compute the {value} of the {plural}.",
)
_AGGREGATE_WHERE = (
    "What is the {value} of {plural} {where}?",
    "Give the {value} of the {plural} {where}.",
    "Find the {value} of {plural} {where}.",
    "Compute the {value} of all {plural} {where}.",
)
_LIST = (
    "List the {columns} of every {noun} {where}.",
    "Show the {columns} of each {noun} {where}.",
    "Give the {columns} of all {plural} {where}.",
    "What is the {columns} of each {noun} {where}?",
)


def _count(scene: Scene) -> Draft:
    table = scene.table()
    wrong = [select("MAX(id)", table.name)]
    if word := scene.column_or_none(table, "word"):
        wrong.insert(0, select(f"COUNT(DISTINCT {word.name})", table.name))
    if number := scene.column_or_none(table, "amount", "measure"):
        wrong.insert(0, select(f"SUM({number.name})", table.name))
    return Draft(scene.say(*_COUNT, plural=table.plural), select("COUNT(*)", table.name), tuple(wrong), (table.name,))


def _count_where(scene: Scene) -> Draft:
    table = scene.table()
    return _count_of(scene, table, scene.clause(table))


def _count_of(scene: Scene, table: Table, clause: Clause) -> Draft:
    text = scene.say(*_COUNT_WHERE, plural=table.plural, where=scene.where(clause))
    wrong = [select("COUNT(*)", table.name, condition) for condition in clause.wrong]
    if other := scene.column_or_none(table, "amount", "measure"):
        wrong.append(select(f"SUM({other.name})", table.name, clause.sql))
    wrong.append(select("COUNT(*)", table.name))
    return Draft(text, select("COUNT(*)", table.name, clause.sql), tuple(wrong), (table.name,))


def _aggregate(scene: Scene) -> Draft:
    table = scene.table()
    function, column = scene.aggregate(table, "AVG", "SUM")
    text = scene.say(*_AGGREGATE, value=scene.aggregate_words(function, column), plural=table.plural)
    wrong = _wrong_aggregates(scene, table, function, column, "")
    return Draft(text, select(f"{function}({column.name})", table.name), tuple(wrong), (table.name,))


def _aggregate_where(scene: Scene) -> Draft:
    table = scene.table()
    function, column = scene.aggregate(table, "AVG", "SUM")
    return _aggregate_of(scene, table, function, column)


def _aggregate_of(scene: Scene, table: Table, function: str, column: Column) -> Draft:
    """An aggregate under a condition on another column."""
    clause = scene.clause_on(table, scene.column(table, "word", *NUMERIC, without=(column.name,)))
    value = scene.aggregate_words(function, column)
    text = scene.say(*_AGGREGATE_WHERE, value=value, plural=table.plural, where=scene.where(clause))
    what = f"{function}({column.name})"
    wrong = _wrong_aggregates(scene, table, function, column, clause.sql)[:2]
    wrong += [select(what, table.name, clause.wrong[0]), select(what, table.name)]
    return Draft(text, select(what, table.name, clause.sql), tuple(wrong), (table.name,))


def _wrong_aggregates(scene: Scene, table: Table, function: str, column: Column, where: str) -> list[str]:
    first, second = OTHER_AGGREGATES[function]
    whats = [f"{first}({column.name})", f"{second}({column.name})"]
    if other := scene.column_or_none(table, *NUMERIC, without=(column.name,)):
        whats.insert(1, f"{function}({other.name})")
    return [select(what, table.name, where) for what in whats]


def _min_max(scene: Scene) -> Draft:
    table = scene.table()
    function, column = scene.aggregate(table, "MIN", "MAX")
    if scene.draws.chance(0.5):
        return _aggregate_of(scene, table, function, column)
    text = scene.say(*_AGGREGATE, value=scene.aggregate_words(function, column), plural=table.plural)
    wrong = _wrong_aggregates(scene, table, function, column, "")
    return Draft(text, select(f"{function}({column.name})", table.name), tuple(wrong), (table.name,))


def _list_where(scene: Scene) -> Draft:
    table = scene.table()
    return _list_of(scene, table, scene.clause(table))


def _list_of(scene: Scene, table: Table, clause: Clause) -> Draft:
    """The label, or the label and a second column, of the rows under a condition."""
    shown = [table.label]
    if scene.draws.chance(0.4):
        shown.append(scene.column(table, "word", "day", *NUMERIC))
    columns = listing([column.words for column in shown])
    text = scene.say(*_LIST, columns=columns, noun=table.noun, plural=table.plural, where=scene.where(clause))
    what = ", ".join(column.name for column in shown)
    wrong = [select(what, table.name, condition) for condition in clause.wrong]
    used = [clause.column, *(column.name for column in shown)]
    if other := scene.column_or_none(table, "word", *NUMERIC, without=used):
        instead = ", ".join([*(column.name for column in shown[:-1]), other.name])
        wrong.insert(0, select(instead, table.name, clause.sql))
    wrong.append(select(what, table.name))
    return Draft(text, select(what, table.name, clause.sql), tuple(wrong), (table.name,))


def _top_n(scene: Scene) -> Draft:
    table = scene.table()
    key = scene.column(table, *NUMERIC, nullable=False)
    label = table.label
    n = scene.draws.between(1, 4)
    rising = scene.draws.chance(0.5)
    end, first = ("lowest", "lowest first") if rising else ("highest", "highest first")
    words = {"label": label.words, "n": n, "noun": table.noun, "plural": table.plural, "key": key.words, "end": end}
    if n == 1:
        text = scene.say(
            "What is the {label} of the {noun} with the {end} {key}?",
            "Which {noun} has the {end} {key}? Give the {label}.",
            "Give the {label} of the {noun} with the {end} {key}.",
            **words,
        )
    else:
        text = scene.say(
            "List the {label} of the {n} {plural} with the {end} {key}, {first}.",
            "Which {n} {plural} have the {end} {key}? Give the {label}, {first}.",
            "Show the {label} of the {n} {plural} with the {end} {key}, {first}.",
            first=first,
            **words,
        )
    up, down = key.name, f"{key.name} DESC"
    order, flipped = (up, down) if rising else (down, up)
    wrong = [select(label.name, table.name, "", f"ORDER BY {flipped} LIMIT {n}")]
    if other := scene.column_or_none(table, *NUMERIC, without=(key.name,)):
        instead = other.name if rising else f"{other.name} DESC"
        wrong.append(select(label.name, table.name, "", f"ORDER BY {instead} LIMIT {n}"))
    wrong.append(select(label.name, table.name, "", f"ORDER BY {order} LIMIT {n + 1}"))
    keys = select(key.name, table.name, "", f"ORDER BY {order} LIMIT {n + 1}")
    gold = select(label.name, table.name, "", f"ORDER BY {order} LIMIT {n}")
    return Draft(text, gold, tuple(wrong), (table.name,), keys)


def _sorted(scene: Scene) -> Draft:
    table = scene.table()
    label = table.label
    clause = scene.clause(table)
    if label.role == "label" and scene.draws.chance(0.5):
        key, rising = label, True
        how = scene.say("in alphabetical order", "sorted by {key}", key=key.words)
    else:
        key, rising = scene.column(table, *NUMERIC, nullable=False), scene.draws.chance(0.5)
        how = f"sorted by {key.words} from {'low to high' if rising else 'high to low'}"
    text = scene.say(
        "List the {label} of every {noun} {where}, {how}.",
        "Show the {label} of all {plural} {where}, {how}.",
        "Give the {label} of each {noun} {where}, {how}.",
        label=label.words, noun=table.noun, plural=table.plural, where=scene.where(clause), how=how,
    )  # fmt: skip
    up, down = f"ORDER BY {key.name}", f"ORDER BY {key.name} DESC"
    order, flipped = (up, down) if rising else (down, up)
    wrong = (
        select(label.name, table.name, clause.sql, flipped),
        select(label.name, table.name, clause.wrong[0], order),
        select(label.name, table.name, clause.sql),
    )
    keys = select(key.name, table.name, clause.sql, order)
    return Draft(text, select(label.name, table.name, clause.sql, order), wrong, (table.name,), keys)


def _distinct(scene: Scene) -> Draft:
    table = scene.table()
    column = scene.column(table, "word", "ordinal", nullable=False)
    where, text_where = "", ""
    if scene.draws.chance(0.4):
        clause = scene.clause_on(table, scene.column(table, "word", *NUMERIC, without=(column.name,)))
        where, text_where = clause.sql, " " + scene.where(clause)
    name = column.name
    words = {"column": column.words, "noun": table.noun, "plural": table.plural, "where": text_where}
    if scene.draws.chance(0.5):
        text = scene.say(
            "How many different {column} values do the {plural}{where} have?",
            "Count the different {column} values of the {plural}{where}.",
            "What is the number of different {column} values of {plural}{where}?",
            **words,
        )
        whats = [f"COUNT(DISTINCT {name})", f"COUNT({name})"]
        other = scene.column_or_none(table, "word", *NUMERIC, without=(name,))
        whats.append(f"COUNT(DISTINCT {other.name})" if other else "MAX(id)")
    else:
        text = scene.say(
            "List the different {column} values of the {plural}{where}, each once.",
            "Which different {column} values do the {plural}{where} have?",
            "Show every {column} value of the {plural}{where} once.",
            **words,
        )
        whats = [f"DISTINCT {name}", name, f"COUNT(DISTINCT {name})"]
    gold, *wrong = [select(what, table.name, where) for what in whats]
    if where:
        wrong.append(select(whats[0], table.name))
    return Draft(text, gold, tuple(wrong), (table.name,))


def _null(scene: Scene) -> Draft:
    table = scene.table()
    column = scene.column(table, "word", *NUMERIC, nullable=True)
    name = column.name
    if scene.draws.chance(0.5):
        words, sql, flipped = scene.say("missing", "unknown"), f"{name} IS NULL", f"{name} IS NOT NULL"
    else:
        words, sql, flipped = scene.say("known", "not missing"), f"{name} IS NOT NULL", f"{name} IS NULL"
    return _ask(scene, table, Clause(f"{column.words} {column.verb} {words}", sql, (flipped, f"{name} = NULL"), name))


def _between(scene: Scene) -> Draft:
    table = scene.table()
    column = scene.column(table, *NUMERIC)
    values = round_ones(scene.distinct(table, column, 4))
    at = scene.draws.below(len(values) - 1)
    low, high = literal(values[at]), literal(values[scene.draws.between(at + 1, len(values) - 1)])
    name = column.name
    wrong = (f"{name} > {low} AND {name} < {high}", f"{name} NOT BETWEEN {low} AND {high}")
    text = f"{column.words} {column.verb} between {low} and {high} inclusive"
    return _ask(scene, table, Clause(text, f"{name} BETWEEN {low} AND {high}", wrong, name))


def _like(scene: Scene) -> Draft:
    table = scene.table()
    column = scene.column(table, "label", "word", nullable=False)
    value = str(scene.draws.pick(scene.distinct(table, column, 2)))
    name = column.name
    size = scene.draws.between(1, 2)
    form = scene.draws.below(3)
    if form == 0:
        part, words, pattern, other = value[:size], "starts with", "{}%", "%{}"
    elif form == 1:
        part, words, pattern, other = value[-size:], "ends with", "%{}", "{}%"
    else:
        at = scene.draws.between(1, len(value) - 2)
        part, words, pattern, other = value[at : at + 2], "contains", "%{}%", "{}%"
    wrong = (f"{name} LIKE '{other.format(part)}'", f"{name} = '{part}'")
    clause = Clause(f"{column.words} {words} '{part}'", f"{name} LIKE '{pattern.format(part)}'", wrong, name)
    draft = _ask(scene, table, clause)
    # The text does not say whether case matters, so it must not.
    cased = draft.gold.replace(clause.sql, f"{name} GLOB '{pattern.replace('%', '*').format(part)}'")
    return Draft(draft.text, draft.gold, draft.wrong, draft.tables, same=(cased,))


def _ask(scene: Scene, table: Table, clause: Clause) -> Draft:
    return _count_of(scene, table, clause) if scene.draws.chance(0.5) else _list_of(scene, table, clause)


BUILDERS: dict[str, Builder] = {
    "count": _count,
    "count_where": _count_where,
    "aggregate": _aggregate,
    "aggregate_where": _aggregate_where,
    "min_max": _min_max,
    "list_where": _list_where,
    "top_n": _top_n,
    "sorted": _sorted,
    "distinct": _distinct,
    "null": _null,
    "between": _between,
    "like": _like,
}
