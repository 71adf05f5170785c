"""Whether a question may be asked: its answer must be one, informative, and not to be had by a wrong query."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from types import TracebackType
from typing import Literal, Self

from agentrl_sql.questions import Question
from agentrl_sql.schema import Database, Row

Rejection = Literal["vacuous", "null", "constant", "tied", "unstable", "ambiguous", "weak"]
"""Why a question is drawn again: `vacuous` the answer is empty or a lone 0; `null` there is NULL in an answer;
`constant` all databases give one answer; `tied` two rows share an order key; `unstable` the answer depends on the order
of the scan; `ambiguous` another fair reading gives another answer; `weak` a wrong query gives the right answer
everywhere."""


class Worlds:
    """The base database and its hidden siblings in memory, for asking the same thing of each.

    Args:
        databases: The base first.
    """

    def __init__(self, databases: Sequence[Database]) -> None:
        self._connections = [sqlite3.connect(":memory:") for _ in databases]
        for connection, database in zip(self._connections, databases, strict=True):
            database.build(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()

    def rows(self, sql: str) -> list[list[Row]]:
        """What a query gives on each database, the base first."""
        return [connection.execute(sql).fetchall() for connection in self._connections]

    def reversed_rows(self, sql: str) -> list[list[Row]]:
        """The same with tables scanned backwards."""
        for connection in self._connections:
            connection.execute("PRAGMA reverse_unordered_selects = 1")
        found = self.rows(sql)
        for connection in self._connections:
            connection.execute("PRAGMA reverse_unordered_selects = 0")
        return found


def check(question: Question, worlds: Worlds) -> Rejection | None:
    """Says why a question may not be asked of these databases; None if it may."""
    gold = worlds.rows(question.gold_sql)
    if _is_vacuous(gold[0]) or all(_is_vacuous(rows) for rows in gold[1:]):
        return "vacuous"
    if any(cell is None for rows in gold for row in rows for cell in row):
        return "null"
    if all(same_rows(gold[0], rows, question.ordered) for rows in gold[1:]):
        return "constant"
    if question.keys_sql and any(len(set(keys)) < len(keys) for keys in worlds.rows(question.keys_sql)):
        return "tied"
    if not _agree(gold, worlds.reversed_rows(question.gold_sql), question.ordered):
        return "unstable"
    if not all(_agree(gold, worlds.rows(sql), question.ordered) for sql in question.same_sql):
        return "ambiguous"
    if any(_agree(gold, worlds.rows(sql), question.ordered) for sql in question.wrong):
        return "weak"
    return None


def same_rows(left: Sequence[Row], right: Sequence[Row], ordered: bool) -> bool:
    """Whether two results agree under some order of the columns: as lists where `ordered`, else as bags."""
    if len(left) != len(right) or (left and len(left[0]) != len(right[0])):
        return False
    if not left:
        return True
    for columns in permutations(range(len(left[0]))):
        moved = [tuple(row[at] for at in columns) for row in right]
        if (list(left) == moved) if ordered else (Counter(left) == Counter(moved)):
            return True
    return False


def _agree(left: list[list[Row]], right: list[list[Row]], ordered: bool) -> bool:
    return all(same_rows(one, other, ordered) for one, other in zip(left, right, strict=True))


def _is_vacuous(rows: Sequence[Row]) -> bool:
    return not rows or all(cell is None for row in rows for cell in row) or list(rows) == [(0,)]
