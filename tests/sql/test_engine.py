"""The engine: shared files and workers, that come when needed and go when not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.errors import EvidenceError
from agentrl_sql.engine import DatabaseKey, Engine, leave_engine, shared_engine

KEY = DatabaseKey("shop", 5)
KEYS = [DatabaseKey("shop", seed) for seed in (5, 6, 7)]
GOLD = "SELECT SUM(age) FROM customer"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def engine(folder):
    made = Engine()
    yield made
    made.close()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("agentrl-sql-*/*.db"))


def test_files_are_made_once_and_removed_at_the_end(engine, folder):
    assert files(folder) == []
    for _ in range(3):
        assert engine.query(KEY, "SELECT COUNT(*) FROM customer", 5).rows == ((13,),)
    assert files(folder) == ["shop-5.db"]
    assert [code for code, _ in engine.judge(KEYS, GOLD, GOLD, ordered=False).verdicts] == ["match"] * 3
    assert files(folder) == ["shop-5.db", "shop-6.db", "shop-7.db"]
    (private,) = folder.iterdir()
    assert private.stat().st_mode & 0o077 == 0
    engine.close()
    assert list(folder.iterdir()) == []


def test_a_file_that_somebody_removed_is_made_again(engine, folder):
    before = engine.query(KEY, "SELECT * FROM customer", 50)
    next(folder.glob("*/*.db")).unlink()
    assert engine.query(KEY, "SELECT * FROM customer", 50) == before
    shutil.rmtree(next(folder.iterdir()))
    assert engine.query(KEY, "SELECT * FROM customer", 50) == before
    assert engine.query(DatabaseKey("shop", 6), "SELECT 1", 5).rows == ((1,),)


def test_only_so_many_files_are_kept(engine, folder, monkeypatch):
    monkeypatch.setattr("agentrl_sql.engine._KEPT_FILES", 3)
    for seed in range(6):
        engine.query(DatabaseKey("shop", seed), "SELECT 1", 1)
    assert files(folder) == ["shop-3.db", "shop-4.db", "shop-5.db"]
    assert engine.query(DatabaseKey("shop", 0), "SELECT 1", 1).failure is None


def test_results_come_back_as_they_were(engine):
    result = engine.query(KEY, "SELECT x'00ff' AS b, 9e999 AS i, -9e999, NULL, 2.5, 'é', CAST(x'ff' AS TEXT)", 5)
    assert result.rows == ((b"\x00\xff", float("inf"), float("-inf"), None, 2.5, "é", "\udcff"),)
    assert result.columns[:2] == ("b", "i")
    many = engine.query(KEY, "WITH RECURSIVE r(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM r) SELECT n FROM r", 4)
    assert (len(many.rows), many.n_rows, many.truncated, many.tables) == (4, 1000, True, ())
    assert engine.query(KEY, "SELECT name FROM customer LIMIT 1", 4).tables == ("customer",)


def test_a_gold_that_does_not_hold_raises(engine):
    with pytest.raises(EvidenceError, match=r"the gold query is invalid \(exec_error\)"):
        engine.judge(KEYS, "SELECT nothing FROM nowhere", GOLD, ordered=False)
    endless = "WITH RECURSIVE r(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM r) SELECT COUNT(*) FROM r"
    with pytest.raises(EvidenceError, match=r"the gold query is invalid \(too_expensive\)"):
        engine.judge(KEYS, endless, GOLD, ordered=False)


def test_no_length_of_query_is_too_much_for_the_engine(engine):
    long = f"SELECT '{'x' * 30_000_000}'"
    assert engine.query(KEY, long, 5).failure.reason == "too_large"
    assert engine.judge(KEYS, GOLD, long, ordered=False).verdicts == (("error", "too_large"),)


def test_threads_share_it(engine):
    def ask(seed):
        key = DatabaseKey("shop", seed % 7)
        return engine.query(key, "SELECT COUNT(*), SUM(age) FROM customer", 5).rows

    alone = [ask(seed) for seed in range(7)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(140))) == alone * 20


def test_a_fork_gets_an_engine_of_its_own(folder):
    user = _User()
    engine = shared_engine(user)
    expected = engine.query(KEY, GOLD, 5)
    child = os.fork()
    if child == 0:
        mine = shared_engine(user)
        right = mine is not engine and mine.query(KEY, GOLD, 5) == expected
        leave_engine(user)
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.query(KEY, GOLD, 5) == expected
    leave_engine(user)


class _User:
    """Somebody who uses the engine."""


def test_what_a_killed_process_left_is_removed_by_the_next(folder):
    script = textwrap.dedent("""
        import os, signal
        from agentrl_sql.engine import DatabaseKey, Engine
        engine = Engine()
        engine.query(DatabaseKey("shop", 1), "SELECT 1", 1)
        print("ready", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    environment = {**os.environ, "TMPDIR": str(folder)}
    killed = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert killed.stdout == "ready\n"
    (left,) = folder.iterdir()
    living = Engine()
    living.query(KEY, "SELECT 1", 1)
    assert not left.exists()
    other = Engine()
    other.query(KEY, "SELECT 1", 1)
    assert len(list(folder.iterdir())) == 2, "the folder of a living engine is left alone"
    living.close()
    other.close()
    assert list(folder.iterdir()) == []


def test_an_engine_that_nobody_closes_is_cleaned_up_at_exit(folder):
    script = textwrap.dedent("""
        from agentrl_sql.engine import DatabaseKey, shared_engine
        class User: pass
        user = User()
        shared_engine(user).query(DatabaseKey("shop", 1), "SELECT 1", 1)
    """)
    environment = {**os.environ, "TMPDIR": str(folder)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert list(folder.iterdir()) == []
