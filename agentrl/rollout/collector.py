"""The collector: runs many episodes at once, and never lets one bad episode end the run.

Local models sample in rounds: all episodes that wait for a message get one together, then their environments step in
threads. Message policies (experts, scripts, endpoints) have a thread for each episode. Either way environments are used
again from episode to episode, and what ends an episode from outside is decided here: a full context, a time limit, a
policy that fails, an environment that hangs, a request to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self, cast

from agentrl.config import RolloutConfig
from agentrl.env import ToolEnv
from agentrl.errors import UsageError
from agentrl.policy import MessagePolicy
from agentrl.rollout._batch import Batch
from agentrl.rollout._episode import EpisodeRun, Limits
from agentrl.rollout._rounds import Rounds
from agentrl.rollout._stage import Stage
from agentrl.rollout._threads import Threads
from agentrl.rollout.codec import Codec
from agentrl.rollout.requests import BatchPolicy
from agentrl.types import EpisodeRequest, Sampling, Task, Trajectory

PolicyFactory = Callable[[ToolEnv, Task], MessagePolicy]
"""Makes the policy of one episode, as the `expert` of an environment does."""


class Collector:
    """Turns requests into trajectories.

    In deterministic mode equal requests give equal trajectories (timings apart), on the same machine and threads. Use
    it as a context manager, or close it.
    """

    def __init__(
        self,
        make_env: Callable[[], ToolEnv],
        policy: BatchPolicy | MessagePolicy | PolicyFactory,
        codec: Codec | None,
        config: RolloutConfig,
        seed: int = 0,
    ) -> None:
        """Prepares a collector; no environment is made yet.

        Args:
            make_env: Makes an environment; each is used by one episode at a time.
            policy: A local model (HFPolicy), a message policy, or a function that makes one for an episode.
            codec: Needed by local models. With a message policy it fills in the tokens of demonstrations, their
                logprobs 0.
            config: Concurrency, limits, retries.
            seed: Of the policy's draws.

        Raises:
            UsageError: If a local model comes without a codec.
        """
        self._policy = policy
        self._codec = codec
        self._config = config
        self._seed = seed
        self._is_local = hasattr(policy, "generate_batch")
        if self._is_local and codec is None:
            raise UsageError("a local model needs its codec: give Collector the Codec that the policy was made with.")
        # A local model answers everybody at once, so that nothing but environments runs in the threads.
        n_threads = config.threads if self._is_local else config.concurrency
        timeout_s = config.episode_timeout_s
        self._stage = Stage(make_env, threads=n_threads, calls=config.threads, timeout_s=timeout_s)
        self._batch: Batch | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def collect(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling | None = None,
        on_episode: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Runs episodes.

        Args:
            requests: What to run; ids are unique. They are begun in the order of their ids.
            sampling: How the policy draws; as configured where not given.
            on_episode: Called, in the calling thread, with each episode as it ends: what it was given is not lost
                whatever comes after.

        Returns:
            The trajectories, sorted by id; fewer than requests only after `stop`.

        Raises:
            UsageError: If two requests have one id.
            TooManyErrors: If more of the episodes than `max_error_rate` ended in errors after their retries.
            AbandonedError: If too many environments hang.
            RunError: What else must stop a run (InvariantError).
            KeyboardInterrupt: On Ctrl-C, once the environments are closed.
        """
        ordered = sorted(requests, key=lambda request: request.id)
        twice = [request.id for request, before in zip(ordered[1:], ordered, strict=False) if request.id == before.id]
        if twice:
            raise UsageError(f"expected one request for each id, found {twice[0]!r} more than once.")
        limits = Limits(self._codec, self._max_context())
        batch = Batch(ordered, self._config, limits, self._stage, on_episode)
        self._batch = batch
        try:
            self._run(batch, sampling or self._config.sampling)
        except BaseException:
            try:
                batch.rescue(self._stage.leftovers())
            finally:
                self.close()
            raise
        return sorted(batch.finished, key=lambda trajectory: trajectory.id)

    def stop(self) -> None:
        """Asks a collection that runs to end: no episode begins, and those under way end as CUT at their next turn.

        Safe from any thread, and from `on_episode`.
        """
        if self._batch is not None:
            self._batch.stopping.set()

    def close(self) -> None:
        """Closes the environments and ends the threads. The collector cannot be used after it."""
        self.stop()
        self._stage.close()

    def _run(self, batch: Batch, sampling: Sampling) -> None:
        concurrency = self._config.concurrency
        if self._is_local and self._codec is not None:
            rounds = Rounds(batch, self._stage, cast("BatchPolicy", self._policy), self._codec, self._seed)
            rounds.run(sampling, concurrency, deterministic=self._config.deterministic)
        else:
            Threads(batch, self._stage, self._policy_of).run(sampling, concurrency)

    def _policy_of(self, run: EpisodeRun) -> MessagePolicy:
        if hasattr(self._policy, "act"):
            return cast("MessagePolicy", self._policy)
        return cast("PolicyFactory", self._policy)(run.env, run.request.task)

    def _max_context(self) -> int | None:
        limits = (self._config.max_context, getattr(self._policy, "max_context", None))
        return min((limit for limit in limits if limit is not None), default=None)
