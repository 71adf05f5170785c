"""The warm pool: fresh sandboxes, used once, bounded, and given back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sandbox_box import LIMITS

from agentrl.sandbox import SandboxBusy, SandboxError, SandboxUsageError, WarmPool
from agentrl.sandbox.contract import Backend, Sandbox

BACKENDS = [pytest.param("docker", marks=pytest.mark.docker), "bubblewrap"]


@pytest.fixture(params=BACKENDS)
def parts(request: pytest.FixtureRequest, open_backend: Callable[[str], tuple[Backend, str]]) -> tuple[Backend, str]:
    return open_backend(request.param)


@pytest.fixture
def pool(parts: tuple[Backend, str]) -> Iterator[WarmPool]:
    with WarmPool(*parts, LIMITS, size=2, most=2) as made:
        assert made.wait_until_full(60)
        yield made


def test_every_sandbox_is_fresh_and_used_once(pool: WarmPool) -> None:
    seen = set()
    for _ in range(4):
        with pool.acquire() as sandbox:
            assert sandbox.list() == ()
            sandbox.write("left.txt", b"x")
            seen.add(sandbox.id)
    assert len(seen) == 4
    assert pool.wait_until_full(60)


def test_no_more_than_most_are_in_use(pool: WarmPool) -> None:
    one, two = pool.acquire(), pool.acquire()
    with pytest.raises(SandboxBusy, match="became free"):
        pool.acquire(timeout_s=0.2)
    threading.Timer(0.3, one.close).start()
    with pool.acquire(timeout_s=30) as three:
        assert three.exec(["true"]).ok
    two.close()
    two.close()  # gives its place back once, not twice
    three, four = pool.acquire(), pool.acquire()
    with pytest.raises(SandboxBusy):
        pool.acquire(timeout_s=0.1)
    three.close()
    four.close()


def test_one_in_stock_that_died_is_not_handed_out(pool: WarmPool) -> None:
    for held in list(pool._stock):
        destroyed: Any = held
        destroyed._destroy()
    with pool.acquire() as sandbox:
        assert sandbox.exec(["echo", "alive"]).stdout == b"alive\n"


def test_closing_the_pool_closes_what_is_in_use(parts: tuple[Backend, str]) -> None:
    pool = WarmPool(*parts, LIMITS, size=1, most=2)
    sandbox = pool.acquire()
    pool.close()
    pool.close()
    assert sandbox.exec(["true"]).status == "sandbox_error"
    with pytest.raises(SandboxError, match="closed"):
        pool.acquire()


def test_l10_an_overdue_lease_is_closed(parts: tuple[Backend, str]) -> None:
    with WarmPool(*parts, LIMITS, size=1, most=1, lease_s=0.5) as pool:
        held = pool.acquire()
        began = time.monotonic()
        with pool.acquire(timeout_s=30) as other:
            assert other.ping()
        assert time.monotonic() - began < 20
        assert held.exec(["true"]).status == "sandbox_error"


def test_a_fork_cannot_use_the_pool(pool: WarmPool) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            pool.acquire()
        except SandboxError:
            pool.close()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with pool.acquire() as sandbox:
        assert sandbox.ping()


class Failing:
    """A backend of the test's own whose engine is down."""

    name = "failing"

    def __init__(self) -> None:
        self.starts = 0

    def identify(self, image: str) -> str:
        return image

    def start(self, image: str, limits: object) -> Sandbox:
        self.starts += 1
        raise SandboxError("the engine is down")

    def reap(self) -> int:
        return 0


def test_failures_are_told_and_not_repeated_in_a_storm() -> None:
    backend: Any = Failing()
    with WarmPool(backend, "image", LIMITS, size=2, most=1) as pool:
        time.sleep(0.5)
        assert backend.starts == 1
        for _ in range(3):  # the place is given back each time
            with pytest.raises(SandboxError, match="down"):
                pool.acquire(timeout_s=0.1)


def test_numbers_are_checked() -> None:
    with pytest.raises(SandboxUsageError, match="at least 1"):
        WarmPool(Failing(), "image", size=0)  # type: ignore[arg-type]
