"""Reward trees in Python: one function per kind. A bare component stands for a leaf with the role of an objective.

Example: `weighted_sum((1.0, gate(executes, correct)), (0.1, leaf(few_turns, role="safeguard")))`.
"""

from __future__ import annotations

from agentrl.reward.aggregators import Clip, Gate, Lexicographic, Minimum, Product, Shaping, WeightedSum
from agentrl.reward.batch_nodes import Constrained, GroupRelative, Normalised
from agentrl.reward.component import Component
from agentrl.reward.nodes import Leaf, LeafRole, Node, OnUnscored, Severity, Weighted, is_diagnostic


def leaf(
    component: Component, *, role: LeafRole = "objective", severity: Severity = "recoverable", name: str | None = None
) -> Leaf:
    """A component with its role.

    Args:
        component: A decorated function, or an object with name, when, bounds and `__call__`.
        role: `objective` counts for success, `safeguard` must hold, `diagnostic` is logged only.
        severity: Of a safeguard: `catastrophic` loses success when it fires.
        name: For the ledger; needed where one component stands in a tree twice.
    """
    return Leaf(component=component, role=role, severity=severity, name=name)


def as_node(value: Node | Component) -> Node:
    """The node itself, or a leaf that calls the component.

    Raises:
        RewardError: If it is neither.
    """
    return value if isinstance(value, Node) else Leaf(component=value)


def weighted_sum(
    *children: tuple[float, Node | Component] | Node | Component,
    on_unscored: OnUnscored = "propagate",
    name: str | None = None,
) -> WeightedSum:
    """Sum of weight * child over the children that are due.

    Args:
        children: `(weight, child)`, or a child alone: weight 1, and 0 for a diagnostic.
        on_unscored: What an Unscored child does.
        name: For the ledger.
    """
    return WeightedSum(children=tuple(_addend(child) for child in children), on_unscored=on_unscored, name=name)


def _addend(child: tuple[float, Node | Component] | Node | Component) -> Weighted:
    if isinstance(child, tuple):
        weight, node = child
        return Weighted(float(weight), as_node(node))
    node = as_node(child)
    return Weighted(0.0 if is_diagnostic(node) else 1.0, node)


def gate(
    condition: Node | Component,
    child: Node | Component,
    *,
    at_least: float | None = None,
    floor: float = 0.0,
    on_unscored: OnUnscored = "propagate",
    name: str | None = None,
) -> Gate:
    """The child where the condition holds, a floor where it does not.

    Args:
        condition: What has to hold.
        child: What counts then.
        at_least: The condition holds from this value on; None for its upper bound.
        floor: The value of a closed gate.
        on_unscored: `propagate`, or `floor`: closed.
        name: For the ledger.
    """
    least = None if at_least is None else float(at_least)
    return Gate(
        condition=as_node(condition),
        child=as_node(child),
        at_least=least,
        floor=float(floor),
        on_unscored=on_unscored,
        name=name,
    )


def lexicographic(
    *tiers: Node | Component, on_unscored: OnUnscored = "propagate", name: str | None = None
) -> Lexicographic:
    """Tiers, the most important first: one counts only while all above it are full."""
    return Lexicographic(tiers=tuple(as_node(tier) for tier in tiers), on_unscored=on_unscored, name=name)


def product(*children: Node | Component, on_unscored: OnUnscored = "propagate", name: str | None = None) -> Product:
    """The product of its children."""
    return Product(children=tuple(as_node(child) for child in children), on_unscored=on_unscored, name=name)


def minimum(*children: Node | Component, on_unscored: OnUnscored = "propagate", name: str | None = None) -> Minimum:
    """The least of its children."""
    return Minimum(children=tuple(as_node(child) for child in children), on_unscored=on_unscored, name=name)


def clip(
    child: Node | Component,
    low: float,
    high: float,
    *,
    on_unscored: OnUnscored = "propagate",
    name: str | None = None,
) -> Clip:
    """The child, held between `low` and `high`."""
    return Clip(child=as_node(child), low=float(low), high=float(high), on_unscored=on_unscored, name=name)


def shaping(potential: Component, *, gamma_turn: float = 1.0, scale: float = 1.0, name: str | None = None) -> Shaping:
    """Potential-based shaping, an addend of the root: it moves credit to the turns that made progress.

    Args:
        potential: A component of each turn: how near the state is to the goal.
        gamma_turn: The learner's discount across turns.
        scale: What the difference is multiplied by.
        name: For the ledger.
    """
    return Shaping(potential=potential, gamma_turn=float(gamma_turn), scale=float(scale), name=name)


def normalised(
    *children: tuple[float, Node | Component] | Node | Component,
    min_std: float = 0.1,
    on_unscored: OnUnscored = "propagate",
    name: str | None = None,
) -> Normalised:
    """A root: the weighted sum of its children, trained on over its running deviation.

    Args:
        children: As of `weighted_sum`.
        min_std: Floor of the deviation.
        on_unscored: What an Unscored child does.
        name: For the ledger and the metrics.
    """
    addends = tuple(_addend(child) for child in children)
    return Normalised(children=addends, min_std=float(min_std), on_unscored=on_unscored, name=name)


def constrained(
    objective: Node | Component,
    *safeguards: Node | Component,
    budget: float,
    eta: float = 0.1,
    start: float = 0.0,
    at_least: float | None = None,
    on_unscored: OnUnscored = "propagate",
) -> Constrained:
    """A root: the objective, less a price for each safeguard that rises until few enough episodes violate it.

    Args:
        objective: What is wanted.
        safeguards: Leaves with the role of a safeguard; a bare component gets it.
        budget: Share of episodes that may violate a safeguard.
        eta: Step of the multipliers.
        start: Multipliers at first.
        at_least: A safeguard holds from this value on; None for its upper bound.
        on_unscored: `propagate`, or `floor`: violated.
    """
    return Constrained(
        objective=as_node(objective),
        safeguards=tuple(node if isinstance(node, Node) else leaf(node, role="safeguard") for node in safeguards),
        budget=float(budget),
        eta=float(eta),
        start=float(start),
        at_least=None if at_least is None else float(at_least),
        on_unscored=on_unscored,
    )


def group_relative(
    *children: tuple[float, Node | Component] | Node | Component,
    min_std: float = 0.1,
    on_unscored: OnUnscored = "propagate",
    name: str | None = None,
) -> GroupRelative:
    """A root: each child is compared with itself among the attempts at the task; trained on without a critic.

    Args:
        children: As of `weighted_sum`.
        min_std: Floor of the deviations.
        on_unscored: `propagate`, or `floor`.
        name: For the ledger.
    """
    addends = tuple(_addend(child) for child in children)
    return GroupRelative(children=addends, min_std=float(min_std), on_unscored=on_unscored, name=name)
