"""The ledger: what every step reward of an episode is made of, and the check that the sums agree.

An entry is one node at one step:

    {"node": name, "kind": kind, "value": number or null, "unscored": reason, "bounds": [low, high], "children": [...],
     "component", "role", "severity", "evidence"      of a leaf
     "weight", "contribution"                         of a child in a sum
     "open"                                           of a child that a gate or a tier lets count, or not
     "slot"                                           of a condition, or a safeguard of `constrained`
     "gate", "clip", "potential", "constraint", "on_unscored"       what the node's value follows from}

The ledger of an episode:

    {"end": reason, "total": sum of the step rewards or null, "steps": [{"turn", "reward", "entry"}], "success": true,
     false or null, "components": {name: sum of its values over the steps, or null},
     "evidence": the record of what components read (recorded.py), where there is one}

`steps` lists the steps at which something was due; a turn has two where the end came after it without another turn.
Where a batch node stands at the root, an episode that was collected for training also has `raw`, `trained` and `batch`
(transform.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentrl.errors import InvariantError
from agentrl.reward.nodes import AT_BOUND
from agentrl.reward.recompute import recompute_node, recompute_trained
from agentrl.types import JSON, EndReason, Trajectory

TOLERANCE = 1e-9
"""Largest gap between two sums that must agree, absolute below 1 and relative above."""


def build_ledger(end: EndReason, steps: Sequence[JSON], objectives: Sequence[str]) -> dict[str, JSON]:
    """The ledger of an episode from its steps.

    Args:
        end: Why it ended.
        steps: `{"turn", "reward", "entry"}` in order.
        objectives: Names of the tree's objective leaves.
    """
    rewards = [step["reward"] for step in steps]
    return {
        "end": str(end),
        "total": None if None in rewards else float(sum(rewards)),
        "steps": list(steps),
        "success": None if end.is_error or end.bootstraps else success_of(steps, objectives),
        "components": component_sums(steps),
    }


def scored_leaves(entry: JSON, is_open: bool = True) -> Iterator[tuple[JSON, bool]]:
    """The entries of leaves and shaping nodes, and whether every gate and tier above lets them count."""
    if "potential" in entry or "role" in entry:
        yield entry, is_open
        return
    for child in entry.get("children", ()):
        yield from scored_leaves(child, is_open and child.get("open", True))


def success_of(steps: Sequence[JSON], objectives: Sequence[str]) -> bool | None:
    """Whether an episode succeeded: every objective at its upper bound, and no catastrophic safeguard fired.

    An objective of each turn counts as it was at the last turn; one that was never due, or stands behind a closed gate
    or tier, was not met. None where an unscored leaf could still decide it.
    """
    met: dict[str, bool | None] = dict.fromkeys(objectives, False)
    safe: list[bool | None] = []
    for step in steps:
        for leaf, is_open in scored_leaves(step["entry"]):
            at_top = None if leaf["value"] is None else leaf["value"] >= leaf["bounds"][1] - AT_BOUND
            if leaf.get("role") == "objective":
                met[leaf["node"]] = at_top if is_open else False
            elif leaf.get("severity") == "catastrophic":
                safe.append(at_top)
    findings = [*met.values(), *safe]
    return False if False in findings else None if None in findings else True


def component_sums(steps: Sequence[JSON]) -> dict[str, float | None]:
    """The values of each leaf and shaping node, summed over the steps; None where one is unscored."""
    sums: dict[str, float | None] = {}
    for step in steps:
        for leaf, _ in scored_leaves(step["entry"]):
            so_far = sums.get(leaf["node"], 0.0)
            sums[leaf["node"]] = None if so_far is None or leaf["value"] is None else so_far + leaf["value"]
    return sums


def check_trajectory(trajectory: Trajectory) -> float:
    """Checks that a trajectory's rewards are those of its ledger; see `check_ledger`.

    Episodes that ended in an error are not checked: they are never trained on.

    Raises:
        InvariantError: If they differ, or there is no ledger.
    """
    if trajectory.end.is_error:
        return 0.0
    if trajectory.ledger is None:
        raise InvariantError(
            f"episode {trajectory.id} ended as {trajectory.end} without a ledger: its rewards cannot be accounted for."
        )
    try:
        return check_ledger(trajectory.ledger, [turn.reward for turn in trajectory.turns])
    except InvariantError as error:
        raise InvariantError(f"episode {trajectory.id}: {error}") from error


def check_ledger(ledger: JSON, step_rewards: Sequence[float]) -> float:
    """Checks an episode's ledger from the leaves up: every node, every step reward, the total and the component sums.

    Args:
        ledger: The ledger of an episode that was scored.
        step_rewards: The reward of each turn, by index, as it is trained on. Where there are no turns, nothing is.

    Returns:
        The largest gap found.

    Raises:
        InvariantError: If a gap is above `TOLERANCE`, or something is unscored.
    """
    paid = [0.0] * len(step_rewards)
    gaps = [0.0]
    for step in ledger["steps"]:
        where = f"ledger, turn {step['turn']}"
        value, gap = _checked(step["entry"], where)
        if value is None or step["reward"] is None:
            raise InvariantError(f"{where}: the root is unscored: {step['entry'].get('unscored')}")
        gaps += [gap, _gap(step["reward"], value, f"{where}, step reward")]
        if 0 <= step["turn"] < len(paid):
            paid[step["turn"]] += step["reward"]
        elif step_rewards:
            raise InvariantError(f"{where}: the episode has {len(step_rewards)} turns.")
    if "batch" in ledger:
        paid, found_gaps = _check_batch(ledger, paid)
        gaps += found_gaps
    gaps += [_gap(reward, paid[k], f"reward of turn {k}") for k, reward in enumerate(step_rewards)]
    if ledger["total"] is None:
        raise InvariantError("the ledger's total is missing though every step is scored.")
    gaps.append(_gap(ledger["total"], sum(step["reward"] for step in ledger["steps"]), "total"))
    sums = component_sums(ledger["steps"])
    if set(sums) != set(ledger["components"]):
        raise InvariantError(f"the ledger sums {sorted(ledger['components'])}, its steps hold {sorted(sums)}.")
    for name, value in ledger["components"].items():
        found = sums[name]
        if value is None or found is None:
            if value != found:
                raise InvariantError(f"the ledger says {value} for component {name}, its steps give {found}.")
        else:
            gaps.append(_gap(value, found, f"component {name}"))
    return max(gaps)


def _check_batch(ledger: JSON, paid: Sequence[float]) -> tuple[list[float], list[float]]:
    """Checks `raw` against what the steps paid and `trained` against what follows; gives what the turns carry."""
    for what in ("raw", "trained"):
        if ledger[what] is not None and len(ledger[what]) != len(paid):
            raise InvariantError(
                f"the ledger has {len(ledger[what])} {what} rewards, expected one for {len(paid)} turns."
            )
    gaps = [_gap(raw, paid[k], f"raw reward of turn {k}") for k, raw in enumerate(ledger["raw"])]
    if ledger["trained"] is None:
        if not ledger["batch"].get("excluded"):
            raise InvariantError("the ledger says that the episode is left out of training, and not why.")
        return list(paid), gaps
    found = recompute_trained(ledger)
    gaps += [_gap(reward, found[k], f"trained reward of turn {k}") for k, reward in enumerate(ledger["trained"])]
    return list(ledger["trained"]), gaps


def _checked(entry: JSON, where: str) -> tuple[float | None, float]:
    """Recomputes a node and everything below it, and compares at every level."""
    children = entry.get("children", [])
    below = [_checked(child, f"{where} > {child['node']}") for child in children]
    found = recompute_node(entry, [value for value, _ in below])
    if (found.value is None) != (entry["value"] is None):
        raise InvariantError(f"{where}: the ledger says {entry['value']}, what it is made of gives {found.value}.")
    gaps = [gap for _, gap in below]
    if found.value is not None:
        gaps.append(_gap(entry["value"], found.value, where))
    for child, contribution in zip(children, found.contributions, strict=False):
        gaps.append(_gap(child.get("contribution", 0.0), contribution, f"{where}, contribution of {child['node']}"))
    for child, is_open in zip(children, found.opens, strict=False):
        if child.get("open", True) != is_open:
            raise InvariantError(f"{where}: the ledger says that {child['node']} is {'not ' * is_open}let through.")
    if "gate" in entry and entry["gate"]["open"] != found.opens[1]:
        raise InvariantError(f"{where}: the ledger says that the gate is {'not ' * found.opens[1]}open.")
    if "potential" in entry:
        after = children[0]["value"] if children else 0.0
        gaps.append(_gap(entry["potential"]["after"], after, f"{where}, potential after the step"))
    return found.value, max(gaps, default=0.0)


def _gap(stated: float, found: float, where: str) -> float:
    gap = abs(stated - found)
    if not gap <= TOLERANCE * max(1.0, abs(found)):
        raise InvariantError(
            f"the ledger does not add up at {where}: it states {stated!r}, what it is made of gives {found!r}"
            f" (gap {gap:.3g}, allowed {TOLERANCE:g})."
        )
    return gap
