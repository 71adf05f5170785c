"""One step of a reward tree: every due node's value and its ledger entry."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real

from agentrl.errors import EvidenceError
from agentrl.reward.aggregators import Shaping
from agentrl.reward.component import Bounds, Component, VacuousError
from agentrl.reward.evidence import Episode
from agentrl.reward.isolated import call_isolated
from agentrl.reward.loading import kind_of
from agentrl.reward.nodes import Aggregator, Edge, Leaf, Node, Part, is_diagnostic
from agentrl.types import JSON, Score, Unscored

_ENCODER = json.JSONEncoder(allow_nan=False)


@dataclass(frozen=True, slots=True)
class Moment:
    """What is due now.

    Attributes:
        episode: What components see.
        turn_due: A turn has been taken that is not scored yet.
        end_due: The episode has ended, and the critic does not stand for its future.
        potentials: Phi of the state before this step by shaping node, replaced by Phi of the state after it.
        durations: Seconds per leaf, filled in.
    """

    episode: Episode
    turn_due: bool
    end_due: bool
    potentials: dict[str, float | Unscored] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A due node: its value, or why it has none; its bounds with what is due now; its ledger entry."""

    value: float | None
    unscored: str | None
    bounds: Bounds
    entry: dict[str, JSON]


def evaluate(node: Node, moment: Moment) -> Outcome | None:
    """A node's outcome, None where nothing below it is due."""
    if isinstance(node, Leaf):
        due = moment.turn_due if node.component.when == "turn" else moment.end_due
        return _leaf(node.label, node.component, _role(node), moment) if due else None
    if isinstance(node, Shaping):
        return _shape(node, moment)
    if isinstance(node, Aggregator):
        return _aggregate(node, moment)
    raise TypeError(f"{type(node).__name__} is neither a leaf nor an aggregator: extend agentrl.reward.Aggregator.")


def _role(node: Leaf) -> dict[str, JSON]:
    if node.role == "safeguard":
        return {"role": node.role, "severity": node.severity}
    return {"role": node.role}


def _leaf(label: str, component: Component, role: dict[str, JSON], moment: Moment) -> Outcome:
    start = time.perf_counter()
    result = score(component, moment.episode)
    moment.durations[label] = moment.durations.get(label, 0.0) + time.perf_counter() - start
    low, high = component.bounds
    entry: dict[str, JSON] = {"node": label, "kind": "component", "component": component.name, **role}
    if isinstance(result, Unscored):
        entry |= {"value": None, "unscored": result.reason, "bounds": [low, high]}
        return Outcome(None, f"{label}: {result.reason}", (low, high), entry)
    entry |= {"value": result.value, "bounds": [low, high]}
    if result.evidence is not None:
        entry["evidence"] = result.evidence
    return Outcome(result.value, None, (low, high), entry)


def score(component: Component, episode: Episode) -> Score | Unscored:
    """Calls a component and checks what it gives. The boundary: whatever it raises becomes Unscored with the reason."""
    try:
        call = functools.partial(call_isolated, component) if getattr(component, "isolated", False) else component
        result = call(episode)
    except VacuousError as error:
        return Score(component.bounds[0], {"vacuous": str(error)})
    except EvidenceError as error:
        return Unscored(str(error))
    except Exception as error:  # noqa: BLE001 - the named boundary
        return Unscored(f"it raised {type(error).__name__}: {error}")
    return _checked(component, result)


def _checked(component: Component, result: object) -> Score | Unscored:
    if isinstance(result, Unscored):
        return result
    if not isinstance(result, Score) or not isinstance(result.value, Real):
        return Unscored(f"expected a Score with a number or Unscored, found {result!r:.200}")
    value, (low, high) = float(result.value), component.bounds
    if not math.isfinite(value):
        return Unscored(f"its value is {value}, which is not finite")
    if not low <= value <= high:
        return Unscored(f"its value {value!r} is outside its bounds [{low!r}, {high!r}]")
    if result.evidence is None:
        return Score(value)
    try:
        return Score(value, json.loads(_ENCODER.encode(result.evidence)))
    except (TypeError, ValueError, RecursionError) as error:
        return Unscored(f"its evidence cannot be written as JSON: {error}")


def _shape(node: Shaping, moment: Moment) -> Outcome | None:
    turn_taken = moment.episode.turn >= 0
    if not (moment.turn_due or (moment.end_due and turn_taken)):
        return None
    before = moment.potentials[node.label]
    children: list[JSON] = []
    after: float | Unscored = 0.0
    if not moment.end_due:
        inner = _leaf(node.potential.name, node.potential, {"role": "potential"}, moment)
        children = [inner.entry]
        after = Unscored(f"its potential {inner.unscored}") if inner.value is None else inner.value
    moment.potentials[node.label] = after
    if isinstance(before, Unscored):
        return _unshaped(node, before, children)
    if isinstance(after, Unscored):
        return _unshaped(node, after, children)
    # An end that comes without a turn takes back what this turn's row was given for a state that led nowhere.
    paid = before if moment.turn_due else node.gamma_turn * before
    value = node.scale * (node.gamma_turn * after - paid)
    entry: dict[str, JSON] = {"node": node.label, "kind": node.kind, "value": value, "bounds": list(node.bounds)}
    entry["potential"] = {
        "before": before,
        "after": after,
        "gamma_turn": node.gamma_turn,
        "scale": node.scale,
        "new_turn": moment.turn_due,
    }
    return Outcome(value, None, node.bounds, entry | {"children": children})


def _unshaped(node: Shaping, phi: Unscored, children: list[JSON]) -> Outcome:
    entry: dict[str, JSON] = {"node": node.label, "kind": node.kind, "value": None, "unscored": phi.reason}
    return Outcome(None, f"{node.label}: {phi.reason}", node.bounds, entry | {"children": children})


def _aggregate(node: Aggregator, moment: Moment) -> Outcome | None:
    outcomes = [None if edge.slot in node.conditions else evaluate(edge.node, moment) for edge in node.edges]
    if all(outcome is None for outcome in outcomes):
        return None
    if node.conditions:
        # A condition of each turn still holds at an end that comes without a turn.
        asking = replace(moment, turn_due=True)
        outcomes = [
            evaluate(edge.node, asking) if edge.slot in node.conditions else outcome
            for edge, outcome in zip(node.edges, outcomes, strict=True)
        ]
    due = [(edge, outcome) for edge, outcome in zip(node.edges, outcomes, strict=True) if outcome is not None]
    entry: dict[str, JSON] = {"node": node.label, "kind": kind_of(type(node))}
    for edge, outcome in due:
        if edge.slot in node.conditions or edge.slot in node.asides:
            outcome.entry["slot"] = edge.slot
        if edge.weight is not None:
            outcome.entry["weight"] = edge.weight
    counted = [(edge, outcome) for edge, outcome in due if not is_diagnostic(edge.node)]
    unscored, value, bounds = _combine(node, counted, entry)
    entry["children"] = [outcome.entry for _, outcome in due]
    return Outcome(value, unscored, bounds, entry)


def _combine(
    node: Aggregator, counted: Sequence[tuple[Edge, Outcome]], entry: dict[str, JSON]
) -> tuple[str | None, float | None, Bounds]:
    """Applies `on_unscored`, combines what is left and writes it into the entries."""
    scored = [(edge, outcome) for edge, outcome in counted if outcome.value is not None]
    lost = [(edge, outcome) for edge, outcome in counted if outcome.value is None]
    used, spans = scored, [edge.span(outcome.bounds) for edge, outcome in counted]
    if lost and node.decided([_part(node, edge, outcome, 1.0) for edge, outcome in scored]):
        for _, outcome in lost:
            outcome.entry["open"] = False
    elif lost:
        fatal = lost if node.on_unscored == "propagate" or not (scored or node.on_unscored == "floor") else []
        # Without one potential the next difference is unknown too, so an unscored shaping is never made up for.
        fatal = fatal or [(edge, outcome) for edge, outcome in lost if isinstance(edge.node, Shaping)]
        if fatal:
            bounds, reason = node.bounds_of(spans), "; ".join(str(outcome.unscored) for _, outcome in fatal)
            entry |= {"value": None, "unscored": reason, "bounds": list(bounds)}
            return reason, None, bounds
        used = list(counted) if node.on_unscored == "floor" else scored
    grown = _growth(counted, used) if node.on_unscored == "renormalise" else 1.0
    parts = [_part(node, edge, outcome, grown) for edge, outcome in used]
    combined = node.combine(parts)
    bounds = node.bounds_of([part.span for part in parts] if node.on_unscored == "renormalise" else spans)
    entry |= {"value": combined.value, "bounds": list(bounds), **combined.facts}
    if node.on_unscored != "propagate":
        entry["on_unscored"] = node.on_unscored
    for (_, outcome), contribution in zip(used, combined.contributions, strict=False):
        outcome.entry["contribution"] = contribution
    for (_, outcome), is_open in zip(used, combined.open, strict=False):
        outcome.entry["open"] = is_open
    return None, combined.value, bounds


def _growth(counted: Sequence[tuple[Edge, Outcome]], used: Sequence[tuple[Edge, Outcome]]) -> float:
    """What the weights of the used children are multiplied by so that their absolute sum is that of all counted."""
    whole, left = (
        sum(abs(edge.weight or 0.0) for edge, _ in edges if not isinstance(edge.node, Shaping))
        for edges in (counted, used)
    )
    return whole / left if left > 0 else 1.0


def _part(node: Aggregator, edge: Edge, outcome: Outcome, grown: float) -> Part:
    span = edge.span(outcome.bounds)
    value = node.floored(span) if outcome.value is None else outcome.value
    weight = span.weight if isinstance(edge.node, Shaping) else span.weight * grown
    return Part(span.slot, value, span.bounds, weight)
