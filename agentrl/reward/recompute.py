"""Each kind's meaning said a second time, from ledger entries alone: the sum check is not the code that it checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.errors import InvariantError
from agentrl.reward.batch import BatchNode
from agentrl.reward.loading import aggregator_class
from agentrl.reward.nodes import AT_BOUND
from agentrl.types import JSON


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What a node comes to.

    Attributes:
        value: Its value; None where it is unscored.
        contributions: What each child adds, in order; empty where the kind is no sum.
        opens: Whether each child is let through, in order; empty where the kind lets all through.
    """

    value: float | None
    contributions: tuple[float, ...] = ()
    opens: tuple[bool, ...] = ()


def recompute(entry: JSON) -> float | None:
    """The value of an entry from its leaves' values, weights and gates; None where it is unscored."""
    return recompute_node(entry, [recompute(child) for child in entry.get("children", ())]).value


def recompute_trained(ledger: JSON) -> list[float]:
    """[K] The trained rewards of an episode from its `raw` and what `batch` says that they follow from.

    Raises:
        InvariantError: If `batch` does not hold what its kind of node writes there.
    """
    kind = ledger["batch"]["kind"]
    cls = aggregator_class(kind)
    if not issubclass(cls, BatchNode):
        raise InvariantError(f"the ledger says that {kind!r} changed its rewards, and that is no batch node.")
    try:
        found = cls.retrain(ledger) if ledger["raw"] else []
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise InvariantError(f"the ledger's batch does not say what {kind!r} needs: {error!r}.") from error
    if len(found) != len(ledger["raw"]):
        raise InvariantError(f"{kind!r} retrains {len(found)} rewards, expected {len(ledger['raw'])}.")
    return found


def recompute_node(entry: JSON, values: Sequence[float | None]) -> Recomputed:
    """The value of an entry from its children's values.

    Args:
        entry: The node's entry; its own value and contributions are not read.
        values: One per child.
    """
    kind, children = entry["kind"], entry.get("children", [])
    if kind == "component":
        return Recomputed(None if entry["value"] is None else float(entry["value"]))
    if kind == "shaping":
        return Recomputed(_shaped(entry))
    if kind not in _KINDS:
        return Recomputed(None if entry["value"] is None else aggregator_class(kind).recompute(entry))
    policy = entry.get("on_unscored", "propagate")
    if "gate" in entry and _is_closed(entry, values[0]):
        return Recomputed(entry["gate"]["floor"], opens=(True, False))
    counts = [child.get("role") != "diagnostic" for child in children]
    known = [value for value, count in zip(values, counts, strict=True) if count and value is not None]
    fatal = [
        policy == "propagate" or (policy == "renormalise" and not known) or c["kind"] == "shaping" for c in children
    ]
    if any(value is None and count and stop for value, count, stop in zip(values, counts, fatal, strict=True)):
        return Recomputed(None)
    if policy == "floor":
        values = [_worst(entry, c) if value is None else value for c, value in zip(children, values, strict=True)]
    used = [count and value is not None for value, count in zip(values, counts, strict=True)]
    return _KINDS[kind](entry, [value if use else None for value, use in zip(values, used, strict=True)])


def _worst(entry: JSON, child: JSON) -> float:
    if entry["kind"] == "clip":
        return float(max(entry["clip"]["low"], min(child["bounds"][0], entry["clip"]["high"])))
    if entry["kind"] == "gate":
        return float(entry["gate"]["floor"])
    low, high = child["bounds"]
    return float(high if child.get("weight", 1.0) < 0 else low)


def _shaped(entry: JSON) -> float | None:
    potential = entry.get("potential")
    if potential is None:
        return None
    children = entry["children"]
    after = children[0]["value"] if children else 0.0
    gamma = potential["gamma_turn"]
    before = potential["before"] if potential["new_turn"] else gamma * potential["before"]
    return float(potential["scale"] * gamma * after - potential["scale"] * before)


def _weighted_sum(entry: JSON, values: Sequence[float | None]) -> Recomputed:
    whole = left = 0.0
    for child, value in zip(entry["children"], values, strict=True):
        if child["kind"] != "shaping":
            whole += abs(child["weight"])
            left += abs(child["weight"]) if value is not None else 0.0
    growth = whole / left if left > 0 else 1.0
    contributions = tuple(
        0.0 if value is None else child["weight"] * value * (1.0 if child["kind"] == "shaping" else growth)
        for child, value in zip(entry["children"], values, strict=True)
    )
    return Recomputed(math.fsum(contributions), contributions)


def _constrained(entry: JSON, values: Sequence[float | None]) -> Recomputed:
    wanted = [child.get("slot") != "safeguards" for child in entry["children"]]
    contributions = tuple(v if v is not None and want else 0.0 for v, want in zip(values, wanted, strict=True))
    return Recomputed(sum(contributions), contributions)


def _gate(entry: JSON, values: Sequence[float | None]) -> Recomputed:  # noqa: ARG001
    return Recomputed(values[1], opens=(True, True))


def _is_closed(entry: JSON, asked: float | None) -> bool:
    if asked is None:
        return bool(entry.get("on_unscored") == "floor")
    threshold: float = entry["gate"]["at_least"]
    return asked < threshold - AT_BOUND


def _lexicographic(entry: JSON, values: Sequence[float | None]) -> Recomputed:
    n = sum(value is not None for value in values)
    contributions, opens = [], []
    is_open = True
    for child, value in zip(entry["children"], values, strict=True):
        low, high = child["bounds"]
        opens.append(is_open or value is None)
        contributions.append((value - low) / (n * (high - low)) if is_open and value is not None else 0.0)
        if value is not None and value < high - AT_BOUND:
            is_open = False
    return Recomputed(math.fsum(contributions), tuple(contributions), tuple(opens))


def _product(entry: JSON, values: Sequence[float | None]) -> Recomputed:  # noqa: ARG001
    return Recomputed(math.prod(value for value in values if value is not None))


def _minimum(entry: JSON, values: Sequence[float | None]) -> Recomputed:  # noqa: ARG001
    return Recomputed(min(value for value in values if value is not None))


def _clip(entry: JSON, values: Sequence[float | None]) -> Recomputed:
    low, high = entry["clip"]["low"], entry["clip"]["high"]
    value = next(value for value in values if value is not None)
    return Recomputed(sorted((low, value, high))[1])


_KINDS: dict[str, Callable[[JSON, Sequence[float | None]], Recomputed]] = {
    "weighted_sum": _weighted_sum,
    "normalised": _weighted_sum,
    "group_relative": _weighted_sum,
    "constrained": _constrained,
    "gate": _gate,
    "lexicographic": _lexicographic,
    "product": _product,
    "minimum": _minimum,
    "clip": _clip,
}
