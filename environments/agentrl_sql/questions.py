"""Questions with the SQL that answers them, by level and kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl import TaskError, did_you_mean
from agentrl_sql import questions_groups, questions_joins, questions_nested, questions_sets, questions_single
from agentrl_sql.draws import Draws
from agentrl_sql.questions_parts import Builder, Scene, Unfit
from agentrl_sql.schema import Database, Schema

_BUILDERS: Mapping[int, Mapping[str, Builder]] = {
    1: questions_single.BUILDERS,
    2: {**questions_joins.BUILDERS, **questions_groups.BUILDERS},
    3: {**questions_nested.BUILDERS, **questions_sets.BUILDERS},
}

KINDS: Mapping[int, tuple[str, ...]] = {level: tuple(builders) for level, builders in _BUILDERS.items()}
"""The kinds of question of each level: 1 one table, 2 joins and groups, 3 nested or in several steps."""

LEVEL_OF: Mapping[str, int] = {kind: level for level, kinds in KINDS.items() for kind in kinds}
"""The level of each kind."""

_NEEDS: Mapping[str, Callable[[Schema], bool]] = {"two_joins": questions_joins.has_crossing}

_TRIES = 200


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one database.

    Attributes:
        text: In words that fix the answer: which columns, which order, what counts.
        gold_sql: The SQL whose result is the answer.
        level: 1, 2 or 3.
        kind: What sort of question, one of `KINDS[level]`.
        tables: Names of the tables that the gold reads.
        ordered: Whether the order of the rows is part of the answer.
        wrong: 2 to 5 queries with a wrong aggregate, column, comparison or value.
        keys_sql: Where the gold orders: SQL of the order keys, up to one row past a limit, which must all be different;
            else empty.
        same_sql: Other fair readings of the text, which must give what the gold gives.
    """

    text: str
    gold_sql: str
    level: int
    kind: str
    tables: tuple[str, ...]
    ordered: bool
    wrong: tuple[str, ...]
    keys_sql: str = ""
    same_sql: tuple[str, ...] = ()


def fits(kind: str, schema: Schema) -> bool:
    """Whether the tables of a schema allow this kind of question at all."""
    return kind not in _NEEDS or _NEEDS[kind](schema)


def make_question(database: Database, level: int, draws: Draws, kind: str | None = None) -> Question:
    """Draws a question. It is not yet checked: `questions_check` says whether it may be asked.

    Args:
        database: What is asked about; literals in the question come from its rows.
        level: 1, 2 or 3.
        draws: The stream; it moves on.
        kind: One of `KINDS[level]`; None draws one.

    Raises:
        TaskError: If there is no such level or kind, or this database allows no such question.
    """
    if level not in _BUILDERS:
        raise TaskError(f"expected level 1, 2 or 3, found {level!r}.")
    builders = _BUILDERS[level]
    if kind is not None and kind not in builders:
        raise TaskError(f"level {level} has no kind {kind!r}.{did_you_mean(kind, builders)}")
    for _ in range(_TRIES):
        chosen = kind or draws.pick(KINDS[level])
        try:
            draft = builders[chosen](Scene(database, draws))
        except Unfit:
            continue
        wrong = tuple(dict.fromkeys(draft.wrong))[:5]
        ordered = bool(draft.keys)
        return Question(draft.text, draft.gold, level, chosen, draft.tables, ordered, wrong, draft.keys, draft.same)
    raise TaskError(f"domain {database.schema.domain!r} allows no question of kind {kind or level!r}: use another.")
