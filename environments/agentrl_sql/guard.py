"""Runs somebody's SQL on a SQLite file so that it can neither write, nor look elsewhere, nor run for long.

What holds, each by a means of its own:
- Reading only: the file is opened `mode=ro&immutable=1`, and an authorizer allows SELECT, recursion, the tables named,
  and a list of functions, all pure. ATTACH, VACUUM INTO, PRAGMA, temporary tables, virtual tables, load_extension,
  `sqlite_master` and everything unknown is refused.
- One statement, which begins with SELECT, WITH or VALUES.
- Bounded work, counted in steps of SQLite's virtual machine, so that equal queries end alike on any machine; lengths,
  depths and the heap are bounded too, and temporary results stay in memory.
- One answer for ever: no random functions, and `now` is a fixed day.

A single step can still be long (LIKE with many wildcards), and a crash is a crash: hence this module is run in a
Worker with limits on CPU time and memory. It imports nothing but the standard library, so that the Worker starts fast.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal
from urllib.parse import quote

Cell = None | int | float | str | bytes
Row = tuple[Cell, ...]

NOW = "2025-01-01 00:00:00"
"""What `now` is to every query: the gold of a task and an answer to it must see one clock, today and next year."""

MAX_SQL_CHARS = 10_000
"""Longest query."""

_STEPS_A_TICK = 100
_HEAP_BYTES = 64 << 20
_LIMITS = (
    (sqlite3.SQLITE_LIMIT_LENGTH, 50_000),
    (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 4 * MAX_SQL_CHARS),
    (sqlite3.SQLITE_LIMIT_COLUMN, 100),
    (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
    (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 50),
    (sqlite3.SQLITE_LIMIT_VDBE_OP, 100_000),
    (sqlite3.SQLITE_LIMIT_FUNCTION_ARG, 50),
    (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
    (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100),
    (sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 0),
    (sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 0),
    (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
)
_PURE = """
    -> ->> abs acos acosh asin asinh atan atan2 atanh avg ceil ceiling char coalesce concat concat_ws cos cosh count
    cume_dist current_date current_time current_timestamp date datetime degrees dense_rank exp first_value floor glob
    group_concat hex if ifnull iif instr json json_array json_array_length json_extract json_group_array
    json_group_object json_insert json_object json_patch json_quote json_remove json_replace json_set json_type
    json_valid julianday lag last_value lead length like likelihood likely ln log log10 log2 lower ltrim max min mod
    nth_value ntile nullif octet_length percent_rank pi pow power quote radians rank replace round row_number
    rtrim sign sin sinh sqrt strftime string_agg substr substring sum tan tanh time total trim trunc typeof
    unhex unicode unixepoch unlikely upper
"""
PURE_FUNCTIONS = frozenset(_PURE.split())
"""The functions that a query may call: they depend on their arguments alone, and one call is quick."""

_CLOCKS = {"current_date": "date", "current_time": "time", "current_timestamp": "datetime"}
_DATE_FUNCTIONS = ("date", "time", "datetime", "julianday", "unixepoch")
_FIRST_WORD = re.compile(r"(?>\s|--[^\n]*+(?:\n|\Z)|/\*(?s:.*?)\*/)*+(\w+)")
_STATEMENTS = """
    ALTER ANALYZE ATTACH BEGIN COMMIT CREATE DELETE DETACH DROP END EXPLAIN INSERT PRAGMA REINDEX RELEASE REPLACE
    ROLLBACK SAVEPOINT UPDATE VACUUM
"""
_OTHER_STATEMENTS = frozenset(_STATEMENTS.split())
_ALLOWED_ACTIONS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE})
_WRITES = {
    sqlite3.SQLITE_DELETE: "DELETE",
    sqlite3.SQLITE_INSERT: "INSERT",
    sqlite3.SQLITE_UPDATE: "UPDATE",
    sqlite3.SQLITE_ATTACH: "ATTACH",
    sqlite3.SQLITE_PRAGMA: "PRAGMA",
}

FailureKind = Literal["rejected", "error"]
FailureReason = Literal["not_read_only", "multi_statement", "forbidden", "exec_error", "too_expensive", "too_large"]


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """What one query may take.

    Attributes:
        steps: Steps of SQLite's virtual machine; two million take some 0.05 s.
        rows: Rows that are fetched; one more is looked for, to tell that there is more.
        result_bytes: Bytes of text and blobs in the result.
    """

    steps: int = 2_000_000
    rows: int = 1000
    result_bytes: int = 500_000


@dataclass(frozen=True, slots=True)
class Result:
    """What a query gave.

    Attributes:
        columns: Output names.
        rows: At most as many as the limit says.
        truncated: Whether there are more.
        tables: Tables of the database that were read.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    truncated: bool = False
    tables: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a query gave nothing.

    Attributes:
        kind: `rejected`: it is not one reading statement, or wants what it may not have; `error`: it failed.
        reason: A code.
        text: One line for the author of the query.
    """

    kind: FailureKind
    reason: FailureReason
    text: str


def run(
    path: str, sql: str, tables: Collection[str], limits: QueryLimits, *, reverse_scans: bool = False
) -> Result | Failure:
    """Runs one query on a connection of its own.

    Args:
        path: The database file; it must exist.
        sql: The query.
        tables: The tables that may be read.
        limits: Bounds.
        reverse_scans: Makes SQLite return rows that no ORDER BY holds in another order.

    Returns:
        The result, or why there is none. No text raises.
    """
    if len(sql) > MAX_SQL_CHARS:
        return Failure("error", "too_large", f"the query is longer than {MAX_SQL_CHARS} characters")
    sql = sql.strip().rstrip("; \t\r\n")
    first = _FIRST_WORD.match(sql)
    word = first[1].upper() if first else ""
    if word in _OTHER_STATEMENTS:
        return Failure("rejected", "not_read_only", f"{word} is not allowed, only SELECT")
    if word not in ("SELECT", "WITH", "VALUES"):
        return Failure("error", "exec_error", "expected a SELECT statement")
    uri = f"file:{quote(path)}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, cached_statements=0)
    try:
        watch = _Watch(tables, _table_names(connection), limits.steps)
        _harden(connection, watch, reverse_scans=reverse_scans)
        return _execute(connection, sql, watch, limits)
    finally:
        connection.close()


class _Watch:
    """What the authorizer and the progress handler saw of one query."""

    def __init__(self, allowed: Collection[str], existing: Collection[str], steps: int) -> None:
        self.refused: str | None = None
        self._allowed = {name.lower() for name in allowed}
        self._existing = {name.lower() for name in existing}
        self._ticks_left = max(1, steps // _STEPS_A_TICK)
        self._read: set[str] = set()
        self._named: set[str] = set()
        self._views: set[str] = set()

    @property
    def expired(self) -> bool:
        return self._ticks_left <= 0

    @property
    def tables(self) -> frozenset[str]:
        # A table whose columns nobody reads is reported by its bare name, and so is a common table expression.
        return frozenset(self._read | (self._named - self._views))

    def tick(self) -> int:
        self._ticks_left -= 1
        return self._ticks_left <= 0

    def authorize(
        self, action: int, first: str | None, second: str | None, database: str | None, inner: str | None
    ) -> int:
        if action in _ALLOWED_ACTIONS:
            if inner is not None:
                self._views.add(inner.lower())
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in PURE_FUNCTIONS:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ and self._may_read((first or "").lower(), second, database):
            return sqlite3.SQLITE_OK
        if self.refused is None:
            self.refused = _refusal(action, first, second)
        return sqlite3.SQLITE_DENY

    def _may_read(self, name: str, column: str | None, database: str | None) -> bool:
        if name in self._allowed and database in (None, "main"):
            (self._read if column or database else self._named).add(name)
            return True
        is_expression = not column and database is None and name not in self._existing
        return is_expression and not name.startswith(("sqlite_", "pragma_"))


def _refusal(action: int, first: str | None, second: str | None) -> str:
    if action == sqlite3.SQLITE_FUNCTION:
        return f"the function {second} is not allowed"
    if action == sqlite3.SQLITE_READ:
        return f"the table {first} may not be read"
    if action in _WRITES and not (first or "").lower().startswith("sqlite_"):
        return f"{_WRITES[action]} is not allowed, only SELECT"
    return "only one SELECT statement over the tables of this database is allowed"


def _table_names(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM sqlite_master")]


def _harden(connection: sqlite3.Connection, watch: _Watch, *, reverse_scans: bool) -> None:
    connection.text_factory = _decode
    connection.execute("PRAGMA temp_store = MEMORY").close()
    connection.execute(f"PRAGMA hard_heap_limit = {_HEAP_BYTES}").close()
    if reverse_scans:
        connection.execute("PRAGMA reverse_unordered_selects = 1").close()
    for limit, value in _LIMITS:
        connection.setlimit(limit, value)
    for name, function in _clock_functions():
        connection.create_function(name, 0 if name in _CLOCKS else -1, function, deterministic=True)
    connection.set_progress_handler(watch.tick, _STEPS_A_TICK)
    connection.set_authorizer(watch.authorize)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _execute(connection: sqlite3.Connection, sql: str, watch: _Watch, limits: QueryLimits) -> Result | Failure:
    rows: list[Row] = []
    size = 0
    try:
        cursor = connection.execute(sql)
        columns = tuple(str(column[0]) for column in cursor.description or ())
        for row in cursor:
            if len(rows) == limits.rows:
                return Result(columns, tuple(rows), True, watch.tables)
            size += sum(len(cell) for cell in row if isinstance(cell, str | bytes))
            if size > limits.result_bytes:
                return Failure("error", "too_large", "the result is too large")
            rows.append(row)
    except MemoryError:
        return Failure("error", "too_large", "the query needs too much memory")
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return _failure(error, watch)
    return Result(columns, tuple(rows), False, watch.tables)


def _failure(error: Exception, watch: _Watch) -> Failure:
    text = " ".join(str(error).split())
    if watch.refused is not None:
        return Failure("rejected", "forbidden", watch.refused)
    if watch.expired:
        return Failure("error", "too_expensive", "the query takes too long")
    if "one statement at a time" in text:
        return Failure("rejected", "multi_statement", "only one statement is allowed")
    if "too big" in text:
        return Failure("error", "too_large", text)
    if isinstance(error, UnicodeEncodeError):
        text = "the query holds characters that are no text"
    return Failure("error", "exec_error", text)


@cache
def _clock_functions() -> tuple[tuple[str, partial[Cell]], ...]:
    """SQLite's date functions with `now` fixed; an idle connection of their own does the arithmetic."""
    calendar = sqlite3.connect(":memory:", check_same_thread=False)
    dates = [(name, partial(_date, calendar, name)) for name in _DATE_FUNCTIONS]
    clocks = [(name, partial(_date, calendar, function)) for name, function in _CLOCKS.items()]
    return (*dates, *clocks, ("strftime", partial(_strftime, calendar)))


def _date(calendar: sqlite3.Connection, function: str, *arguments: Cell) -> Cell:
    values = [_fixed(value) for value in arguments] or [NOW]
    marks = ", ".join("?" * len(values))
    value: Cell = calendar.execute(f"SELECT {function}({marks})", values).fetchone()[0]
    return value


def _strftime(calendar: sqlite3.Connection, *arguments: Cell) -> Cell:
    values = [*arguments[:1], *([_fixed(value) for value in arguments[1:]] or [NOW])]
    marks = ", ".join("?" * len(values))
    value: Cell = calendar.execute(f"SELECT strftime({marks})", values).fetchone()[0]
    return value


def _fixed(value: Cell) -> Cell:
    return NOW if isinstance(value, str) and value.lower() == "now" else value
