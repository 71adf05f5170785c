"""Rewards once more, from recorded evidence: the components are called again, the world is not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl._step import encodable
from agentrl.env import ToolEnv
from agentrl.formats import Format
from agentrl.reward.evidence import TurnView
from agentrl.reward.recorded import RecordedEpisode
from agentrl.reward.tree import RewardTree, StepScore
from agentrl.types import JSON, EndReason, Message, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Rescored:
    """What an episode earns by its record.

    Attributes:
        rewards: Of each turn; NaN where it is unscored now.
        ledger: As the environment would have written it, without the record of evidence.
    """

    rewards: tuple[float, ...]
    ledger: dict[str, JSON] = field(default_factory=dict)


def rescore(env: ToolEnv, trajectory: Trajectory) -> Rescored:
    """Scores a recorded episode with the environment's reward tree.

    Args:
        env: Gives tree, format and number of turns; no episode runs in it.
        trajectory: Of an episode that was scored.
    """
    tree, views = env.reward_tree, _Views(trajectory, env.format, env.max_turns)
    apart = ends_apart(trajectory)
    scores = _scores(tree, views, apart=apart or trajectory.end is EndReason.FORBIDDEN)
    if trajectory.end is EndReason.FORBIDDEN and scores[-2].catastrophe is None:
        # Not a safeguard that fired after the turn ended it, but a tool in it: turn and end were scored together.
        scores = _scores(tree, views, apart=False)
    paid = [math.nan if score.value is None else score.value for score in scores]
    n = len(trajectory.turns)
    rewards = (*paid[: n - 1], sum(paid[n - 1 :])) if n else ()
    return Rescored(rewards, tree.final(trajectory.end))


def ends_apart(trajectory: Trajectory) -> bool:
    """Whether the episode was ended from outside after its last turn had been scored, without a message of its own."""
    if trajectory.end in {EndReason.CUT, EndReason.TIME_LIMIT, EndReason.POLICY_ERROR} or not trajectory.turns:
        return True
    return trajectory.end is EndReason.CONTEXT_FULL and trajectory.turns[-1].finish_reason != "length"


def _scores(tree: RewardTree, views: _Views, *, apart: bool) -> list[StepScore]:
    """The scores of each turn, and of the end where it came apart from the last turn."""
    end, last = views.trajectory.end, len(views.trajectory.turns) - 1
    tree.begin(views.at(-1, ended=False))
    scores = []
    for k in range(last + 1):
        ended = k == last and not apart
        scores.append(tree.step(views.at(k, ended=ended), ended=ended, bootstraps=ended and end.bootstraps))
    if apart:
        answered = end is not EndReason.FORBIDDEN
        scores.append(tree.step(views.at(last, ended=True, answered=answered), ended=True, bootstraps=end.bootstraps))
    return scores


class _Views:
    """What components saw at each moment of a recorded episode."""

    def __init__(self, trajectory: Trajectory, fmt: Format, max_turns: int) -> None:
        self.trajectory = trajectory
        self._max_turns = max_turns
        self._turns = tuple(_view(turn) for turn in trajectory.turns)
        self._messages = [_spoken(turn, fmt) for turn in trajectory.turns]
        ledger: Mapping[str, JSON] = trajectory.ledger or {}
        self._record: Mapping[str, Sequence[JSON]] = ledger.get("evidence") or {}

    def at(self, turn: int, *, ended: bool, answered: bool = False) -> RecordedEpisode:
        """The view after a turn, -1 for that after setup.

        Args:
            turn: Which.
            ended: Whether the episode has ended.
            answered: Whether what answers the turn was written already, which happens after its score.
        """
        messages = [*self.trajectory.opening]
        for k, (said, shown) in enumerate(self._messages[: turn + 1]):
            messages += (said, *shown) if answered or k < turn else (said,)
        return RecordedEpisode(
            task=self.trajectory.task,
            end=self.trajectory.end if ended else None,
            turn=turn,
            max_turns=self._max_turns,
            turns=self._turns[: turn + 1],
            messages=tuple(messages),
            record=self._record,
        )


def _view(turn: Turn) -> TurnView:
    return TurnView(encodable(turn.text), turn.calls, turn.results, turn.malformed)


def _spoken(turn: Turn, fmt: Format) -> tuple[Message, tuple[Message, ...]]:
    """The assistant message of a turn, and what answered it."""
    said = Message("assistant", encodable(turn.text), turn.calls)
    if turn.malformed is not None:
        return said, (fmt.render_nudge(turn.malformed),)
    return said, fmt.render_results(turn.results)
