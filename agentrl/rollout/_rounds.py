"""Rounds: all episodes that wait for a message get one in the same batch, then their environments step in threads."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence

from agentrl.rollout._batch import Batch
from agentrl.rollout._boundary import policy_failure
from agentrl.rollout._episode import EpisodeRun
from agentrl.rollout._stage import Stage
from agentrl.rollout.codec import Codec
from agentrl.rollout.requests import BatchPolicy, GenerationRequest
from agentrl.types import EndReason, Generation, Reply, Sampling

_PATIENCE_S = 0.05


class Rounds:
    """Runs the episodes of a batch with a policy that samples for many of them at once.

    In deterministic mode a round waits for every environment, so that the batches depend on nothing that is timed;
    otherwise it goes on with those that answered.
    """

    def __init__(self, batch: Batch, stage: Stage, policy: BatchPolicy, codec: Codec, seed: int) -> None:
        """Prepares the rounds.

        Args:
            batch: The episodes.
            stage: Where environments run.
            policy: Samples.
            codec: Its codec.
            seed: Of the draws; each is keyed by it, the episode, the attempt and the turn.
        """
        self._batch = batch
        self._stage = stage
        self._policy = policy
        self._codec = codec
        self._seed = seed

    def run(self, sampling: Sampling, concurrency: int, *, deterministic: bool) -> None:
        """Runs rounds until nothing waits.

        Args:
            sampling: How to draw.
            concurrency: Episodes that are under way at once.
            deterministic: Whether each round waits for every environment.
        """
        while True:
            while self._stage.under_way < concurrency and (run := self._batch.begin()) is not None:
                self._stage.submit(run, run.start)
            if not self._stage.under_way:
                return
            settled = self._stage.settle(all_of_them=deterministic, patience_s=_PATIENCE_S)
            runs = sorted(settled, key=lambda run: run.request.id)
            ended = [run for run in runs if run.end is not None]
            for run in ended:
                self._policy.release(_kept_as(run))
            self._batch.end(ended)
            self._go_on([run for run in runs if run.end is None], sampling)

    def _go_on(self, runs: Sequence[EpisodeRun], sampling: Sampling) -> None:
        """Gives episodes their next message, or their end."""
        waiting: list[EpisodeRun] = []
        for run in runs:
            if (why := self._batch.why_end(run)) is not None:
                self._stage.submit(run, functools.partial(run.finish, *why))
            else:
                waiting.append(run)
        if not waiting:
            return
        began = time.perf_counter()
        generations, error = self._generate([self._request(run, sampling) for run in waiting])
        took_s = time.perf_counter() - began
        if error is not None:
            for run in waiting:
                self._stage.submit(run, functools.partial(run.finish, EndReason.POLICY_ERROR, error))
            return
        for run, generation in zip(waiting, generations, strict=True):
            reply = Reply(self._codec.decode(generation.token_ids), generation.finish_reason, generation)
            self._stage.submit(run, functools.partial(run.take, reply, took_s))

    def _generate(self, requests: list[GenerationRequest]) -> tuple[list[Generation], str | None]:
        """The boundary to the policy: what it raises ends the episodes that it was to answer, and no others."""
        try:
            return self._policy.generate_batch(requests), None
        except Exception as error:  # noqa: BLE001
            return [], policy_failure(error)

    def _request(self, run: EpisodeRun, sampling: Sampling) -> GenerationRequest:
        room = run.room
        if room is not None and room < sampling.max_tokens:
            sampling = dataclasses.replace(sampling, max_tokens=room)
        key = (self._seed, run.request.id, run.request.seed, run.attempt, run.n_turns)
        return GenerationRequest(_kept_as(run), run.token_ids, sampling, key)


def _kept_as(run: EpisodeRun) -> str:
    return f"{run.request.id}#{run.attempt}"
