"""Batch nodes: roots whose turn rewards need history or siblings, so that only a whole collection has them.

The built-in ones are in batch_nodes.py. Inside an episode (`step`), in evaluation and in the audit a batch node reads
as the weighted sum of its children, `constrained` as its objective. Once an iteration `transform` turns the collected
episodes and the state from before them into turn rewards and the state for the next iteration. A batch node is the
root: nothing stands above it.

A third party adds one as it adds an aggregator: a frozen dataclass that extends BatchNode, and an entry point.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from agentrl.reward.nodes import Aggregator
from agentrl.types import JSON


class Step(NamedTuple):
    """A step of an episode: the turn that it belongs to, and the root's ledger entry."""

    turn: int
    entry: JSON


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One episode of a collection as a batch node reads it. Episodes that ended in an error never get there.

    Attributes:
        id: The trajectory's.
        group: The id of its task: attempts at one task are a group.
        counts: Whether it may enter a mean, a deviation or a rate: it was not cut, and the policy sampled in it.
        n_turns: K, its turns.
        steps: In order; every root is scored.
    """

    id: str
    group: str
    counts: bool
    n_turns: int
    steps: tuple[Step, ...]

    def per_turn(self, values: Iterable[tuple[int, float]]) -> list[float]:
        """Adds up `(turn, value)` into one number a turn, [K]; what was scored before any turn is trained nowhere."""
        rewards_K = [0.0] * self.n_turns
        for turn, value in values:
            if 0 <= turn < self.n_turns:
                rewards_K[turn] += value
        return rewards_K

    @property
    def raw(self) -> list[float]:
        """[K] the root's values."""
        return self.per_turn((step.turn, step.entry["value"]) for step in self.steps)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a batch node makes of one episode.

    Attributes:
        turn_rewards: [K] what its turns are trained on; None where the episode is left out of training.
        excluded: Why it is left out.
        facts: What the rewards follow from, JSON-able, written into the ledger.
    """

    turn_rewards: tuple[float, ...] | None
    excluded: str | None = None
    facts: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Transformed:
    """What a batch node makes of a collection.

    Attributes:
        trained: One for each record, in their order.
        state: For the next collection, JSON-able.
        metrics: Under the names of metrics.jsonl.
    """

    trained: tuple[Trained, ...]
    state: dict[str, JSON]
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class BatchNode(Aggregator):
    """An aggregator that also turns collected episodes into what is trained on."""

    mixes: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = False
    """Whether the attempts at a task are compared: it needs two of each, and goes without a critic."""

    @abstractmethod
    def transform(self, records: Sequence[BatchRecord], state: JSON) -> Transformed:
        """The turn rewards of a collection. Pure.

        Args:
            records: Sorted by id.
            state: From before this collection: what `start_state` or the last `transform` gave.
        """

    @classmethod
    @abstractmethod
    def retrain(cls, ledger: JSON) -> list[float]:
        """[K] The turn rewards a second time, from an episode's ledger alone, for the sum check.

        Args:
            ledger: The episode's: `raw` has one number a turn, `batch` holds `Trained.facts`, `steps` the entries.
        """

    def start_state(self) -> dict[str, JSON]:
        """The state before the first collection."""
        return {}

    def check_state(self, state: JSON) -> None:
        """Refuses a state that this node cannot have written.

        Raises:
            CheckpointError: If it cannot be used.
        """
