"""Where environments run: a pool of threads, the environments in it, and the watchdog over their calls."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait

from agentrl.env import ToolEnv
from agentrl.errors import AbandonedError, UsageError
from agentrl.rollout._episode import EpisodeRun

MAX_ABANDONED = 4
"""Environments that may hang before the run stops."""

_CLOSE_WAIT_S = 5.0
_LOG = logging.getLogger(__name__)


class Call:
    """One call of an episode's environment, under way or done."""

    def __init__(self, run: EpisodeRun, work: Callable[[], None]) -> None:
        self.run = run
        self.done: Future[None] = Future()
        self.began: float | None = None
        self.abandoned = False
        self._work = work

    def do(self) -> None:
        """Does the work. The boundary to the thread: whatever is raised is carried to who waits."""
        done, self.began = self.done, time.monotonic()
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001
            done.set_exception(error)
        else:
            done.set_result(None)

    def overran(self, timeout_s: float) -> bool:
        """Whether it has been running for longer than this."""
        return not self.done.done() and self.began is not None and time.monotonic() - self.began > timeout_s


class Stage:
    """Runs environments in threads. A call that does not return in time is given up, with its thread and environment.

    The threads are daemons: one that hangs does not keep the process from ending.
    """

    def __init__(self, make_env: Callable[[], ToolEnv], threads: int, timeout_s: float) -> None:
        """Makes an empty stage.

        Args:
            make_env: Makes an environment; called where one is needed and none is free.
            threads: How many environments run at once.
            timeout_s: How long one call of an environment may take, seconds.
        """
        self._make_env = make_env
        self._threads = threads
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._started = 0
        self._lock = threading.Lock()
        self._free: list[ToolEnv] = []
        self._in_use: list[ToolEnv] = []
        self._abandoned = 0

    def take_env(self) -> ToolEnv:
        """An environment that no episode runs in: one that was given back, or a new one."""
        with self._lock:
            env = self._free.pop() if self._free else None
        env = env or self._make_env()
        with self._lock:
            self._in_use.append(env)
        return env

    def submit(self, run: EpisodeRun, work: Callable[[], None]) -> Call:
        """Lets a thread do some work of an episode."""
        call = Call(run, work)
        with self._lock:
            if self._started < self._threads:
                self._start_thread()
        self._calls.put(call)
        return call

    def settle(self, calls: list[Call], *, all_of_them: bool, patience_s: float = 0.0) -> list[Call]:
        """Waits for calls, and gives up those that hang.

        Args:
            calls: Under way.
            all_of_them: Whether to wait for every one; else for the first one, and `patience_s` for others.
            patience_s: Seconds.

        Returns:
            Those that are done, in the order of `calls`.

        Raises:
            AbandonedError: If too many environments hang.
            BaseException: What was raised in a thread beyond the episode's own boundary (an interrupt, a fault in
                making an environment).
        """
        mode = ALL_COMPLETED if all_of_them else FIRST_COMPLETED
        if not all_of_them:
            wait([call.done for call in calls], timeout=patience_s)
        while True:
            pending = [call.done for call in calls if not call.done.done()]
            if not pending or (not all_of_them and len(pending) < len(calls)):
                break
            wait(pending, timeout=min(1.0, self._timeout_s / 4), return_when=mode)
            for call in calls:
                if call.overran(self._timeout_s):
                    self._abandon(call)
        settled = [call for call in calls if call.done.done()]
        for call in settled:
            call.done.result()
        return settled

    def give_back(self, run: EpisodeRun) -> None:
        """Takes the environment of a finished episode back for the next one; one that failed is forgotten."""
        with self._lock:
            self._in_use = [env for env in self._in_use if env is not run.env]
            if run.env_state == "good":
                self._free.append(run.env)
        if run.env_state == "broken":
            _close(run.env)

    def close(self) -> None:
        """Ends the threads and closes the environments, once what runs in them has returned or taken too long."""
        with self._lock:
            threads, self._started = self._started, 0
            envs = [*self._free, *self._in_use]
            self._free.clear()
            self._in_use.clear()
        for _ in range(threads):
            self._calls.put(None)
        deadline = time.monotonic() + _CLOSE_WAIT_S
        for env in envs:
            while not _close(env) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _start_thread(self) -> None:
        self._started += 1
        threading.Thread(target=self._serve, name=f"agentrl-env-{self._started}", daemon=True).start()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.do()
            if call.abandoned:
                return

    def _abandon(self, call: Call) -> None:
        what = f"a call of its environment did not return within {self._timeout_s:g} s (rollout.episode_timeout_s)"
        _LOG.error("episode %s: %s; it is abandoned.", call.run.request.id, what)
        with self._lock:
            self._abandoned += 1
            call.abandoned = True
            # The thread that hangs is lost: another one takes its place.
            self._start_thread()
            too_many = self._abandoned >= MAX_ABANDONED
        call.run.give_up("hung", f"{what}: it was abandoned.")
        if too_many:
            raise AbandonedError(
                f"{self._abandoned} environments hang (the last one in episode {call.run.request.id}: {what}). Expected"
                " every tool to keep its deadline in a Worker or a sandbox: look at what they wait for."
            )
        call.done = Future()
        call.done.set_result(None)


def _close(env: ToolEnv) -> bool:
    """The boundary to environments that are closed: a fault there must not hide why. False where a call still runs."""
    try:
        env.close()
    except UsageError:
        return False
    except Exception:  # noqa: BLE001
        _LOG.exception("closing an environment of %s failed", type(env).__name__)
    return True
