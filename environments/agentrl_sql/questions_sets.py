"""Level 3, part two: what is missing, what is in both, what is compared with a count over all."""

from __future__ import annotations

from agentrl_sql.questions_parts import (
    COMPARABLE,
    Builder,
    Draft,
    Link,
    Scene,
    one,
    select,
    which,
)


def _exists(link: Link, condition: str = "") -> str:
    where = f"{link.on} AND {condition}" if condition else link.on
    return f"EXISTS ({select('1', link.child.name, where)})"


def _without(scene: Scene) -> Draft:
    """NOT EXISTS, and the NULL in `NOT IN (SELECT ...)`."""
    link = scene.link(labelled=True)
    child, parent, label = link.child, link.parent, link.parent.label.name
    clause = scene.maybe_clause(child, f"{child.name}.")
    text = scene.say(
        "List the {label} of every {parent} that has no {child}{where}.",
        "Which {parents} do not have any {child}{where}? Give the {label}.",
        label=parent.label.words, parent=parent.noun, parents=parent.plural, child=child.noun,
        where=which(clause),
    )  # fmt: skip
    condition = clause.sql if clause else ""
    wrong = [select(label, parent.name, _exists(link, condition))]
    if clause:
        wrong += [
            select(label, parent.name, f"NOT {_exists(link, clause.wrong[0])}"),
            select(label, parent.name, f"NOT {_exists(link)}"),
        ]
    else:
        wrong.append(select(label, parent.name, f"id NOT IN ({select('id', child.name)})"))
    if link.nullable:
        wrong.append(select(label, parent.name, f"id NOT IN ({select(link.key, child.name, condition)})"))
    return Draft(text, select(label, parent.name, f"NOT {_exists(link, condition)}"), tuple(wrong), link.tables)


def _every(scene: Scene) -> Draft:
    """All children meet a condition, and there is at least one."""
    link = scene.link(labelled=True)
    child, parent, label = link.child, link.parent, link.parent.label.name
    column = scene.column(child, *COMPARABLE, nullable=False)
    clause = scene.clause_on(child, column, f"{child.name}.")
    text = scene.say(
        "List the {label} of every {parent} that has at least one {child} and only {children} whose {clause}.",
        "Which {parents} have {a_child}, and only {children} whose {clause}? Give the {label}.",
        label=parent.label.words, parent=parent.noun, parents=parent.plural, child=child.noun, children=child.plural,
        a_child=one(child.noun), clause=clause.text,
    )  # fmt: skip
    other = f"NOT ({clause.sql})"
    wrong = (
        select(label, parent.name, _exists(link, clause.sql)),
        select(label, parent.name, f"NOT {_exists(link, other)}"),
        select(label, parent.name, f"{_exists(link)} AND NOT {_exists(link, clause.sql)}"),
    )
    gold = select(label, parent.name, f"{_exists(link)} AND NOT {_exists(link, other)}")
    return Draft(text, gold, wrong, link.tables)


def _both(scene: Scene) -> Draft:
    return _combined(
        scene,
        "INTERSECT",
        "List the {label} of every {parent} that has {a_child} whose {has} and (maybe another) whose {also}.",
        "Which {parents} have {a_child} whose {has} and one, maybe another, whose {also}? Give each {label} once.",
    )


def _except(scene: Scene) -> Draft:
    return _combined(
        scene,
        "EXCEPT",
        "List the {label} of every {parent} that has {a_child} whose {has} but none whose {also}.",
        "Which {parents} have {a_child} whose {has} but no {child} whose {also}? Give each {label} once.",
    )


def _combined(scene: Scene, operation: str, *templates: str) -> Draft:
    link = scene.link(labelled=True)
    child, parent = link.child, link.parent
    first, second = (scene.clause(child, f"{child.name}.", roles=COMPARABLE) for _ in range(2))
    text = scene.say(
        *templates, label=parent.label.words, parent=parent.noun, parents=parent.plural, child=child.noun,
        a_child=one(child.noun), has=first.text, also=second.text,
    )  # fmt: skip
    label = f"{parent.name}.{parent.label.name}"

    def part(condition: str) -> str:
        return select(label, link.parent_first, condition)

    together = f"{first.sql} AND {second.sql}" if operation == "INTERSECT" else f"{first.sql} AND NOT ({second.sql})"
    wrong = (
        select(f"DISTINCT {label}", link.parent_first, together),
        f"{part(first.sql)} {'EXCEPT' if operation == 'INTERSECT' else 'INTERSECT'} {part(second.sql)}",
        f"{part(first.wrong[0])} {operation} {part(second.sql)}",
        select(f"DISTINCT {label}", link.parent_first, first.sql),
    )
    return Draft(text, f"{part(first.sql)} {operation} {part(second.sql)}", wrong, link.tables)


def _either(scene: Scene) -> Draft:
    link = scene.link(labelled=True)
    child, parent = link.child, link.parent
    own = scene.clause(parent, f"{parent.name}.")
    has = scene.clause(child, f"{child.name}.", roles=COMPARABLE)
    text = scene.say(
        "List the {label} of every {parent} whose {own} or that has {a_child} whose {has}, each once.",
        "Which {parents} are there whose {own}, or that have {a_child} whose {has}, or both? Give each {label} once.",
        label=parent.label.words, parent=parent.noun, parents=parent.plural, own=own.text, has=has.text,
        a_child=one(child.noun),
    )  # fmt: skip
    label = f"{parent.name}.{parent.label.name}"
    first = select(label, parent.name, own.sql)
    second = select(label, link.parent_first, has.sql)
    wrong = (
        f"{first} INTERSECT {second}",
        f"{first} UNION ALL {second}",
        select(label, parent.name, own.sql),
        f"{first} UNION {select(label, link.parent_first, has.wrong[0])}",
    )
    return Draft(text, f"{first} UNION {second}", wrong, link.tables)


def _per_parent(link: Link, what: str, condition: str = "", tail: str = "") -> str:
    """Something of the children of each parent that has any, as a subquery."""
    known = f"{link.key} IS NOT NULL" if link.nullable else ""
    where = " AND ".join(part for part in (known, condition) if part)
    return select(what, link.child.name, where, f"GROUP BY {link.key}{tail}")


def _average_count(scene: Scene) -> Draft:
    link = scene.link()
    child, parent = link.child, link.parent
    clause = scene.maybe_clause(child)
    number = scene.column_or_none(child, "amount", nullable=False)
    if number is None or scene.draws.chance(0.5):
        measured, asked = "COUNT(*)", f"number of {child.plural}"
    else:
        measured, asked = f"SUM({number.name})", f"total {number.words} of {child.plural}"
    function, words = scene.draws.pick((("AVG", "average"), ("MAX", "highest"), ("MIN", "lowest")))
    text = scene.say(
        "What is the {words} {asked}{which} per {parent}, over the {parents} with at least one?",
        "Take the {asked}{which} for each {parent} that has any. What is the {words} of these numbers?",
        words=words, asked=asked, parent=parent.noun, parents=parent.plural, which=which(clause),
    )  # fmt: skip
    others = {"AVG": ("MAX", "MIN"), "MAX": ("AVG", "MIN"), "MIN": ("AVG", "MAX")}[function]
    condition = clause.sql if clause else ""

    def answer(chosen: str) -> str:
        return select(f"{chosen}(n)", f"({_per_parent(link, f'{measured} AS n', condition)})")

    wrong = (*(answer(other) for other in others), select(measured, child.name, condition))
    return Draft(text, answer(function), wrong, (child.name,))


def _count_having(scene: Scene) -> Draft:
    link = scene.link()
    child, parent = link.child, link.parent
    n = scene.draws.pick(scene.counts(child, link.key))
    at, words, near = scene.draws.pick(((">", "more than", ">="), (">=", "at least", ">")))
    text = scene.say(
        "How many {parents} have {words} {n} {children}?",
        "What is the number of {parents} with {words} {n} {children}?",
        "Count the {parents} that have {words} {n} {children}.",
        parents=parent.plural, words=words, n=n, children=child.plural,
    )  # fmt: skip

    def answer(condition: str) -> str:
        return select("COUNT(*)", f"({_per_parent(link, link.key, '', f' HAVING COUNT(*) {condition}')})")

    wrong = (answer(f"{near} {n}"), answer(f"< {n}"), select(f"COUNT(DISTINCT {link.key})", child.name))
    return Draft(text, answer(f"{at} {n}"), wrong, (child.name,))


def _busier(scene: Scene) -> Draft:
    """More children than the parents with children have on average."""
    link = scene.link(labelled=True)
    child, parent = link.child, link.parent
    clause = scene.maybe_clause(parent, f"{parent.name}.")
    at, words = scene.draws.pick(((">", "more"), ("<", "fewer")))
    text = scene.say(
        "List the {label} of every {parent}{which} that has {children}, and {words} than the average of all {parents}"
        " that have any.",
        "Which {parents}{which} have {a_child}, and {words} {children} than the average of all {parents} with at least"
        " one? Give the {label}.",
        label=parent.label.words, parent=parent.noun, parents=parent.plural, children=child.plural,
        a_child=one(child.noun), words=words, which=which(clause),
    )  # fmt: skip
    label = f"{parent.name}.{parent.label.name}"
    where = clause.sql if clause else ""
    counts = _per_parent(link, "COUNT(*) AS n")
    mean = f"({select('AVG(n)', f'({counts})')})"

    def answer(compared: str) -> str:
        return select(label, link.parent_first, where, f"GROUP BY {label} HAVING COUNT(*) {compared}")

    wrong = (
        answer(f"{'<' if at == '>' else '>'} {mean}"),
        answer(f"{at} ({select('COUNT(*)', child.name)})"),
        select(f"DISTINCT {label}", link.parent_first, where),
    )
    return Draft(text, answer(f"{at} {mean}"), wrong, link.tables)


BUILDERS: dict[str, Builder] = {
    "without": _without,
    "every": _every,
    "both": _both,
    "except": _except,
    "either": _either,
    "average_count": _average_count,
    "count_having": _count_having,
    "busier": _busier,
}
