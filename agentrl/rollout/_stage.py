"""Where episodes run: the threads, the environments, and the watchdog over environments' calls."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentrl.env import ToolEnv
from agentrl.errors import AbandonedError, UsageError
from agentrl.rollout._episode import EpisodeRun

MAX_ABANDONED = 4
"""Environments that may hang before the run stops."""

_CLOSE_WAIT_S = 5.0
_LOG = logging.getLogger(__name__)


class TooLate(BaseException):
    """Unwinds a thread whose episode was given up while it was in a call; nothing in between may catch it."""


class Stage:
    """Runs work of episodes in threads. A call of an environment that does not return is given up, with its thread.

    The threads are daemons: one that hangs does not keep the process from ending. Used by the collecting thread, but
    for `calling`.

    Attributes:
        under_way: Episodes whose work was submitted and has not been settled.
    """

    def __init__(self, make_env: Callable[[], ToolEnv], *, threads: int, calls: int, timeout_s: float) -> None:
        """Makes an empty stage.

        Args:
            make_env: Makes an environment; called where one is needed and none is free.
            threads: How many episodes are worked on at once.
            calls: In how many of them an environment may run at once.
            timeout_s: How long one call of an environment may take, seconds.
        """
        self.under_way = 0
        self._make_env = make_env
        self._n_threads = threads
        self._timeout_s = timeout_s
        self._tick_s = min(1.0, timeout_s / 4)
        self._work: queue.SimpleQueue[tuple[EpisodeRun, Callable[[], None]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[EpisodeRun | BaseException] = queue.SimpleQueue()
        self._settled: list[EpisodeRun] = []
        self._started = 0
        self._free: list[ToolEnv] = []
        self._in_use: list[ToolEnv] = []
        self._abandoned = 0
        self._watched_at = 0.0
        self._closed = False
        self._places = threading.Semaphore(calls)
        self._lock = threading.Lock()
        self._calling: dict[EpisodeRun, float] = {}  # when the call began; guarded by the lock

    def take_env(self) -> ToolEnv:
        """An environment that no episode runs in: one that was given back, or a new one."""
        env = self._free.pop() if self._free else self._make_env()
        self._in_use.append(env)
        return env

    def give_back(self, run: EpisodeRun) -> None:
        """Takes the environment of a finished episode back for the next one; one that failed is forgotten."""
        self._in_use = [env for env in self._in_use if env is not run.env]
        if run.env_state == "good":
            self._free.append(run.env)
        elif run.env_state == "broken":
            _close(run.env)

    def submit(self, run: EpisodeRun, work: Callable[[], None]) -> None:
        """Lets a thread do some work of an episode."""
        self.under_way += 1
        if self._started < min(self._n_threads, self.under_way):
            self._start_thread()
        self._work.put((run, work))

    def settle(self, *, all_of_them: bool, patience_s: float = 0.0) -> list[EpisodeRun]:
        """Waits for submitted work, and gives up environments that hang.

        Args:
            all_of_them: Whether to wait for every episode under way; else for one, and for others as long as they come
                within `patience_s` of one another.
            patience_s: Seconds.

        Returns:
            The episodes whose work is done.

        Raises:
            AbandonedError: If too many environments hang.
            BaseException: What was raised in a thread and is not one episode's affair.
        """
        while self.under_way:
            timeout_s = self._tick_s if all_of_them or not self._settled else patience_s
            try:
                done = self._done.get(timeout=timeout_s)
            except queue.Empty:
                self._watch()
                if self._settled and not all_of_them:
                    break
                continue
            self.under_way -= 1
            if isinstance(done, BaseException):
                raise done
            self._settled.append(done)
            self._watch()
        settled, self._settled = self._settled, []
        return settled

    def leftovers(self) -> list[EpisodeRun]:
        """What is done and was not settled, after `settle` was interrupted."""
        left, self._settled = self._settled, []
        while not self._done.empty():
            done = self._done.get()
            if not isinstance(done, BaseException):
                left.append(done)
        return left

    @contextmanager
    def calling(self, run: EpisodeRun) -> Iterator[None]:
        """Around each call of an environment: waits for a place, and lets the call be watched.

        Raises:
            TooLate: If the call came back after it had been given up, or the stage is closed.
        """
        self._places.acquire()
        if self._closed:
            self._places.release()
            raise TooLate
        with self._lock:
            self._calling[run] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                in_time = self._calling.pop(run, None) is not None
            if not in_time:
                raise TooLate
            self._places.release()

    def close(self) -> None:
        """Ends the threads and closes the environments, once what runs in them has returned or taken too long."""
        self._closed = True
        for _ in range(self._started):
            self._work.put(None)
        envs, self._free, self._in_use = [*self._free, *self._in_use], [], []
        deadline = time.monotonic() + _CLOSE_WAIT_S
        for env in envs:
            while not _close(env) and time.monotonic() < deadline:
                time.sleep(0.02)

    def _start_thread(self) -> None:
        self._started += 1
        threading.Thread(target=self._serve, name=f"agentrl-episode-{self._started}", daemon=True).start()

    def _serve(self) -> None:
        """The boundary to the thread: whatever is raised in it is carried to the collecting thread."""
        while (job := self._work.get()) is not None:
            run, work = job
            try:
                work()
            except TooLate:
                return  # Another thread has taken the place of this one.
            except BaseException as error:  # noqa: BLE001
                self._done.put(error)
            else:
                self._done.put(run)

    def _watch(self) -> None:
        now = time.monotonic()
        if now - self._watched_at < self._tick_s:
            return
        self._watched_at = now
        with self._lock:
            hung = [run for run, began in self._calling.items() if now - began > self._timeout_s]
            for run in hung:
                del self._calling[run]
        for run in hung:
            self._abandon(run)

    def _abandon(self, run: EpisodeRun) -> None:
        what = f"a call of its environment did not return within {self._timeout_s:g} s (rollout.episode_timeout_s)"
        _LOG.error("episode %s: %s; it is abandoned.", run.request.id, what)
        run.give_up("hung", f"{what}: it was abandoned.")
        self._in_use = [env for env in self._in_use if env is not run.env]
        self._places.release()
        self._start_thread()
        self._done.put(run)
        self._abandoned += 1
        if self._abandoned >= MAX_ABANDONED:
            raise AbandonedError(
                f"{self._abandoned} environments hang (the last one in episode {run.request.id}: {what}). Expected"
                " every tool to keep its deadline in a Worker or a sandbox: look at what they wait for."
            )


def _close(env: ToolEnv) -> bool:
    """The boundary to environments that are closed: a fault there must not hide why. False where a call still runs."""
    try:
        env.close()
    except UsageError:
        return False
    except Exception:  # noqa: BLE001
        _LOG.exception("closing an environment of %s failed", type(env).__name__)
    return True
