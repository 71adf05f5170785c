"""Whether two query results are the same answer.

The rules, in the order in which they are applied:
1. A prediction that was cut off at the row cap is wrong.
2. Both must have the same number of columns. If the output names are the same set without repeats, names say which
   column is which; else positions do, and failing that one permutation of the columns that serves all rows.
3. Cells are typed. NULL equals NULL; text is not a number; integers are compared exactly, as are text and blobs; where
   a float is involved, |x - y| <= max(1e-6 max(|x|, |y|), 1e-9).
4. Rows form a bag: repeats count. Tolerance is not transitive, so rows are not hashed or sorted but matched: rows whose
   exact cells are equal go into one bucket, and inside it a perfect matching is looked for.
5. Where the gold is ordered, rows come in its order; rows with equal order keys form a bag among themselves.
6. Both empty, or a gold of nothing but NULL, is a match without evidence: `match_vacuous`.

Nothing but the standard library is imported, so that this runs beside the guard in a Worker.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Literal

from agentrl_sql.guard import Cell, Result, Row

RULES_VERSION = 1
"""Stored with every verdict: equal versions decide alike."""

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9
_MOST_PERMUTATIONS = 720

VerdictCode = Literal["match", "match_vacuous", "mismatch", "error", "rejected", "invalid_gold"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison came to.

    Attributes:
        code: The verdict.
        reason: `ok`, `columns_permuted`, `both_empty`, `gold_all_null`, `column_count`, `empty_prediction`, `values`,
            `row_multiplicity`, `row_order`, `accidental_order`, `too_many_rows`, or the reason of a failure.
        mapping: For each column of the gold, the position of the prediction's; empty where none fits.
    """

    code: VerdictCode
    reason: str
    mapping: tuple[int, ...] = ()


def same_result(
    gold: Result, predicted: Result, *, ordered: bool = False, keys: Sequence[Row] | None = None
) -> Verdict:
    """Compares a prediction's result with the gold's.

    Args:
        gold: The right result, whole.
        predicted: The result to judge.
        ordered: Whether the order of the rows matters.
        keys: For each row of the gold, the values that it is ordered by; rows with equal keys may come in any order.
            Without keys the order must be the gold's own.

    Returns:
        `match`, `match_vacuous` or `mismatch`, with the reason.
    """
    if predicted.truncated:
        return Verdict("mismatch", "too_many_rows")
    if len(gold.columns) != len(predicted.columns):
        return Verdict("mismatch", "column_count")
    if not gold.rows and not predicted.rows:
        return Verdict("match_vacuous", "both_empty")
    if not predicted.rows:
        return Verdict("mismatch", "empty_prediction")
    wanted = [tuple(map(_canonical, row)) for row in gold.rows]
    given = [tuple(map(_canonical, row)) for row in predicted.rows]
    mapping = next(_fitting(gold, predicted, wanted, given), None)
    if mapping is None:
        return Verdict("mismatch", _why_not(wanted, given))
    if ordered:
        in_order = (m for m in _fitting(gold, predicted, wanted, given) if _in_order(wanted, _map(given, m), keys))
        mapping = next(in_order, None)
        if mapping is None:
            return Verdict("mismatch", "row_order")
    if all(cell is None for row in wanted for cell in row):
        return Verdict("match_vacuous", "gold_all_null", mapping)
    return Verdict("match", "ok" if mapping == tuple(range(len(mapping))) else "columns_permuted", mapping)


# -- cells ------------------------------------------------------------------------------------------------------------


def _canonical(cell: Cell) -> Cell:
    if isinstance(cell, str):
        return unicodedata.normalize("NFC", cell)
    return int(cell) if isinstance(cell, bool) else cell


def same_cell(x: Cell, y: Cell) -> bool:
    """Rule 3."""
    if isinstance(x, float) or isinstance(y, float):
        return isinstance(x, int | float) and isinstance(y, int | float) and _close(x, y)
    return type(x) is type(y) and x == y


def _close(x: float, y: float) -> bool:
    if x == y or (math.isnan(x) and math.isnan(y)):
        return True
    scale = max(abs(x), abs(y))
    return math.isfinite(scale) and abs(x - y) <= max(RELATIVE_TOLERANCE * scale, ABSOLUTE_TOLERANCE)


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float)


# -- columns ----------------------------------------------------------------------------------------------------------


def _fitting(gold: Result, predicted: Result, wanted: list[Row], given: list[Row]) -> Iterator[tuple[int, ...]]:
    """The column mappings under which the rows are the same bag, the most natural first."""
    for mapping in islice(_mappings(gold, predicted, wanted, given), _MOST_PERMUTATIONS):
        if same_bag(wanted, _map(given, mapping)):
            yield mapping


def _mappings(gold: Result, predicted: Result, wanted: list[Row], given: list[Row]) -> Iterator[tuple[int, ...]]:
    width = len(gold.columns)
    names, other = ([name.lower() for name in result.columns] for result in (gold, predicted))
    if len(set(names)) == width and set(names) == set(other):
        yield tuple(other.index(name) for name in names)
        return
    identity = tuple(range(width))
    yield identity
    if len(wanted) == len(given):
        columns, others = list(zip(*wanted, strict=True)), list(zip(*given, strict=True))
        candidates = [[j for j in range(width) if _same_column(column, others[j])] for column in columns]
        if perfect_matching(candidates):
            yield from (mapping for mapping in _choices(candidates, ()) if mapping != identity)


def _choices(candidates: list[list[int]], chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if len(chosen) == len(candidates):
        yield chosen
        return
    for j in candidates[len(chosen)]:
        if j not in chosen:
            yield from _choices(candidates, (*chosen, j))


def _same_column(column: Row, other: Row) -> bool:
    return same_bag([(cell,) for cell in column], [(cell,) for cell in other])


def _map(rows: list[Row], mapping: tuple[int, ...]) -> list[Row]:
    return [tuple(row[j] for j in mapping) for row in rows]


# -- rows -------------------------------------------------------------------------------------------------------------


def same_bag(wanted: Sequence[Row], given: Sequence[Row]) -> bool:
    """Rule 4, for rows of one width."""
    if len(wanted) != len(given):
        return False
    loose = {j for rows in (wanted, given) for row in rows for j, cell in enumerate(row) if isinstance(cell, float)}
    if not loose:
        return Counter(wanted) == Counter(given)
    buckets: dict[tuple[object, ...], tuple[list[Row], list[Row]]] = {}
    for side, rows in enumerate((wanted, given)):
        for row in rows:
            # Where tolerance may apply, a number stands for any number; everything else must be equal.
            key = tuple(_NUMBER if j in loose and _is_number(cell) else cell for j, cell in enumerate(row))
            buckets.setdefault(key, ([], []))[side].append(row)
    return all(len(left) == len(right) and _all_paired(left, right) for left, right in buckets.values())


_NUMBER = object()


def _all_paired(left: list[Row], right: list[Row]) -> bool:
    """Whether each row of a bucket can be paired with one of its own on the other side."""
    if all(map(_same_row, sorted(left, key=_numbers), sorted(right, key=_numbers))):
        return True
    return perfect_matching([[j for j, row in enumerate(right) if _same_row(mine, row)] for mine in left])


def _numbers(row: Row) -> tuple[float, ...]:
    return tuple(cell for cell in row if isinstance(cell, int | float))


def _same_row(row: Row, other: Row) -> bool:
    return all(map(same_cell, row, other))


def perfect_matching(edges: Sequence[Sequence[int]]) -> bool:
    """Whether each left vertex gets a right vertex of its own (Kuhn's augmenting paths, without recursion).

    Args:
        edges: For each left vertex the right vertices that it may have.
    """
    holder: dict[int, int] = {}
    held: dict[int, int] = {}
    for start in range(len(edges)):
        reached_from: dict[int, int] = {}
        frontier = [start]
        free: int | None = None
        while frontier and free is None:
            i = frontier.pop()
            for j in edges[i]:
                if j not in reached_from:
                    reached_from[j] = i
                    if j not in holder:
                        free = j
                        break
                    frontier.append(holder[j])
        if free is None:
            return False
        while free is not None:  # each on the path takes the vertex it was reached by, and leaves its own
            i = reached_from[free]
            holder[free], held[i], free = i, free, held.get(i)
    return True


def _in_order(wanted: list[Row], given: list[Row], keys: Sequence[Row] | None) -> bool:
    groups: Sequence[object] = keys if keys is not None else range(len(wanted))
    start = 0
    for _, members in groupby(groups):
        end = start + len(list(members))
        if not same_bag(wanted[start:end], given[start:end]):
            return False
        start = end
    return True


def _why_not(wanted: list[Row], given: list[Row]) -> str:
    if len(wanted) != len(given) and set(wanted) == set(given):
        return "row_multiplicity"
    return "values"
