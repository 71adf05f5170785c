"""A thread for each episode: for policies that answer one conversation at a time and may take long over it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from agentrl.policy import MessagePolicy
from agentrl.rollout._batch import Batch
from agentrl.rollout._boundary import policy_failure
from agentrl.rollout._episode import EpisodeRun
from agentrl.rollout._stage import Stage
from agentrl.rollout.requests import ContextFullError
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

    def run(self, sampling: Sampling, concurrency: int) -> None:
        """Runs episodes until none waits.

        Args:
            sampling: How to draw.
            concurrency: Episodes that are under way at once.
        """
        while True:
            while self._stage.under_way < concurrency and (run := self._batch.begin()) is not None:
                self._stage.submit(run, functools.partial(self._play, run, sampling))
            if not self._stage.under_way:
                return
            self._batch.end(self._stage.settle(all_of_them=False))

    def _play(self, run: EpisodeRun, sampling: Sampling) -> None:
        run.start()
        policy_of = functools.cache(lambda: self._policy_of(run))
        while run.end is None:
            if (why := self._batch.why_end(run)) is not None:
                run.finish(*why)
                continue
            began = time.perf_counter()
            reply = self._answer(run, policy_of, sampling)
            if isinstance(reply, Reply):
                run.take(reply, time.perf_counter() - began)
            else:
                run.finish(*reply)

    def _answer(
        self, run: EpisodeRun, policy_of: Callable[[], MessagePolicy], sampling: Sampling
    ) -> Reply | tuple[EndReason, str | None]:
        """The boundary to the policy: what it raises ends this episode, and no other."""
        try:
            return policy_of().act(run.env.messages, run.env.tools, sampling)
        except ContextFullError:
            return EndReason.CONTEXT_FULL, None
        except Exception as error:  # noqa: BLE001
            return EndReason.POLICY_ERROR, policy_failure(error)
