"""Level 2, the part on several tables: joins, and groups of joined rows."""

from __future__ import annotations

from agentrl_sql.questions_parts import (
    AGGREGATES,
    COMPARABLE,
    OTHER_AGGREGATES,
    Builder,
    Draft,
    Link,
    Scene,
    Unfit,
    one,
    select,
    which,
)
from agentrl_sql.schema import NUMERIC, Schema


def _join_count(scene: Scene) -> Draft:
    link = scene.link()
    clause = scene.clause(link.parent, f"{link.parent.name}.", roles=COMPARABLE)
    text = scene.say(
        "How many {plural} have {a_parent} whose {clause}?",
        "How many {plural} are there whose {parent}'s {clause}?",
        "Count the {plural} whose {parent}'s {clause}.",
        "What is the number of {plural} that belong to {a_parent} whose {clause}?",
        plural=link.child.plural, a_parent=one(link.parent.noun), parent=link.parent.noun, clause=clause.text,
    )  # fmt: skip
    wrong = [select("COUNT(*)", link.child_first, condition) for condition in clause.wrong]
    wrong += [
        select(f"COUNT(DISTINCT {link.parent.name}.id)", link.child_first, clause.sql),
        select("COUNT(*)", link.child.name),
    ]
    return Draft(text, select("COUNT(*)", link.child_first, clause.sql), tuple(wrong), link.tables)


def _join_aggregate(scene: Scene) -> Draft:
    link = scene.link()
    function, column = scene.aggregate(link.child, *AGGREGATES)
    clause = scene.clause(link.parent, f"{link.parent.name}.", roles=COMPARABLE)
    text = scene.say(
        "What is the {value} of the {plural} whose {parent}'s {clause}?",
        "Give the {value} of all {plural} that have {a_parent} whose {clause}.",
        "Find the {value} over the {plural} that belong to {a_parent} whose {clause}.",
        value=scene.aggregate_words(function, column), plural=link.child.plural,
        parent=link.parent.noun, a_parent=one(link.parent.noun), clause=clause.text,
    )  # fmt: skip
    name = f"{link.child.name}.{column.name}"
    wrong = [
        select(f"{OTHER_AGGREGATES[function][0]}({name})", link.child_first, clause.sql),
        select(f"{function}({name})", link.child_first, clause.wrong[0]),
        select(f"{function}({name})", link.child.name),
    ]
    if other := scene.column_or_none(link.child, *NUMERIC, without=(column.name,)):
        wrong.append(select(f"{function}({link.child.name}.{other.name})", link.child_first, clause.sql))
    return Draft(text, select(f"{function}({name})", link.child_first, clause.sql), tuple(wrong), link.tables)


def _join_list(scene: Scene) -> Draft:
    link = scene.link(labelled=True)
    child, parent = link.child, link.parent
    clause = scene.clause(child, f"{child.name}.", roles=COMPARABLE)
    text = scene.say(
        "For every {child} whose {clause}, list the {own} and the {label} of the {parent}.",
        "Show the {own} and the {parent}'s {label} for each {child} whose {clause}.",
        child=child.noun, clause=clause.text, own=child.label.words, label=parent.label.words, parent=parent.noun,
    )  # fmt: skip
    if link.nullable:
        text += f" Leave out {child.plural} without {one(parent.noun)}."
    what = f"{child.name}.{child.label.name}, {parent.name}.{parent.label.name}"
    wrong = [select(what, link.child_first, condition) for condition in clause.wrong]
    wrong.append(select(what, link.child_first))
    if other := scene.column_or_none(parent, "word", *NUMERIC):
        instead = f"{child.name}.{child.label.name}, {parent.name}.{other.name}"
        wrong.append(select(instead, link.child_first, clause.sql))
    return Draft(text, select(what, link.child_first, clause.sql), tuple(wrong), link.tables)


def _join_distinct(scene: Scene) -> Draft:
    link = scene.link(labelled=True)
    clause = scene.clause(link.child, f"{link.child.name}.", roles=COMPARABLE)
    text = scene.say(
        "List the {label} of every {parent} that has at least one {child} whose {clause}, each once.",
        "Which {parents} have {a_child} whose {clause}? Give each {label} once.",
        label=link.parent.label.words, parent=link.parent.noun, parents=link.parent.plural,
        child=link.child.noun, a_child=one(link.child.noun), clause=clause.text,
    )  # fmt: skip
    what = f"{link.parent.name}.{link.parent.label.name}"
    wrong = (
        select(what, link.parent_first, clause.sql),
        select(f"DISTINCT {what}", link.parent_first, clause.wrong[0]),
        select(f"DISTINCT {what}", link.parent_first),
    )
    return Draft(text, select(f"DISTINCT {what}", link.parent_first, clause.sql), wrong, link.tables)


def _two_joins(scene: Scene) -> Draft:
    """A child with two parents, a condition on each."""
    crossings = [
        (first, second)
        for first in scene.links()
        for second in scene.links()
        if first.child is second.child and first.key != second.key
    ]
    if not crossings:
        raise Unfit
    first, second = scene.draws.pick(crossings)
    child = first.child
    source = f"{first.child_first} JOIN {second.parent.name} ON {second.on}"
    this = scene.clause(first.parent, f"{first.parent.name}.", roles=COMPARABLE)
    that = scene.clause(second.parent, f"{second.parent.name}.", roles=COMPARABLE)
    number = scene.column_or_none(child, "amount")
    if number is None or scene.draws.chance(0.5):
        what, asked = "COUNT(*)", "number"
        instead = f"COUNT(DISTINCT {child.name}.{first.key})"
    else:
        what, asked = f"SUM({child.name}.{number.name})", scene.aggregate_words("SUM", number)
        instead = f"AVG({child.name}.{number.name})"
    text = scene.say(
        "What is the {asked} of {plural} whose {first}'s {this} and whose {second}'s {that}?",
        "Give the {asked} of the {plural} that have {a_first} whose {this} and {a_second} whose {that}.",
        asked=asked, plural=child.plural, this=this.text, that=that.text,
        first=first.parent.noun, second=second.parent.noun,
        a_first=one(first.parent.noun), a_second=one(second.parent.noun),
    )  # fmt: skip
    wrong = (
        select(instead, source, f"{this.sql} AND {that.sql}"),
        select(what, source, f"{this.sql} OR {that.sql}"),
        select(what, source, f"{this.wrong[0]} AND {that.sql}"),
        select(what, first.child_first, this.sql),
    )
    gold = select(what, source, f"{this.sql} AND {that.sql}")
    return Draft(text, gold, wrong, (child.name, first.parent.name, second.parent.name))


def has_crossing(schema: Schema) -> bool:
    """Whether some table refers to two others, as `two_joins` needs."""
    return any(len(table.foreign_keys) >= 2 for table in schema.tables)


def _join_group(scene: Scene) -> Draft:
    link = scene.link(labelled=True)
    label = f"{link.parent.name}.{link.parent.label.name}"
    clause = scene.maybe_clause(link.child, f"{link.child.name}.")
    measured, asked, instead = _measured(scene, link, "number of", "total {}")
    asked += f" {'such ' if clause else ''}{link.child.plural}"
    text = scene.say(
        "For each {parent} with at least one {child}{which}, give the {label} and the {asked}.",
        "Show the {label} of every {parent} that has {a_child}{which}, and the {asked}.",
        parent=link.parent.noun, child=link.child.noun, a_child=one(link.child.noun), which=which(clause),
        label=link.parent.label.words, asked=asked,
    )  # fmt: skip
    where, tail = clause.sql if clause else "", f"GROUP BY {label}"
    wrong = [
        select(f"{label}, {instead}", link.parent_first, where, tail),
        select(f"{label}, MAX({link.child.name}.id)", link.parent_first, where, tail),
    ]
    if clause:
        wrong.append(select(f"{label}, {measured}", link.parent_first, "", tail))
    else:
        wrong.append(select(f"{label}, {measured}", link.outer, "", tail))
    return Draft(text, select(f"{label}, {measured}", link.parent_first, where, tail), tuple(wrong), link.tables)


def _measured(scene: Scene, link: Link, count: str, total: str) -> tuple[str, str, str]:
    """What is found for each parent: how many children, or the sum of a number of theirs.

    Args:
        scene: The database and the draws.
        link: Child and parent.
        count: Words for the number of children.
        total: Words for a sum, with `{}` for the column.

    Returns:
        The SQL aggregate, the words for it, and a wrong aggregate.
    """
    number = scene.column_or_none(link.child, "amount", nullable=False)
    if number is None or scene.draws.chance(0.5):
        return "COUNT(*)", count, f"COUNT(DISTINCT {link.parent.name}.id)"
    name = f"{link.child.name}.{number.name}"
    return f"SUM({name})", f"{total.format(number.words)} of", f"MAX({name})"


def _join_having(scene: Scene) -> Draft:
    link = scene.link(labelled=True)
    n = scene.draws.pick(scene.counts(link.child, link.key))
    at, words = scene.draws.pick(((">", "more than"), (">=", "at least")))
    text = scene.say(
        "Which {parents} have {words} {n} {children}? List the {label}.",
        "List the {label} of every {parent} that has {words} {n} {children}.",
        "Give the {label} of all {parents} with {words} {n} {children}.",
        parents=link.parent.plural, parent=link.parent.noun, words=words, n=n,
        children=link.child.plural, label=link.parent.label.words,
    )  # fmt: skip
    label = f"{link.parent.name}.{link.parent.label.name}"
    tail = f"GROUP BY {label} HAVING COUNT(*)"
    wrong = (
        select(label, link.parent_first, "", f"{tail} {'>=' if at == '>' else '>'} {n}"),
        select(label, link.parent_first, "", f"{tail} < {n}"),
        select(f"DISTINCT {label}", link.parent_first),
    )
    return Draft(text, select(label, link.parent_first, "", f"{tail} {at} {n}"), wrong, link.tables)


def _join_top(scene: Scene) -> Draft:
    link = scene.link(labelled=True)
    label = f"{link.parent.name}.{link.parent.label.name}"
    clause = scene.maybe_clause(link.child, f"{link.child.name}.")
    measured, asked, instead = _measured(scene, link, "most", "highest total {}")
    text = scene.say(
        "Which {parent} has the {asked} {children}{which}? Give the {label}.",
        "Give the {label} of the {parent} with the {asked} {children}{which}.",
        parent=link.parent.noun, asked=asked, children=link.child.plural, which=which(clause),
        label=link.parent.label.words,
    )  # fmt: skip
    where, tail = clause.sql if clause else "", f"GROUP BY {label} ORDER BY"
    wrong = (
        select(label, link.parent_first, where, f"{tail} {measured} LIMIT 1"),
        select(label, link.parent_first, where, f"{tail} {instead} DESC, {label} LIMIT 1"),
        select(label, link.parent_first, where, f"{tail} {measured} DESC LIMIT 2"),
    )
    gold = select(label, link.parent_first, where, f"{tail} {measured} DESC LIMIT 1")
    keys = select(measured, link.parent_first, where, f"{tail} {measured} DESC LIMIT 2")
    return Draft(text, gold, wrong, link.tables, keys)


def _left_join(scene: Scene) -> Draft:
    link = scene.link(labelled=True)
    child, label = link.child, f"{link.parent.name}.{link.parent.label.name}"
    clause = scene.maybe_clause(link.parent, f"{link.parent.name}.")
    text = scene.say(
        "For every {parent}{which}, give the {label} and the number of {children}, 0 where there are none.",
        "How many {children} does each {parent}{which} have? Give the {label} and the number, 0 where there are none.",
        "Count the {children} of each {parent}{which}. Give the {label} and the count, also where it is 0.",
        parent=link.parent.noun, children=child.plural, label=link.parent.label.words, which=which(clause),
    )  # fmt: skip
    where, tail = clause.sql if clause else "", f"GROUP BY {label}"
    wrong = [
        select(f"{label}, COUNT(*)", link.outer, where, tail),
        select(f"{label}, COUNT(*)", link.parent_first, where, tail),
        select(f"{label}, MAX({child.name}.id)", link.outer, where, tail),
    ]
    if clause:
        wrong.append(select(f"{label}, COUNT({child.name}.id)", link.outer, "", tail))
    gold = select(f"{label}, COUNT({child.name}.id)", link.outer, where, tail)
    return Draft(text, gold, tuple(wrong), link.tables)


BUILDERS: dict[str, Builder] = {
    "join_count": _join_count,
    "join_aggregate": _join_aggregate,
    "join_list": _join_list,
    "join_distinct": _join_distinct,
    "two_joins": _two_joins,
    "join_group": _join_group,
    "join_having": _join_having,
    "join_top": _join_top,
    "left_join": _left_join,
}
