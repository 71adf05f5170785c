"""The SQL engine of a process: database files, made as they are asked for, and warm workers that query them."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from agentrl import JSON, EvidenceError, WorkerDied, WorkerLimits, WorkerPool
from agentrl_sql.domains import DOMAINS
from agentrl_sql.generate import make_database
from agentrl_sql.guard import MAX_SQL_CHARS, Failure, Row
from agentrl_sql.judge import decode_rows

DEADLINE_S = 60.0
"""Wall time of one request, seconds. A query is stopped by its steps, then by CPU time, and both are its own fault; one
that reaches this has hardly been run at all, which is the machine's."""

_LIMITS = WorkerLimits(memory_mib=512, cpu_s=2, file_mib=0, reply_mib=4)
_MAX_WORKERS = 4
_KEPT_FILES = 1024
_FOLDER = "agentrl-sql-"
_TOO_EXPENSIVE = Failure("error", "too_expensive", "the query takes too long")


class DatabaseKey(NamedTuple):
    """What a database is made from.

    Attributes:
        domain: Name of the domain.
        seed: What its rows are drawn from.
    """

    domain: str
    seed: int


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What a query came to.

    Attributes:
        columns: Output names.
        rows: The first rows, as many as were asked for.
        n_rows: Rows in all, or the row cap.
        truncated: Whether there are more than the row cap.
        tables: Tables that were read.
        failure: Why there is no result, or None.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    n_rows: int = 0
    truncated: bool = False
    tables: tuple[str, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the judge said of a prediction.

    Attributes:
        verdicts: (code, reason) for each database, up to the first that settles it.
        rules: Version of the comparison's rules.
    """

    verdicts: tuple[tuple[str, str], ...]
    rules: int


class Engine:
    """Database files in a private folder and workers that read them; shared by the threads of a process.

    A file is made from (domain, seed) when it is first asked for, and again after it was dropped: what is in it never
    depends on what happened before. Folders of processes that were killed are removed when the next one starts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[DatabaseKey, Path] = OrderedDict()
        self._folder = _Folder()
        workers = max(1, min(_MAX_WORKERS, os.cpu_count() or 1))
        self._pool = WorkerPool("agentrl_sql.judge:serve", workers, _LIMITS, env={"TZ": "UTC"})

    def query(self, key: DatabaseKey, sql: str, shown: int) -> QueryResult:
        """Runs somebody's query.

        Args:
            key: The database.
            sql: The query; anything at all.
            shown: Most rows to return.

        Raises:
            WorkerTimeout: If the machine is too busy to run it.
        """
        request = {"op": "query", "path": self._path(key), "sql": _cut(sql), "tables": _tables(key), "shown": shown}
        reply = self._call(request)
        if reply is None:
            return QueryResult(failure=_TOO_EXPENSIVE)
        if "failure" in reply:
            return QueryResult(failure=Failure(*reply["failure"]))
        return QueryResult(
            tuple(reply["columns"]),
            decode_rows(reply["rows"]),
            reply["n_rows"],
            reply["truncated"],
            tuple(reply["tables"]),
        )

    def judge(self, databases: Sequence[DatabaseKey], gold: str, predicted: str, *, ordered: bool) -> Judgement:
        """Judges a query against the gold, on all databases in one request.

        Args:
            databases: What is judged on; the first is the one that the agent saw.
            gold: The right query.
            predicted: The query to judge; anything at all.
            ordered: Whether the order of the rows matters.

        Raises:
            EvidenceError: If the gold itself does not hold, so that nothing can be said.
            WorkerTimeout: If the machine is too busy to run it.
        """
        request = {
            "op": "judge",
            "paths": [self._path(key) for key in databases],
            "tables": _tables(databases[0]),
            "gold": gold,
            "ordered": ordered,
        }
        reply = self._call({**request, "sql": _cut(predicted)})
        if reply is None:
            # Whose fault was it? The gold is judged against itself: where that holds, it was the prediction's.
            reply = self._call({**request, "sql": gold})
            if reply is None:
                raise EvidenceError("the gold query takes too long: the task cannot be verified.")
            if reply["verdicts"][0][0] != "invalid_gold":
                return Judgement(((_TOO_EXPENSIVE.kind, _TOO_EXPENSIVE.reason),), reply["rules"])
        verdicts = tuple((str(code), str(reason)) for code, reason in reply["verdicts"])
        if verdicts[0][0] == "invalid_gold":
            raise EvidenceError(f"the gold query is invalid ({verdicts[0][1]}): the task cannot be verified.")
        return Judgement(verdicts, reply["rules"])

    def close(self) -> None:
        """Ends the workers and removes the files; the engine is then of no more use."""
        with self._lock:
            self._pool.close()
            self._files.clear()
            self._folder.remove()

    def _call(self, request: JSON) -> dict[str, Any] | None:
        """The worker's reply; None where the query was the end of it (CPU time, memory)."""
        try:
            reply: dict[str, Any] = self._pool.call(request, DEADLINE_S)
        except WorkerDied:
            # A query was the end of the worker, unless it cannot do anything at all: then this raises.
            self._pool.call({**request, "op": "query", "path": "", "sql": "", "shown": 0}, DEADLINE_S)
            return None
        return reply

    def _path(self, key: DatabaseKey) -> str:
        with self._lock:
            path = self._files.pop(key, None)
            if path is None or not path.exists():
                path = self._folder.path() / f"{key.domain}-{key.seed}.db"
                _write(key, path)
            self._files[key] = path
            while len(self._files) > _KEPT_FILES:
                self._files.popitem(last=False)[1].unlink(missing_ok=True)
            return str(path)


def _cut(sql: str) -> str:
    # The guard refuses what is longer; all of it need not be sent for that.
    return sql[: MAX_SQL_CHARS + 1]


def _tables(key: DatabaseKey) -> list[str]:
    return [table.name for table in DOMAINS[key.domain].schema.tables]


def _write(key: DatabaseKey, path: Path) -> None:
    connection = sqlite3.connect(":memory:")
    try:
        make_database(key.domain, key.seed).build(connection)
        content = connection.serialize()
    finally:
        connection.close()
    # Written under another name: a worker must never open half a file.
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(content)
    unfinished.replace(path)


class _Folder:
    """A private folder that is removed at the end, or by a later process if this one is killed."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._lock_fd = -1
        self._finalizer: weakref.finalize[[int, Path, int], _Folder] | None = None

    def path(self) -> Path:
        """The folder, made where it is not there."""
        if self._path is None or not self._path.is_dir():
            self.remove()
            _sweep()
            self._path = Path(tempfile.mkdtemp(prefix=_FOLDER))
            self._lock_fd = os.open(self._path / "lock.new", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self._path / "lock.new").rename(self._path / "lock")  # seen by others only when it is held
            self._finalizer = weakref.finalize(self, _remove, self._lock_fd, self._path, os.getpid())
        return self._path

    def remove(self) -> None:
        """Removes the folder with all in it."""
        if self._finalizer is not None:
            self._finalizer()
        self._path, self._finalizer = None, None


def _remove(lock_fd: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked copy leaves it to its parent
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock_fd)


def _sweep() -> None:
    """Removes folders whose owner is gone: nobody holds their lock."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/lock"):
        try:
            fd = os.open(lock, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(fd)


class _Shared:
    """The engine of this process, and who uses it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Engine | None = None
        self.users: weakref.WeakSet[object] = weakref.WeakSet()

    def start_afresh(self) -> None:
        # The engine that a forked child inherited is its parent's, and so may be a held lock.
        self.lock = threading.Lock()
        self.engine = None


_shared = _Shared()


@cache
def _hook_forks() -> None:
    os.register_at_fork(after_in_child=_shared.start_afresh)


def shared_engine(user: object) -> Engine:
    """The engine of this process, kept until all its users have left it.

    Args:
        user: Who asks; remembered as long as it lives.
    """
    with _shared.lock:
        if _shared.engine is None:
            _shared.engine = Engine()
            _hook_forks()
        _shared.users.add(user)
        return _shared.engine


def leave_engine(user: object) -> None:
    """Says that `user` needs the engine no more; the last one closes it.

    Args:
        user: Who asked for it.
    """
    with _shared.lock:
        _shared.users.discard(user)
        if _shared.engine is not None and not _shared.users:
            _shared.engine.close()
            _shared.engine = None
