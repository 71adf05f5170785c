"""What a reward tree is made of: leaves that call components, and aggregators over them. Frozen data.

A third party adds a kind of aggregator: a frozen dataclass that extends Aggregator, and an entry point in the group
`agentrl.aggregators` with the kind's name. The built-in kinds are in aggregators.py.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, get_args

from agentrl.errors import RewardError, did_you_mean
from agentrl.reward.component import Bounds, Component, When, check_component
from agentrl.types import JSON

OnUnscored = Literal["propagate", "renormalise", "floor"]
LeafRole = Literal["objective", "safeguard", "diagnostic"]
Severity = Literal["recoverable", "catastrophic"]

AT_BOUND = 1e-9
"""How near to its upper bound a value must be to count as there."""


@dataclass(frozen=True, kw_only=True)
class Node(ABC):
    """What a reward tree is made of.

    Attributes:
        name: What the ledger calls it; None for the component's name or the kind.
    """

    kind: ClassVar[str]
    name: str | None = None

    @property
    @abstractmethod
    def label(self) -> str:
        """The name that the ledger uses."""

    @property
    @abstractmethod
    def bounds(self) -> Bounds:
        """Least and greatest value of one step at which everything below it is due."""

    @property
    @abstractmethod
    def due(self) -> frozenset[When]:
        """When something below it is due."""


@dataclass(frozen=True, kw_only=True)
class Leaf(Node):
    """A component in the tree.

    Attributes:
        component: What is called.
        role: `objective` counts for success; `safeguard` must hold; `diagnostic` is logged and never optimised.
        severity: Of a safeguard: one that is `catastrophic` and below its upper bound has fired, and success is lost.
        reference: How TOML names the component; made from the component where it is empty.
    """

    kind: ClassVar[str] = "component"
    component: Component
    role: LeafRole = "objective"
    severity: Severity = "recoverable"
    reference: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_component(self.component)
        _one_of(self.role, get_args(LeafRole), f"component {self.label!r}: role")
        _one_of(self.severity, get_args(Severity), f"component {self.label!r}: severity")
        if self.severity == "catastrophic" and self.role != "safeguard":
            raise RewardError(
                f"component {self.label!r} is catastrophic but its role is {self.role!r}: only a safeguard can be,"
                " so write role = 'safeguard'."
            )

    @property
    def label(self) -> str:
        """Its own name, or the component's."""
        return self.name or self.component.name

    @property
    def bounds(self) -> Bounds:
        """The component's."""
        return self.component.bounds

    @cached_property
    def due(self) -> frozenset[When]:
        """The component's `when`."""
        return frozenset({self.component.when})


@dataclass(frozen=True)
class Weighted:
    """An addend: a node and what it is multiplied by."""

    weight: float
    node: Node


class Span(NamedTuple):
    """A due child without its value, as `Aggregator.bounds_of` gets it."""

    slot: str
    bounds: Bounds
    weight: float


class Part(NamedTuple):
    """A due child with its value, as `Aggregator.combine` gets it."""

    slot: str
    value: float
    bounds: Bounds
    weight: float

    @property
    def span(self) -> Span:
        """The child without its value."""
        return Span(self.slot, self.bounds, self.weight)


class Edge(NamedTuple):
    """A child as its parent sees it: the field it stands in, the node, its weight where the field holds weights."""

    slot: str
    node: Node
    weight: float | None = None

    def span(self, bounds: Bounds) -> Span:
        """The child without its value."""
        return Span(self.slot, bounds, 1.0 if self.weight is None else self.weight)


@dataclass(frozen=True, slots=True)
class Combined:
    """What an aggregator makes of its parts.

    Attributes:
        value: The node's value.
        contributions: What each part adds to it, in the order of the parts; empty where the value is not a sum.
        open: Whether each part counts, in the order of the parts; empty where all do.
        facts: What a reader needs to follow it, written into the node's ledger entry.
    """

    value: float
    contributions: tuple[float, ...] = ()
    open: tuple[bool, ...] = ()
    facts: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Aggregator(Node):
    """A node with children: its fields that are a Node, a tuple of Nodes or a tuple of Weighted.

    Attributes:
        on_unscored: What it does with a child that is Unscored.
    """

    conditions: ClassVar[tuple[str, ...]] = ()
    """Slots that are read only when another child is due."""
    asides: ClassVar[tuple[str, ...]] = ()
    """Slots that are no part of the value; the ledger marks their entries with the slot's name."""
    mixes: ClassVar[bool] = False
    """Whether children of each turn may stand beside children of the end."""
    copes: ClassVar[tuple[OnUnscored, ...]] = ("propagate", "renormalise", "floor")
    """The values of `on_unscored` that make sense for it."""

    on_unscored: OnUnscored = "propagate"

    def __post_init__(self) -> None:
        if self.on_unscored not in self.copes:
            raise RewardError(
                f"{self.label!r}: on_unscored of {self.kind} must be one of {list(self.copes)},"
                f" found {self.on_unscored!r}."
            )
        if not self.edges:
            raise RewardError(f"{self.label!r}: {self.kind} has no children; give it at least one.")

    @property
    def label(self) -> str:
        """Its own name, or the kind."""
        return self.name or self.kind

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Its children, in the order of its fields."""
        found: list[Edge] = []
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, Weighted):
                    found.append(Edge(each.name, item.node, item.weight))
                elif isinstance(item, Node):
                    found.append(Edge(each.name, item))
        return tuple(found)

    @cached_property
    def bounds(self) -> Bounds:
        """Least and greatest value when all children are due."""
        return self.bounds_of([edge.span(edge.node.bounds) for edge in self.edges])

    @cached_property
    def due(self) -> frozenset[When]:
        """When one of its children is due that is not a condition."""
        below = (edge.node.due for edge in self.edges if edge.slot not in self.conditions)
        return frozenset[When]().union(*below)

    @abstractmethod
    def combine(self, parts: Sequence[Part]) -> Combined:
        """The value of the node from its due children, those that are left out for being Unscored excepted."""

    @abstractmethod
    def bounds_of(self, spans: Sequence[Span]) -> Bounds:
        """Least and greatest value that `combine` can give for children with these bounds."""

    def decided(self, parts: Sequence[Part]) -> bool:  # noqa: ARG002
        """Whether these scored children give the value whatever the Unscored ones would have been."""
        return False

    def floored(self, span: Span) -> float:
        """What an Unscored child counts as where `on_unscored` is `floor`: the worst that it can be."""
        low, high = span.bounds
        return low if span.weight >= 0 else high

    @classmethod
    def recompute(cls, entry: JSON) -> float:
        """The value from a ledger entry of this kind, for the sum check.

        Third parties whose value is not the sum of its contributions replace this.
        """
        return float(sum(child["contribution"] for child in entry["children"] if child.get("contribution") is not None))


def is_diagnostic(node: Node) -> bool:
    """Whether the node is logged only."""
    return isinstance(node, Leaf) and node.role == "diagnostic"


def _one_of(value: str, choices: tuple[str, ...], what: str) -> None:
    if value not in choices:
        raise RewardError(f"{what} must be one of {list(choices)}, found {value!r}.{did_you_mean(value, choices)}")
