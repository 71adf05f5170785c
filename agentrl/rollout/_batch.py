"""One call of `collect`: which episodes wait, which are done, and when enough have failed."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from agentrl.config import RolloutConfig
from agentrl.errors import TooManyErrors
from agentrl.rollout._episode import EpisodeRun, Limits
from agentrl.rollout._stage import Stage
from agentrl.types import EndReason, EpisodeRequest, Trajectory


class Batch:
    """The book-keeping of one collection; used by the collecting thread, but for `why_end`.

    Attributes:
        finished: Trajectories, as they ended.
        stopping: Set where no new episode may begin and those that run are to be cut.
    """

    def __init__(
        self,
        requests: Sequence[EpisodeRequest],
        config: RolloutConfig,
        limits: Limits,
        stage: Stage,
        on_episode: Callable[[Trajectory], None] | None,
    ) -> None:
        """Opens the books.

        Args:
            requests: What to run, in the order of ids.
            config: Limits and retries.
            limits: Codec and context.
            stage: Where environments come from.
            on_episode: Called with each episode as it ends.
        """
        self.finished: list[Trajectory] = []
        self.stopping = threading.Event()
        self._n_requests = len(requests)
        self._waiting = deque((request, 0, 0) for request in requests)
        self._config = config
        self._limits = limits
        self._stage = stage
        self._on_episode = on_episode
        self._errors: Counter[str] = Counter()

    def begin(self) -> EpisodeRun | None:
        """The next attempt that is to run, in an environment; None where none waits."""
        if self.stopping.is_set() or not self._waiting:
            return None
        request, attempt, lost = self._waiting.popleft()
        env = self._stage.take_env()
        return EpisodeRun(request, env, self._limits, self._stage.calling, attempt=attempt, lost_tokens=lost)

    def why_end(self, run: EpisodeRun) -> tuple[EndReason, str | None] | None:
        """Whether an episode that waits for a message has to end instead.

        Args:
            run: The episode.

        Returns:
            The reason, and what is wrong where it is an error.
        """
        if self.stopping.is_set():
            return EndReason.CUT, None
        if (problem := run.opening_too_long()) is not None:
            return EndReason.ENV_ERROR, problem
        if run.room is not None and run.room < 1:
            return EndReason.CONTEXT_FULL, None
        if not self._config.deterministic and run.tool_s > self._config.episode_timeout_s:
            return EndReason.TIME_LIMIT, None
        return None

    def end(self, runs: Sequence[EpisodeRun]) -> None:
        """Takes attempts that have ended: each is tried again, or delivered.

        Args:
            runs: The attempts.

        Raises:
            TooManyErrors: If too many episodes have ended in errors for good.
        """
        for k, run in enumerate(runs):
            try:
                self._end(run)
            except BaseException:
                self.rescue(runs[k + 1 :])
                raise

    def rescue(self, runs: Iterable[EpisodeRun]) -> None:
        """Delivers what has ended well among episodes that an error or an interrupt would take along.

        Args:
            runs: Attempts that have not been given to `end`.
        """
        for run in runs:
            if run.end is not None and not run.end.is_error:
                self._deliver(run.trajectory())

    def _end(self, run: EpisodeRun) -> None:
        self._stage.give_back(run)
        trajectory = run.trajectory()
        if trajectory.end.is_error and run.attempt < self._config.max_retries and not self.stopping.is_set():
            self._waiting.appendleft((run.request, run.attempt + 1, trajectory.n_sampled))
            return
        self._deliver(trajectory)
        if trajectory.end.is_error:
            cause = (trajectory.error or "").strip().splitlines() or ["no cause was given"]
            self._errors[f"{trajectory.end}: {cause[-1]}"] += 1
            self._check_errors()

    def _deliver(self, trajectory: Trajectory) -> None:
        if trajectory.end is EndReason.CUT and not trajectory.turns:
            return  # It was stopped before anything happened in it.
        self.finished.append(trajectory)
        if self._on_episode is not None:
            self._on_episode(trajectory)

    def _check_errors(self) -> None:
        n = self._errors.total()
        if n <= self._config.max_error_rate * self._n_requests:
            return
        cause, times = self._errors.most_common(1)[0]
        raise TooManyErrors(
            f"{n} of {self._n_requests} episodes ended in errors that are not the agent's, each after"
            f" {self._config.max_retries} retries: expected at most a share of {self._config.max_error_rate:g}"
            f" (rollout.max_error_rate). {times} of them: {cause}"
        )
