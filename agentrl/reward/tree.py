"""The reward tree of one environment: loads it, scores each step, and keeps the episode's ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from agentrl.reward.component import Component
from agentrl.reward.evidence import Episode
from agentrl.reward.nodes import Node
from agentrl.types import JSON, EndReason

Source = str | Path | Mapping[str, JSON] | Node | Component
"""A TOML file, its content as a mapping, or a tree (or lone component) made in Python."""


@dataclass(frozen=True, slots=True)
class StepScore:
    """What a step earned.

    Attributes:
        value: The step reward; 0.0 where nothing was due; None where the root is unscored: VERIFIER_ERROR.
        unscored: Why there is no value.
        ledger: The root's entry; None where nothing was due.
        success: At the end, whether every objective was met; None before the end and where it cannot be told.
        catastrophe: A catastrophic safeguard that fired at this step, in words: the environment may end as FORBIDDEN.
        durations: Seconds per leaf, by name; not part of the ledger.
    """

    value: float | None
    unscored: str | None = None
    ledger: JSON = None
    success: bool | None = None
    catastrophe: str | None = None
    durations: Mapping[str, float] = field(default_factory=dict)


class RewardTree:
    """One environment's reward. It holds the state of one episode at a time: `begin`, `step`..., `final`."""

    def __init__(self, root: Node | Component) -> None: ...

    @classmethod
    def load(cls, source: Source, base_dir: Path | None = None) -> Self: ...

    def as_dict(self) -> dict[str, JSON]: ...

    @property
    def digest(self) -> str: ...

    def begin(self, episode: Episode) -> None:
        """Call after setup, before the first message (episode.turn == -1): reads Phi(s_0)."""

    def step(self, episode: Episode, *, ended: bool, bootstraps: bool = False) -> StepScore:
        """Call once after each turn, and again with ended=True where the end comes without a new turn (finish, FORBIDDEN).

        Turn components are scored once a turn: a second call in the same turn scores the end components alone. Both
        values are rewards of that turn.
        """

    def final(self, end: EndReason, evidence: JSON = None) -> JSON:
        """The episode's final ledger (see CONTRACT), made of the steps so far."""
