"""The built-in kinds of aggregator, the same in Python (builders.py) and in TOML (loading.py).

    kind            children                 value
    component       -                        the component's score                     (a leaf)
    weighted_sum    children, with weights   sum of weight * child
    gate            condition, child         child where condition >= at_least, else floor
    lexicographic   tiers, highest first     each fills an equal share of [0, 1], and counts when all above are full
    product         children                 product of the children
    minimum         children                 the least child
    clip            child                    child, held inside [low, high]
    shaping         potential                scale * (gamma_turn * Phi(after) - Phi(before)); an addend of the root

Roots that need a whole collection (`normalised`, `constrained`, `group_relative`) are in batch_nodes.py.

Every one of them is evaluated at each step for the children that are due: components of each turn at each turn,
components of the end at the end. What a node does with a child that is Unscored is its `on_unscored`:

    propagate       it is Unscored too (default); but what is behind a closed gate does not matter
    renormalise     the child is left out; the weights of the others grow so that their absolute sum stays
    floor           the child counts as the worst that it can be; a gate is closed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from agentrl.errors import RewardError
from agentrl.reward.component import Bounds, Component, When, check_component
from agentrl.reward.nodes import AT_BOUND, Aggregator, Combined, Node, OnUnscored, Part, Span, Weighted, is_diagnostic

MIN_WEIGHT = 1e-6
"""Smallest weight of a sum that is not 0."""


@dataclass(frozen=True, kw_only=True)
class WeightedSum(Aggregator):
    """Sum of weight * child over the children that are due."""

    kind: ClassVar[str] = "weighted_sum"
    mixes: ClassVar[bool] = True
    children: tuple[Weighted, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for weight, node in ((each.weight, each.node) for each in self.children):
            if not math.isfinite(weight):
                raise RewardError(f"{self.label!r}: the weight of {node.label!r} must be finite, found {weight}.")
            if 0.0 < abs(weight) < MIN_WEIGHT:
                raise RewardError(
                    f"{self.label!r}: the weight of {node.label!r} is {weight:g}: expected 0 or at least {MIN_WEIGHT:g}"
                    " in size, because a smaller one means nothing beside others, and overflows where they drop out."
                )
            if is_diagnostic(node) and weight != 0:
                raise RewardError(
                    f"{self.label!r}: {node.label!r} is a diagnostic, which is logged and never optimised: leave its"
                    f" weight out (found {weight}), or give it another role."
                )
        if all(is_diagnostic(each.node) for each in self.children):
            raise RewardError(f"{self.label!r}: it holds diagnostics alone, so there is nothing to sum.")

    def combine(self, parts: Sequence[Part]) -> Combined:
        """Adds up."""
        contributions = tuple(part.weight * part.value for part in parts)
        return Combined(float(sum(contributions)), contributions)

    def bounds_of(self, spans: Sequence[Span]) -> Bounds:
        """Adds up the worst and the best."""
        ends = [sorted((span.weight * span.bounds[0], span.weight * span.bounds[1])) for span in spans]
        return float(sum(low for low, _ in ends)), float(sum(high for _, high in ends))


@dataclass(frozen=True, kw_only=True)
class Gate(Aggregator):
    """The child where the condition holds, a floor where it does not.

    Attributes:
        condition: What has to hold.
        child: What counts then.
        at_least: The condition holds from this value on; None for the condition's upper bound.
        floor: The value of a closed gate.
    """

    kind: ClassVar[str] = "gate"
    conditions: ClassVar[tuple[str, ...]] = ("condition",)
    mixes: ClassVar[bool] = True
    copes: ClassVar[tuple[OnUnscored, ...]] = ("propagate", "floor")
    condition: Node
    child: Node
    at_least: float | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.condition.bounds
        if self.at_least is not None and not low < self.at_least <= high:
            raise RewardError(
                f"{self.label!r}: at_least must lie in ({low:g}, {high:g}], the range of its condition"
                f" {self.condition.label!r}, found {self.at_least:g}: the gate would always be open or never."
            )
        if not math.isfinite(self.floor):
            raise RewardError(f"{self.label!r}: floor must be finite, found {self.floor}.")

    @property
    def threshold(self) -> float:
        """The least value of the condition that opens the gate."""
        return self.condition.bounds[1] if self.at_least is None else self.at_least

    def decided(self, parts: Sequence[Part]) -> bool:
        """A closed gate is worth its floor, whatever is behind it."""
        return any(part.slot == "condition" and not self._opens(part.value) for part in parts)

    def combine(self, parts: Sequence[Part]) -> Combined:
        """Opens or not, and says why."""
        asked = next(part for part in parts if part.slot == "condition")
        is_open = self._opens(asked.value)
        relation = "reached" if is_open else "is below"
        gate = {
            "open": is_open,
            "why": f"{self.condition.label} = {asked.value:g} {relation} {self.threshold:g}",
            "at_least": self.threshold,
            "floor": self.floor,
        }
        value = next(part.value for part in parts if part.slot == "child") if is_open else self.floor
        return Combined(value, open=tuple(part is asked or is_open for part in parts), facts={"gate": gate})

    def bounds_of(self, spans: Sequence[Span]) -> Bounds:
        """The child's, widened to hold the floor."""
        low, high = next(span.bounds for span in spans if span.slot == "child")
        return min(low, self.floor), max(high, self.floor)

    def floored(self, span: Span) -> float:
        """An Unscored condition closes the gate; an Unscored child counts as the floor."""
        if span.slot != "condition":
            return self.floor
        worst = span.bounds[0]
        # One whose worst would open the gate, as where its range is a point, closes it too: it is not known.
        return -math.inf if self._opens(worst) else worst

    def _opens(self, value: float) -> bool:
        return value >= self.threshold - AT_BOUND


@dataclass(frozen=True, kw_only=True)
class Lexicographic(Aggregator):
    """Tiers, the most important first: with n of them each fills 1/n of [0, 1] by how far it is between its bounds.

    A tier counts only while all tiers above it are at their upper bounds, so nothing below outweighs a tier.
    """

    kind: ClassVar[str] = "lexicographic"
    tiers: tuple[Node, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for tier in self.tiers:
            if tier.bounds[0] == tier.bounds[1]:
                raise RewardError(f"{self.label!r}: tier {tier.label!r} can only be {tier.bounds[0]:g}: remove it.")

    def combine(self, parts: Sequence[Part]) -> Combined:
        """Fills tier after tier, up to the first that is not full."""
        contributions: list[float] = []
        opens: list[bool] = []
        is_open = True
        for part in parts:
            low, high = part.bounds
            contributions.append((part.value - low) / (high - low) / len(parts) if is_open else 0.0)
            opens.append(is_open)
            is_open = is_open and part.value >= high - AT_BOUND
        return Combined(float(sum(contributions)), tuple(contributions), tuple(opens))

    def bounds_of(self, spans: Sequence[Span]) -> Bounds:  # noqa: ARG002
        """Always [0, 1]."""
        return 0.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Product(Aggregator):
    """The product of its children."""

    kind: ClassVar[str] = "product"
    children: tuple[Node, ...]

    def combine(self, parts: Sequence[Part]) -> Combined:
        """Multiplies."""
        return Combined(math.prod(part.value for part in parts))

    def bounds_of(self, spans: Sequence[Span]) -> Bounds:
        """The least and greatest product of ends."""
        low, high = 1.0, 1.0
        for span in spans:
            corners = [a * b for a in (low, high) for b in span.bounds]
            low, high = min(corners), max(corners)
        return low, high


@dataclass(frozen=True, kw_only=True)
class Minimum(Aggregator):
    """The least of its children."""

    kind: ClassVar[str] = "minimum"
    children: tuple[Node, ...]

    def combine(self, parts: Sequence[Part]) -> Combined:
        """Takes the least."""
        return Combined(min(part.value for part in parts))

    def bounds_of(self, spans: Sequence[Span]) -> Bounds:
        """The least low and the least high."""
        return min(span.bounds[0] for span in spans), min(span.bounds[1] for span in spans)


@dataclass(frozen=True, kw_only=True)
class Clip(Aggregator):
    """The child, held between `low` and `high`."""

    kind: ClassVar[str] = "clip"
    copes: ClassVar[tuple[OnUnscored, ...]] = ("propagate", "floor")
    child: Node
    low: float
    high: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise RewardError(
                f"{self.label!r}: clip needs two finite numbers, low below high, found low = {self.low} and"
                f" high = {self.high}."
            )

    def combine(self, parts: Sequence[Part]) -> Combined:
        """Holds it inside."""
        return Combined(self._hold(parts[0].value), facts={"clip": {"low": self.low, "high": self.high}})

    def bounds_of(self, spans: Sequence[Span]) -> Bounds:
        """The child's, held inside."""
        low, high = spans[0].bounds
        return self._hold(low), self._hold(high)

    def floored(self, span: Span) -> float:
        """The child's low end, held inside."""
        return self._hold(span.bounds[0])

    def _hold(self, value: float) -> float:
        return min(max(value, self.low), self.high)


@dataclass(frozen=True, kw_only=True)
class Shaping(Node):
    """Potential-based shaping (Ng, Harada and Russell, 1999): F_k = scale * (gamma_turn * Phi(s_{k+1}) - Phi(s_k)).

    Phi(s_0) is read after setup. Phi is 0 at ends, and kept where the critic's value stands for the future (CUT), so
    the discounted sum of F over an episode is -scale * Phi(s_0) whatever the agent does: it moves credit, pays nothing.
    An addend of the root; left out of success.

    Attributes:
        potential: A component of each turn.
        gamma_turn: The learner's discount across turns; its gamma_token must be 1.
        scale: What the difference is multiplied by.
    """

    kind: ClassVar[str] = "shaping"
    potential: Component
    gamma_turn: float = 1.0
    scale: float = 1.0
    reference: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_component(self.potential)
        if self.potential.when != "turn":
            raise RewardError(
                f"{self.label!r}: the potential {self.potential.name!r} is due at the end, and shaping needs it at each"
                " turn: decorate it with when='turn'."
            )
        if not 0.0 <= self.gamma_turn <= 1.0:
            raise RewardError(f"{self.label!r}: gamma_turn must be in [0, 1], found {self.gamma_turn}.")
        if not math.isfinite(self.scale):
            raise RewardError(f"{self.label!r}: scale must be finite, found {self.scale}.")

    @property
    def label(self) -> str:
        """Its own name, or the kind."""
        return self.name or self.kind

    @cached_property
    def bounds(self) -> Bounds:
        """Over both ends of both potentials, 0 among them."""
        low, high = min(self.potential.bounds[0], 0.0), max(self.potential.bounds[1], 0.0)
        ends = sorted((self.scale * (self.gamma_turn * low - high), self.scale * (self.gamma_turn * high - low)))
        return ends[0], ends[1]

    @property
    def due(self) -> frozenset[When]:
        """At each turn, and once more where the end comes without a turn."""
        return frozenset({"turn", "end"})


AGGREGATORS: dict[str, type[Aggregator]] = {
    each.kind: each for each in (WeightedSum, Gate, Lexicographic, Product, Minimum, Clip)
}
"""The built-in kinds by name; `shaping` is not among them, because it stands beside them at the root."""
