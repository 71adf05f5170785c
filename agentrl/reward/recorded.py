"""Episodes from their record: what components see when the world is gone (replay) or elsewhere (a Worker).

The record of an episode's evidence is a plain mapping from the name of a kind to what was had of it, oldest first:
`{"ResultSets": [{"turn": 3, "value": {...}}, {"turn": 4, "unscored": "the reason"}]}`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from agentrl.errors import EvidenceError, did_you_mean
from agentrl.reward.evidence import Episode, TurnView, from_json, kind_name, to_json
from agentrl.types import JSON, EndReason, Message, Task

T = TypeVar("T")


def remember(record: dict[str, list[JSON]], turn: int, kind: type[Any], value: object) -> None:
    """Adds evidence to a record.

    Args:
        record: The episode's.
        turn: Index of the turn that had been taken; -1 after setup.
        kind: The kind of evidence.
        value: The dataclass, or the EvidenceError that stood in its place.

    Raises:
        EvidenceError: If the value cannot be written as JSON.
    """
    had = {"unscored": str(value)} if isinstance(value, EvidenceError) else {"value": to_json(value)}
    record.setdefault(kind_name(kind), []).append({"turn": turn, **had})


@dataclass(frozen=True)
class RecordedEpisode:
    """An Episode whose evidence comes from a record.

    Attributes:
        task: The task.
        end: Why it ended, None while it runs.
        turn: Index of the turn just taken; evidence had after it is not seen.
        max_turns: Turns that it may take.
        turns: Every turn up to `turn`.
        messages: Every message so far.
        record: The evidence.
    """

    task: Task
    end: EndReason | None
    turn: int
    max_turns: int
    turns: tuple[TurnView, ...]
    messages: tuple[Message, ...] = ()
    record: Mapping[str, Sequence[JSON]] = field(default_factory=dict)

    @property
    def n_turns(self) -> int:
        """Turns taken so far."""
        return len(self.turns)

    def evidence(self, kind: type[T]) -> T:
        """The last evidence of this kind that was had up to `turn`.

        Raises:
            EvidenceError: If none was, or it could not be had then.
        """
        name = kind_name(kind)
        had = [each for each in self.record.get(name, ()) if each["turn"] <= self.turn]
        if not had:
            raise EvidenceError(f"no {name} was recorded up to turn {self.turn}.{did_you_mean(name, self.record)}")
        if "unscored" in had[-1]:
            raise EvidenceError(had[-1]["unscored"])
        return from_json(kind, had[-1]["value"])

    def as_json(self) -> JSON:
        """The whole view; `from_json` gives it back."""
        return to_json(self)

    @classmethod
    def from_json(cls, value: JSON) -> Self:
        """The view from its JSON."""
        return from_json(cls, value)

    @classmethod
    def of(cls, episode: Episode, kinds: Sequence[type[Any]]) -> Self:
        """A view of a running episode with the evidence of these kinds, had now."""
        record: dict[str, list[JSON]] = {}
        for kind in kinds:
            try:
                value: object = episode.evidence(kind)
            except EvidenceError as error:
                value = error
            remember(record, episode.turn, kind, value)
        return cls(
            task=dataclasses.replace(episode.task),
            end=episode.end,
            turn=episode.turn,
            max_turns=episode.max_turns,
            turns=tuple(episode.turns),
            messages=tuple(episode.messages),
            record=record,
        )
