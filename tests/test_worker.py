"""The Worker: what it returns, what it survives, and that nothing it started outlives it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import WorkerCallError, WorkerDied, WorkerError, WorkerTimeout
from agentrl.worker import Worker, WorkerLimits, WorkerPool

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def _targets_importable(monkeypatch):
    monkeypatch.syspath_prepend(HERE)


@pytest.fixture
def make():
    made = []

    def start(function, limits=None, **kwargs):
        made.append(Worker(f"worker_targets:{function}", limits, **kwargs))
        return made[-1]

    yield start
    for worker in made:
        worker.close()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def none_left(pids: list[int], within_s: float = 0.0) -> bool:
    until = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(alive, pids))


def read_pids(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()]


def own_children() -> set[str]:
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def test_any_json_comes_back_as_it_was_sent():
    worker = Worker("worker_targets:echo")

    @settings(max_examples=200, deadline=None)
    @given(json_values)
    def roundtrip(value):
        assert worker.call(value, 30) == value

    roundtrip()
    big = "é" * 1_000_000
    assert worker.call(big, 20) == big
    worker.close()


def test_what_the_function_prints_never_reaches_the_protocol(make):
    worker = make("noisy")
    for k in range(3):
        assert worker.call(k, 30) == {"read": "", "value": k}


def test_the_environment_is_clean_and_no_descriptor_leaks_in(make, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    readable, writable = os.pipe()
    os.set_inheritable(readable, True)
    seen = make("surroundings", env={"CHOSEN": "1"}).call(None, 30)
    os.close(readable)
    os.close(writable)
    assert set(seen["env"]) - {"LC_CTYPE"} == {"PATH", "LANG", "CHOSEN"}
    assert seen["cwd"] == "/"
    assert len(seen["fds"]) <= 6  # 0, 1, 2, the two pipes, and the listing itself


def test_the_exceptions_name_and_text_reach_the_caller_and_the_program_lives_on(make):
    worker = Worker("operator:truediv")
    with pytest.raises(WorkerCallError, match=r"^TypeError: truediv expected 2 arguments"):
        worker.call(1, 30)
    pid_before = own_children()
    with pytest.raises(WorkerCallError):
        worker.call(1, 30)
    assert own_children() == pid_before
    worker.close()
    with pytest.raises(WorkerCallError, match=r"^SystemExit: left"):
        make("crash").call("raise", 30)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("os:no_such_function", "AttributeError: module 'os' has no attribute 'no_such_function'"),
        ("os:sep", "TypeError: os:sep is not callable"),
    ],
)
def test_a_target_that_cannot_be_had_is_named(target, message):
    children = own_children()
    worker = Worker(target)
    for _ in range(2):
        with pytest.raises(WorkerCallError, match=message):
            worker.call(None, 30)
    assert own_children() == children


@pytest.mark.parametrize("target", ["os", ":f", "os:"])
def test_a_target_of_the_wrong_form_is_refused_at_once(target):
    with pytest.raises(WorkerError, match="expected a worker's target as 'module:function'"):
        Worker(target)


def test_a_reply_that_is_too_large_or_no_json_is_the_functions_fault(make):
    worker = make("reply_of", WorkerLimits(reply_mib=1))
    assert len(worker.call(1000, 30)) == 1000
    with pytest.raises(WorkerCallError, match="OverflowError: the reply has 2000010 bytes"):
        worker.call(2_000_000, 30)
    assert len(worker.call(10, 30)) == 10
    with pytest.raises(WorkerCallError, match="TypeError"):
        make("not_json").call(None, 30)
    with pytest.raises(WorkerCallError, match="ValueError"):
        make("not_a_number").call(None, 30)


def test_memory_beyond_the_limit_is_refused_and_the_program_lives_on(make):
    worker = make("take_memory", WorkerLimits(memory_mib=64))
    assert worker.call(16, 30) == 16 << 20
    with pytest.raises(WorkerCallError, match="MemoryError"):
        worker.call(256, 30)
    assert worker.call(16, 30) == 16 << 20


def test_files_beyond_the_limit_cannot_be_written(make, tmp_path):
    path = tmp_path / "f"
    with pytest.raises(WorkerCallError, match="OSError"):
        make("write", WorkerLimits(file_mib=0)).call({"path": str(path), "size": 1}, 30)
    assert path.stat().st_size == 0
    make("write", WorkerLimits(file_mib=1)).call({"path": str(path), "size": 1000}, 30)
    assert path.stat().st_size == 1000


def test_cpu_time_is_bounded_for_each_call(make):
    worker = make("burn", WorkerLimits(cpu_s=0))
    with pytest.raises(WorkerDied, match="SIGXCPU"):
        worker.call(None, 120)


@pytest.mark.parametrize(("kind", "message"), [("signal", "killed by SIGSEGV"), ("exit", "exit code 7")])
def test_a_crash_is_told_and_the_next_call_starts_a_new_program(make, kind, message):
    worker = make("crash")
    for _ in range(2):
        with pytest.raises(WorkerDied, match=message):
            worker.call(kind, 30)


def test_a_deadline_kills_all_that_the_call_started(make, tmp_path):
    worker = make("spawn")
    pids = tmp_path / "pids"
    before = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"did not answer within 1 s and was killed with all it started"):
        worker.call({"pids": str(pids), "then_sleep": 60}, 1)
    assert time.monotonic() - before < 4
    assert len(read_pids(pids)) == 3
    assert none_left(read_pids(pids))


def test_a_crash_and_a_close_leave_nothing_behind(make, tmp_path):
    worker = make("spawn")
    with pytest.raises(WorkerDied, match="exit code 3"):
        worker.call({"pids": str(tmp_path / "a"), "then_sleep": 0, "die": True}, 10)
    assert none_left(read_pids(tmp_path / "a"))
    pid = worker.call({"pids": str(tmp_path / "b"), "then_sleep": 0}, 10)
    worker.close()
    assert none_left([pid, *read_pids(tmp_path / "b")])


def test_close_may_be_called_again_and_a_closed_worker_says_so(make):
    worker = make("echo")
    worker.close()
    worker.close()
    with pytest.raises(WorkerError, match="worker_targets:echo is closed"):
        worker.call(1, 30)


def test_a_request_that_nobody_reads_meets_the_deadline(make):
    worker = Worker("time:sleep")
    with pytest.raises(WorkerTimeout):
        worker.call(60, 0.2)
    worker.close()
    burning = make("burn")
    with pytest.raises(WorkerTimeout):
        burning.call("x" * 4_000_000, 0.3)


def test_no_process_and_no_descriptor_is_left_after_many_lives(make):
    children, n_fds = own_children(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        worker = Worker("worker_targets:echo")
        assert worker.call(1, 30) == 1
        worker.close()
    forgotten = Worker("worker_targets:echo")
    forgotten.call(1, 30)
    del forgotten
    gc.collect()
    assert own_children() == children
    assert len(list(Path("/proc/self/fd").iterdir())) == n_fds


def test_an_exception_in_the_middle_of_a_call_kills_it(make):
    """Ctrl-C leaves a reply on its way: the program that would send it must be gone before the next call."""
    worker = make("echo")
    worker.call(1, 30)
    sleeper = Worker("time:sleep")
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        sleeper.call(30, 60)
    assert sleeper.call(0, 30) is None
    sleeper.close()


def test_threads_get_their_own_answers(make):
    worker = make("echo")
    pool = WorkerPool("worker_targets:echo", 2)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda k: worker.call(k, 30), range(400))) == list(range(400))
        assert list(threads.map(lambda k: pool.call(k, 30), range(400))) == list(range(400))
    pool.close()


def test_waiting_for_a_worker_does_not_count_towards_the_deadline():
    pool = WorkerPool("time:sleep", 1)
    pool.call(0, 30)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda s: pool.call(s, 2), [0.7] * 4)) == [None] * 4
    pool.close()
    with pytest.raises(WorkerError, match="at least 1 worker"):
        WorkerPool("time:sleep", 0)


def test_a_pool_starts_only_what_it_needs():
    children = len(own_children())
    pool = WorkerPool("worker_targets:echo", 4)
    for k in range(20):
        assert pool.call(k, 30) == k
    assert len(own_children()) == children + 1
    pool.close()


def test_after_a_fork_each_side_has_programs_of_its_own(make):
    worker, pool = make("echo"), WorkerPool("worker_targets:echo", 2)
    worker.call(0, 30)
    pool.call(0, 30)
    child = os.fork()
    if child == 0:
        right = worker.call("child", 30) == "child" and pool.call("child", 5) == "child"
        worker.close()
        pool.close()
        os._exit(0 if right else 1)
    assert worker.call("parent", 30) == "parent"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker.call("parent", 30) == "parent"
    assert pool.call("parent", 30) == "parent"
    pool.close()


def test_a_killed_caller_leaves_nothing_behind(tmp_path):
    """Neither a program in the middle of a call nor what it started survives a SIGKILL of the caller."""
    script = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {HERE!r})
        from agentrl.worker import Worker
        idle = Worker("os:getpgid")
        print(idle.call(0, 30), flush=True)
        Worker("worker_targets:spawn").call({{"pids": {str(tmp_path / "pids")!r}, "then_sleep": 60}}, 60)
    """)
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    session = int(caller.stdout.readline())
    while not (tmp_path / "pids").exists() or len(read_pids(tmp_path / "pids")) < 3:
        time.sleep(0.01)
    caller.kill()
    caller.wait()
    caller.stdout.close()
    assert none_left([session, *read_pids(tmp_path / "pids")], within_s=30)


def test_starting_is_cheap_and_imports_nothing_heavy():
    """The program must not pay for agentrl, gymnasium or numpy: only for the target's own imports."""
    worker = Worker("worker_targets:loaded")
    loaded = set(worker.call(None, 30))
    worker.close()
    assert not loaded & {"agentrl", "gymnasium", "numpy", "pydantic", "asyncio", "multiprocessing", "site"}
