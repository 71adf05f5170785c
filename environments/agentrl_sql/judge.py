"""What the SQL worker answers: runs a query, or judges one against the gold on several databases at once.

The judge: a prediction is right if its result is the gold's on every database, and on at least one of them there is
something to be right about. It must read a table. It must also hold when SQLite scans tables backwards: an order or a
choice of rows that the query does not ask for is an accident.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_sql.compare import RULES_VERSION, Verdict, same_result
from agentrl_sql.guard import Cell, Failure, QueryLimits, Result, Row, run


@dataclass(frozen=True, slots=True)
class Case:
    """What is judged.

    Attributes:
        gold: The SQL whose result is right.
        predicted: The SQL to judge.
        ordered: Whether the order of the rows matters.
        tables: The tables that both may read.
        limits: Bounds of each query.
    """

    gold: str
    predicted: str
    ordered: bool
    tables: Sequence[str]
    limits: QueryLimits = field(default_factory=QueryLimits)


def judge(paths: Sequence[str], case: Case) -> list[Verdict]:
    """One verdict for each database, up to the first that settles it.

    Args:
        paths: The database files; the first is the one that the agent saw.
        case: What is judged.

    Returns:
        The verdicts. The prediction is right if none of them is anything but `match` or `match_vacuous` and at least
        one is `match`. `invalid_gold` comes alone: then nothing can be said of the prediction.
    """
    golds: list[Result] = []
    for path in paths:
        result = run(path, case.gold, case.tables, case.limits)
        if isinstance(result, Failure):
            return [Verdict("invalid_gold", result.reason)]
        if result.truncated:
            return [Verdict("invalid_gold", "too_many_rows")]
        golds.append(result)
    if all(_says_nothing(result) for result in golds):
        return [Verdict("invalid_gold", "vacuous_everywhere")]
    if len(golds) > 1 and all(_equal(golds[0], result, case) for result in golds[1:]):
        return [Verdict("invalid_gold", "same_everywhere")]
    verdicts: list[Verdict] = []
    for path, gold in zip(paths, golds, strict=True):
        verdicts.append(_verdict(path, gold, case))
        if verdicts[-1].code not in ("match", "match_vacuous"):
            break
    return verdicts


def _says_nothing(result: Result) -> bool:
    return all(cell is None for row in result.rows for cell in row)


def _equal(one: Result, other: Result, case: Case) -> bool:
    return same_result(one, other, ordered=case.ordered).code in ("match", "match_vacuous")


def _verdict(path: str, gold: Result, case: Case) -> Verdict:
    result = run(path, case.predicted, case.tables, case.limits)
    if isinstance(result, Failure):
        return Verdict(result.kind, result.reason)
    verdict = same_result(gold, result, ordered=case.ordered)
    if verdict.code == "mismatch":
        return verdict
    if not result.tables:
        return Verdict("mismatch", "reads_no_table")
    backwards = run(path, case.predicted, case.tables, case.limits, reverse_scans=True)
    if isinstance(backwards, Failure):
        return Verdict(backwards.kind, backwards.reason)
    if same_result(gold, backwards, ordered=case.ordered).code == "mismatch":
        return Verdict("mismatch", "accidental_order")
    return verdict


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """The worker's function.

    Args:
        request: `op` is `query` (with `path`, `sql`, `tables`, `shown`) or `judge` (with `paths`, `gold`, `sql`,
            `tables`, `ordered`).

    Returns:
        For a query its result, of which at most `shown` rows, or its failure; for a judgement the verdicts.
    """
    if request["op"] == "query":
        return _query(request)
    case = Case(request["gold"], request["sql"], request["ordered"], request["tables"])
    verdicts = judge(request["paths"], case)
    return {"rules": RULES_VERSION, "verdicts": [[verdict.code, verdict.reason] for verdict in verdicts]}


def _query(request: dict[str, Any]) -> dict[str, Any]:
    result = run(request["path"], request["sql"], request["tables"], QueryLimits())
    if isinstance(result, Failure):
        return {"failure": [result.kind, result.reason, result.text]}
    rows = [list(map(encode_cell, row)) for row in result.rows[: request["shown"]]]
    return {
        "columns": result.columns,
        "rows": rows,
        "n_rows": len(result.rows),
        "truncated": result.truncated,
        "tables": sorted(result.tables),
    }


def encode_cell(cell: Cell) -> Any:
    """A cell as JSON: blobs and infinite numbers, which it has not, become objects."""
    if isinstance(cell, bytes):
        return {"blob": cell.hex()}
    if isinstance(cell, float) and not math.isfinite(cell):
        return {"real": repr(cell)}
    return cell


def decode_cell(value: Any) -> Cell:
    """The inverse of `encode_cell`."""
    if isinstance(value, dict):
        return bytes.fromhex(value["blob"]) if "blob" in value else float(value["real"])
    cell: Cell = value
    return cell


def decode_rows(rows: Sequence[Sequence[Any]]) -> tuple[Row, ...]:
    """Rows as they were before they were sent."""
    return tuple(tuple(map(decode_cell, row)) for row in rows)
