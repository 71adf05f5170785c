"""A thread for each episode: for policies that answer one conversation at a time and may take long over it."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator

from agentrl.policy import MessagePolicy
from agentrl.rollout._batch import Batch
from agentrl.rollout._boundary import policy_failure
from agentrl.rollout._episode import EpisodeRun
from agentrl.rollout._stage import Stage
from agentrl.types import EndReason, Reply, Sampling


class Threads:
    """Runs the episodes of a batch with message policies."""

    def __init__(self, batch: Batch, stage: Stage, policy_of: Callable[[EpisodeRun], MessagePolicy]) -> None:
        """Prepares the threads.

        Args:
            batch: The episodes.
            stage: Where environments run.
            policy_of: The policy of an episode that has begun.
        """
        self._batch = batch
        self._stage = stage
        self._policy_of = policy_of
        self._work: queue.SimpleQueue[EpisodeRun | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[EpisodeRun | BaseException] = queue.SimpleQueue()

    def run(self, sampling: Sampling, concurrency: int) -> None:
        """Runs episodes until none waits.

        Args:
            sampling: How to draw.
            concurrency: Episodes that are under way at once, each in a thread of its own.
        """
        n_threads = 0
        under_way = 0
        try:
            while True:
                while under_way < concurrency and (run := self._batch.begin()) is not None:
                    under_way += 1
                    if n_threads < under_way:
                        n_threads += 1
                        threading.Thread(target=self._serve, args=(sampling,), daemon=True).start()
                    self._work.put(run)
                if not under_way:
                    return
                done = self._done.get()
                under_way -= 1
                if isinstance(done, BaseException):
                    raise done
                self._batch.end(done)
        except BaseException:
            self._batch.stopping.set()
            self._batch.rescue(self._done_so_far())
            raise
        finally:
            for _ in range(n_threads):
                self._work.put(None)

    def _done_so_far(self) -> Iterator[EpisodeRun]:
        while not self._done.empty():
            done = self._done.get()
            if isinstance(done, EpisodeRun):
                yield done

    def _serve(self, sampling: Sampling) -> None:
        """The boundary to the thread: whatever is raised is carried to the collecting thread."""
        while (run := self._work.get()) is not None:
            try:
                self._play(run, sampling)
            except BaseException as error:  # noqa: BLE001
                self._done.put(error)
            else:
                self._done.put(run)

    def _play(self, run: EpisodeRun, sampling: Sampling) -> None:
        self._call(run, run.start)
        policy: MessagePolicy | None = None
        while run.end is None:
            if (why := self._batch.why_end(run)) is not None:
                self._call(run, functools.partial(run.finish, *why))
                continue
            began = time.perf_counter()
            reply, policy, error = self._answer(run, policy, sampling)
            if reply is None:
                self._call(run, functools.partial(run.finish, EndReason.POLICY_ERROR, error))
            else:
                self._call(run, functools.partial(run.take, reply, time.perf_counter() - began))

    def _answer(
        self, run: EpisodeRun, policy: MessagePolicy | None, sampling: Sampling
    ) -> tuple[Reply | None, MessagePolicy | None, str | None]:
        """The boundary to the policy: what it raises ends this episode, and no other."""
        try:
            policy = policy or self._policy_of(run)
            return policy.act(run.env.messages, run.env.tools, sampling), policy, None
        except Exception as error:  # noqa: BLE001
            return None, policy, policy_failure(error)

    def _call(self, run: EpisodeRun, work: Callable[[], None]) -> None:
        self._stage.settle([self._stage.submit(run, work)], all_of_them=True)
