"""Components and evidence that reward trees in these tests name by file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from agentrl.reward import (
    Aggregator,
    BatchNode,
    BatchRecord,
    Combined,
    Episode,
    Node,
    Part,
    Span,
    Trained,
    Transformed,
    component,
    require_some,
)
from agentrl.types import Score, Unscored


@dataclass(frozen=True)
class Cell:
    text: str
    value: int | float | str | None = None


@dataclass(frozen=True)
class Rows:
    cells: tuple[Cell, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)


@component(name="t/full")
def full(episode: Episode) -> Score | Unscored:
    return Score(1.0)


@component(name="t/half")
def half(episode: Episode) -> Score | Unscored:
    return Score(0.5)


@component(name="t/early", when="turn")
def early(episode: Episode) -> Score | Unscored:
    return Score(0.25)


@component(name="t/penalty", bounds=(-1.0, 0.0))
def penalty(episode: Episode) -> Score | Unscored:
    return Score(-0.5)


@component(name="t/rows")
def rows(episode: Episode) -> Score | Unscored:
    cells = require_some(episode.evidence(Rows).cells, "rows")
    return Score(1.0, {"n": len(cells)})


@component(name="t/isolated_rows", isolated=True, reads=(Rows,), deadline_s=10.0)
def isolated_rows(episode: Episode) -> Score | Unscored:
    cells = require_some(episode.evidence(Rows).cells, "rows")
    return Score(0.5, {"first": cells[0].text, "turns": episode.n_turns, "task": episode.task.id})


@component(name="t/isolated_blind", isolated=True)
def isolated_blind(episode: Episode) -> Score | Unscored:
    return Score(float(len(episode.evidence(Rows).cells)))


@component(name="t/isolated_hang", isolated=True, deadline_s=0.5)
def isolated_hang(episode: Episode) -> Score | Unscored:
    time.sleep(60)
    return Score(1.0)


@component(name="t/isolated_raise", isolated=True)
def isolated_raise(episode: Episode) -> Score | Unscored:
    raise KeyError("lost")


@component(name="t/isolated_unsure", isolated=True)
def isolated_unsure(episode: Episode) -> Score | Unscored:
    return Unscored("the referee is away")


@dataclass(frozen=True)
class Short:
    """How short the answer is."""

    limit: int = 10
    strict: bool = False
    name: ClassVar[str] = "t/short"
    when: ClassVar[str] = "end"
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __call__(self, episode: Episode) -> Score | Unscored:
        return Score(1.0 if len(episode.turns[-1].text) <= self.limit else 0.0)


@dataclass(frozen=True)
class Given:
    """Gives what it is told to; Unscored where that is nothing."""

    name: str
    value: float | None = None
    low: float = 0.0
    high: float = 1.0
    when: Literal["turn", "end"] = "end"

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high

    def __call__(self, episode: Episode) -> Score | Unscored:
        return Unscored("nothing was given") if self.value is None else Score(self.value)


class Plain:
    """A class that takes no options."""


@dataclass(frozen=True, kw_only=True)
class Median(Aggregator):
    """The middle child, the upper one of two; somebody else's kind of node."""

    kind: ClassVar[str] = "median"
    children: tuple[Node, ...]
    note: str = ""

    def combine(self, parts: Sequence[Part]) -> Combined:
        ranked = sorted(range(len(parts)), key=lambda i: parts[i].value)
        middle = ranked[len(parts) // 2]
        value = parts[middle].value
        return Combined(
            value, tuple(value if i == middle else 0.0 for i in range(len(parts))), facts={"note": self.note}
        )

    def bounds_of(self, spans: Sequence[Span]) -> tuple[float, float]:
        return min(span.bounds[0] for span in spans), max(span.bounds[1] for span in spans)


@dataclass(frozen=True, kw_only=True)
class Ranked(BatchNode):
    """Somebody else's batch node: the better half of a collection is trained on 1 at the last turn, the rest on 0."""

    kind: ClassVar[str] = "ranked"
    child: Node
    keep: float = 0.5

    def combine(self, parts: Sequence[Part]) -> Combined:
        return Combined(parts[0].value, (parts[0].value,))

    def bounds_of(self, spans: Sequence[Span]) -> tuple[float, float]:
        return spans[0].bounds

    def start_state(self) -> dict[str, int]:
        return {"collections": 0}

    def transform(self, records: Sequence[BatchRecord], state: dict[str, int]) -> Transformed:
        best = sorted(records, key=lambda record: -sum(record.raw))[: int(len(records) * self.keep)]
        trained = [Trained((*[0.0] * (r.n_turns - 1), float(r in best)), facts={"won": r in best}) for r in records]
        return Transformed(tuple(trained), {"collections": state["collections"] + 1}, {"reward/won": float(len(best))})

    @classmethod
    def retrain(cls, ledger: dict) -> list[float]:
        return [0.0] * (len(ledger["raw"]) - 1) + [float(ledger["batch"]["won"])]
