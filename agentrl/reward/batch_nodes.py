"""The built-in batch nodes.

kind            children                              what a turn is trained on
normalised      children, with weights                their weighted sum over its running deviation
constrained     objective, safeguards                 objective - multiplier of each safeguard * its violation
group_relative  children, with weights                each child over its deviation among the attempts at the task,
its mean taken off at the last turn
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentrl.errors import CheckpointError, InvariantError, RewardError
from agentrl.reward.aggregators import WeightedSum
from agentrl.reward.batch import BatchNode, BatchRecord, Trained, Transformed
from agentrl.reward.component import Bounds
from agentrl.reward.nodes import AT_BOUND, Aggregator, Combined, Leaf, Node, OnUnscored, Part, Span, is_diagnostic
from agentrl.types import JSON


@dataclass(frozen=True, slots=True)
class Running:
    """Count, mean and sum of squared distances of all numbers so far (Chan, Golub and LeVeque, 1983)."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Running:
        """Of some numbers."""
        if not values:
            return cls()
        mean = math.fsum(values) / len(values)
        return cls(len(values), mean, math.fsum((value - mean) ** 2 for value in values))

    def merged(self, other: Running) -> Running:
        """Of both together."""
        count = self.count + other.count
        if count == 0:
            return self
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count
        return Running(count, mean, self.m2 + other.m2 + gap * gap * self.count * other.count / count)

    @property
    def deviation(self) -> float | None:
        """Unbiased deviation; None below two numbers."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else None


@dataclass(frozen=True, kw_only=True)
class Normalised(WeightedSum, BatchNode):
    """The weighted sum over the running deviation of the episodes' returns: divided, never shifted.

    A shift would pay for each turn, and so for long episodes. The deviation is that of all episodes before this
    collection; in the first one that has two, of the collection itself; 1 before.

    Attributes:
        min_std: Floor of the deviation.
    """

    kind: ClassVar[str] = "normalised"
    min_std: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_floor(self, self.min_std)

    def start_state(self) -> dict[str, JSON]:
        """Nothing seen."""
        return {"count": 0, "mean": 0.0, "m2": 0.0}

    def check_state(self, state: JSON) -> None:
        """Count, mean and squares."""
        good = isinstance(state, Mapping) and set(state) == {"count", "mean", "m2"} and _are_finite(state.values())
        if not (good and state["count"] >= 0 and state["m2"] >= 0):
            raise CheckpointError(_unusable(self, "count, mean and m2, finite and count and m2 not negative", state))

    def transform(self, records: Sequence[BatchRecord], state: JSON) -> Transformed:
        """Divides by the deviation from before, and adds the collection's returns to what was seen."""
        raw = [record.raw for record in records]
        before = Running(**state)
        after = before.merged(
            Running.of([math.fsum(raw_K) for record, raw_K in zip(records, raw, strict=True) if record.counts])
        )
        found = before.deviation if before.deviation is not None else after.deviation
        deviation = 1.0 if found is None else max(found, self.min_std)
        trained = tuple(Trained(tuple(r / deviation for r in raw_K), None, {"deviation": deviation}) for raw_K in raw)
        state = {"count": after.count, "mean": after.mean, "m2": after.m2}
        return Transformed(trained, state, {f"reward/deviation/{self.label}": deviation} if records else {})

    @classmethod
    def retrain(cls, ledger: JSON) -> list[float]:
        """Raw over the stated deviation."""
        return [raw / ledger["batch"]["deviation"] for raw in ledger["raw"]]


@dataclass(frozen=True, kw_only=True)
class Constrained(BatchNode):
    """The objective, less a price for each safeguard that was broken; prices rise until the budget is kept.

    A safeguard is violated in an episode where it was below `at_least` at any step; the violation is one, and lies on
    the first such turn. With `rate` the share of a collection's episodes that violate it, its multiplier goes to
    max(0, multiplier + eta * (rate - budget)) after the collection (dual ascent; Ray, Achiam and Amodei, 2019).

    Attributes:
        objective: What is wanted.
        safeguards: Components with the role of a safeguard; each has a multiplier of its own.
        budget: Share of episodes that may violate a safeguard.
        eta: Step of the multipliers.
        start: Multipliers at first.
        at_least: A safeguard holds from this value on; None for its upper bound.
    """

    kind: ClassVar[str] = "constrained"
    asides: ClassVar[tuple[str, ...]] = ("safeguards",)
    copes: ClassVar[tuple[OnUnscored, ...]] = ("propagate", "floor")
    objective: Node
    safeguards: tuple[Node, ...]
    budget: float
    eta: float = 0.1
    start: float = 0.0
    at_least: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.safeguards:
            raise RewardError(f"{self.label!r}: constrained needs at least one of `safeguards`.")
        for node in self.safeguards:
            if not isinstance(node, Leaf) or node.role != "safeguard":
                raise RewardError(
                    f"{self.label!r}: {node.label!r} stands among its safeguards: expected a component with role ="
                    f" 'safeguard', found {f'role {node.role!r}' if isinstance(node, Leaf) else f'a {node.kind}'}."
                )
            low, high = node.bounds
            if self.at_least is not None and not low < self.at_least <= high:
                raise RewardError(
                    f"{self.label!r}: at_least must lie in ({low:g}, {high:g}], the range of {node.label!r}, found"
                    f" {self.at_least:g}: the safeguard would always hold or never."
                )
        if not (0.0 <= self.budget < 1.0 and 0.0 < self.eta < math.inf and 0.0 <= self.start < math.inf):
            raise RewardError(
                f"{self.label!r}: expected budget in [0, 1), eta above 0 and start of at least 0, found budget ="
                f" {self.budget}, eta = {self.eta}, start = {self.start}."
            )

    def combine(self, parts: Sequence[Part]) -> Combined:
        """The objective alone; 0 at a step where it is not due."""
        values = tuple(part.value for part in parts if part.slot == "objective")
        return Combined(math.fsum(values), values, facts={"constraint": {"at_least": self.at_least}})

    def bounds_of(self, spans: Sequence[Span]) -> Bounds:
        """The objective's."""
        return next((span.bounds for span in spans if span.slot == "objective"), (0.0, 0.0))

    def start_state(self) -> dict[str, JSON]:
        """Every multiplier at `start`."""
        return {"multipliers": {node.label: self.start for node in self.safeguards}}

    def check_state(self, state: JSON) -> None:
        """One multiplier for each safeguard."""
        names = {node.label for node in self.safeguards}
        found: JSON = state.get("multipliers") if isinstance(state, Mapping) else None
        good = isinstance(found, Mapping) and set(found) == names and _are_finite(found.values())
        if not (good and min(found.values()) >= 0):
            raise CheckpointError(_unusable(self, f"a multiplier of at least 0 for each of {sorted(names)}", state))

    def transform(self, records: Sequence[BatchRecord], state: JSON) -> Transformed:
        """Takes the multipliers from before off, then moves them by this collection's rates."""
        names, multipliers = [node.label for node in self.safeguards], state["multipliers"]
        fired = [self._first_violations(record) for record in records]
        trained = []
        for record, turns in zip(records, fired, strict=True):
            prices = ((turn, -multipliers[name]) for name, turn in turns.items() if turn is not None)
            paid_K = [a + b for a, b in zip(record.raw, record.per_turn(prices), strict=True)]
            trained.append(Trained(tuple(paid_K), None, {"multipliers": dict(multipliers), "violations": turns}))
        counted = [turns for record, turns in zip(records, fired, strict=True) if record.counts]
        metrics = {f"reward/multiplier/{name}": float(multipliers[name]) for name in names}
        after = dict(multipliers)
        for name in names if counted else ():
            rate = sum(turns[name] is not None for turns in counted) / len(counted)
            metrics[f"reward/violation_rate/{name}"] = rate
            after[name] = max(0.0, multipliers[name] + self.eta * (rate - self.budget))
        return Transformed(tuple(trained), {"multipliers": after}, metrics)

    def _first_violations(self, record: BatchRecord) -> dict[str, int | None]:
        found: dict[str, int | None] = {node.label: None for node in self.safeguards}
        for turn, entry in record.steps:
            for child in entry["children"]:
                if child.get("slot") == "safeguards" and found[child["node"]] is None:
                    threshold = child["bounds"][1] if self.at_least is None else self.at_least
                    # On `floor`, the one policy under which it can get here without a value, it counts as broken.
                    if child["value"] is None or child["value"] < threshold - AT_BOUND:
                        found[child["node"]] = turn
        return found

    @classmethod
    def retrain(cls, ledger: JSON) -> list[float]:
        """Raw, less the stated multipliers at the turns at which the entries say that a safeguard broke first.

        Raises:
            InvariantError: If `batch` states other turns.
        """
        rewards_K, broken = [float(raw) for raw in ledger["raw"]], dict[str, int]()
        for step in ledger["steps"]:
            least = step["entry"]["constraint"]["at_least"]
            for child in step["entry"]["children"]:
                name, value = child["node"], child["value"]
                top = child["bounds"][1] if least is None else least
                holds = value is not None and value >= top - AT_BOUND
                if child.get("slot") == "safeguards" and not holds and name not in broken:
                    broken[name] = step["turn"]
                    if 0 <= step["turn"] < len(rewards_K):
                        rewards_K[step["turn"]] -= ledger["batch"]["multipliers"][name]
        stated = {name: turn for name, turn in ledger["batch"]["violations"].items() if turn is not None}
        if stated != broken:
            raise InvariantError(f"the ledger says that safeguards broke at turns {stated}, its steps say {broken}.")
        return rewards_K


@dataclass(frozen=True, kw_only=True)
class GroupRelative(WeightedSum, BatchNode):
    """Each child over its deviation among the attempts at the task, its mean there taken off at the last turn.

    Children of different spread so have equal say, by their weights (GDPO, arXiv:2601.05242). Over a group the rewards
    of each child sum to 0. Attempts that were cut or never sampled stand in no group and are left out of training, as
    are groups of fewer than two; both are counted. Only without a critic: a mean over siblings is no value of a state.

    Attributes:
        min_std: Floor of the deviations.
    """

    kind: ClassVar[str] = "group_relative"
    compares_groups: ClassVar[bool] = True
    copes: ClassVar[tuple[OnUnscored, ...]] = ("propagate", "floor")
    min_std: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_floor(self, self.min_std)
        labels = [each.node.label for each in self.children]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise RewardError(f"{self.label!r} has several children {twice!r}: give each a `name` of its own.")

    def transform(self, records: Sequence[BatchRecord], state: JSON) -> Transformed:  # noqa: ARG002
        """Compares the attempts at each task; what came before counts for nothing."""
        shares = {record.id: self._shares(record) for record in records}
        groups: dict[str, list[BatchRecord]] = {}
        for record in records:
            groups.setdefault(record.group, []).append(record)
        trained: dict[str, Trained] = {}
        found: dict[str, list[float]] = {}
        too_small = 0
        for attempts in groups.values():
            members = [record for record in attempts if record.counts]
            if len(members) < 2:
                too_small += 1
                reason = f"it has {len(members)} attempts to compare, expected at least 2"
                trained |= {record.id: Trained(None, reason) for record in attempts}
                continue
            facts = self._compare([shares[record.id] for record in members])
            for name, each in facts["components"].items():
                found.setdefault(name, []).append(each["deviation"])
            for record in attempts:
                trained[record.id] = (
                    Trained(self._relative(record, shares[record.id], facts), None, facts)
                    if record.counts
                    else Trained(None, "it was cut or never sampled, so its return compares with no other")
                )
        metrics = {f"reward/deviation/{name}": math.fsum(each) / len(each) for name, each in found.items()}
        metrics["reward/groups_too_small"] = float(too_small)
        return Transformed(tuple(trained[record.id] for record in records), {}, metrics)

    def _shares(self, record: BatchRecord) -> dict[str, list[float]]:
        """What each child that counts gave in each turn, [K] by name, its weight left out."""
        counted = {each.node.label: each.weight for each in self.children if not is_diagnostic(each.node)}
        values: dict[str, list[tuple[int, float]]] = {name: [] for name in counted}
        for turn, entry in record.steps:
            for child in entry["children"]:
                if child["node"] in counted:
                    low, high = child["bounds"]
                    worst = low if counted[child["node"]] >= 0 else high
                    values[child["node"]].append((turn, worst if child["value"] is None else child["value"]))
        return {name: record.per_turn(each) for name, each in values.items()}

    def _compare(self, members: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, JSON]:
        """Mean and floored deviation of each child over the members of a group."""
        components = {}
        for name in members[0]:
            seen = Running.of([math.fsum(shares[name]) for shares in members])
            components[name] = {"mean": seen.mean, "deviation": max(seen.deviation or 0.0, self.min_std)}
        return {"group": len(members), "components": components}

    def _relative(
        self, record: BatchRecord, shares: Mapping[str, Sequence[float]], facts: Mapping[str, JSON]
    ) -> tuple[float, ...]:
        rewards_K = [0.0] * record.n_turns
        for each in self.children:
            name = each.node.label
            if name in shares:
                mean, deviation = facts["components"][name]["mean"], facts["components"][name]["deviation"]
                for k, value in enumerate(shares[name]):
                    rewards_K[k] += each.weight * value / deviation
                rewards_K[-1] -= each.weight * mean / deviation
        return tuple(rewards_K)

    @classmethod
    def retrain(cls, ledger: JSON) -> list[float]:
        """Entry by entry over the stated deviations, and the stated means."""
        facts = ledger["batch"]["components"]
        addends_K: list[list[float]] = [[] for _ in ledger["raw"]]
        weights: dict[str, float] = {}
        for step in ledger["steps"]:
            for child in step["entry"]["children"]:
                # What a child was taken for, its floor included, is what it added.
                if child.get("role") != "diagnostic":
                    weights[child["node"]] = child["weight"]
                    addends_K[step["turn"]].append(child["contribution"] / facts[child["node"]]["deviation"])
        addends_K[-1] += [-weights[name] * each["mean"] / each["deviation"] for name, each in facts.items()]
        return [math.fsum(addends) for addends in addends_K]


BATCH_NODES: dict[str, type[Aggregator]] = {each.kind: each for each in (Normalised, Constrained, GroupRelative)}
"""The built-in batch nodes by name."""


def _check_floor(node: Node, min_std: float) -> None:
    if not 0.0 < min_std < math.inf:
        raise RewardError(
            f"{node.label!r}: min_std is the floor of a divisor: expected it above 0 and finite, found {min_std}."
        )


def _are_finite(values: Iterable[JSON]) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


def _unusable(node: Node, expected: str, state: JSON) -> str:
    return f"the state of the reward's {node.label!r} cannot be used: expected {expected}, found {state!r:.200}."
