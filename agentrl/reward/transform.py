"""From what a collection earned to what is trained on, where a batch node stands at the root.

The ledger of each episode then also holds

    "raw": one number a turn, what its steps earned;
    "trained": one number a turn, what the learner gets; null where the episode is left out of training;
    "batch": {"node", "kind", "excluded": why it is left out, and what else the numbers follow from}

and the turns carry the trained rewards; those of an episode that is left out stay as they were earned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.errors import InvariantError
from agentrl.reward.batch import BatchNode, BatchRecord, Step, Trained
from agentrl.reward.loading import kind_of
from agentrl.types import JSON, Trajectory


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """A collection as it is trained on.

    Attributes:
        trajectories: All of them, sorted by id: those that ended in an error as they were, the others with trained
            rewards and ledgers. Give the learner those that `is_trained`.
        state: For the next collection, JSON-able.
        metrics: `reward/trained_mean`, `reward/episodes_excluded`, and the node's own.
    """

    trajectories: tuple[Trajectory, ...]
    state: JSON
    metrics: dict[str, float]


def is_trained(trajectory: Trajectory) -> bool:
    """Whether no batch node has left the episode out of training."""
    ledger = trajectory.ledger or {}
    return "batch" not in ledger or ledger["trained"] is not None


def transform_batch(node: BatchNode, trajectories: Sequence[Trajectory], state: JSON) -> TrainedBatch:
    """Transforms a collection. Pure; one that was transformed before gives the same again.

    Args:
        node: The root.
        trajectories: One iteration's, in any order.
        state: The node's, from before them.

    Raises:
        InvariantError: If two episodes have one id, or one has no ledger or a reward that is not finite.
    """
    ordered = sorted(trajectories, key=lambda trajectory: trajectory.id)
    twice = [after.id for before, after in itertools.pairwise(ordered) if before.id == after.id]
    if twice:
        raise InvariantError(f"expected each episode once in a collection, found {twice[0]!r} more than once.")
    scored = [trajectory for trajectory in ordered if not trajectory.end.is_error]
    records = [_record(trajectory) for trajectory in scored]
    made = node.transform(records, state)
    by_id = {
        record.id: _written(node, record, trained, trajectory)
        for record, trained, trajectory in zip(records, made.trained, scored, strict=True)
    }
    metrics = {**made.metrics, **_metrics(records, made.trained)}
    return TrainedBatch(tuple(by_id.get(each.id, each) for each in ordered), made.state, metrics)


def _record(trajectory: Trajectory) -> BatchRecord:
    if trajectory.ledger is None:
        raise InvariantError(
            f"episode {trajectory.id} ended as {trajectory.end} without a ledger: its rewards cannot be accounted for."
        )
    steps = tuple(Step(step["turn"], step["entry"]) for step in trajectory.ledger["steps"])
    for turn, entry in steps:
        if entry["value"] is None or not math.isfinite(entry["value"]):
            raise InvariantError(
                f"episode {trajectory.id}, turn {turn}: the reward is {entry['value']}, expected a finite number:"
                " look at the reward tree."
            )
    has_tokens = any(turn.sampled_ids for turn in trajectory.turns)
    counts = trajectory.end.in_baseline and has_tokens
    return BatchRecord(trajectory.id, trajectory.task.id, counts, len(trajectory.turns), steps)


def _written(node: BatchNode, record: BatchRecord, trained: Trained, trajectory: Trajectory) -> Trajectory:
    rewards_K = record.raw if trained.turn_rewards is None else list(trained.turn_rewards)
    if len(rewards_K) != record.n_turns or not all(math.isfinite(reward) for reward in rewards_K):
        raise InvariantError(
            f"episode {record.id}: {node.label!r} gave the turn rewards {rewards_K}, expected {record.n_turns} finite"
            " numbers."
        )
    batch: dict[str, JSON] = {"node": node.label, "kind": kind_of(type(node)), **trained.facts}
    if trained.turn_rewards is None:
        batch["excluded"] = trained.excluded or "the reward's root leaves it out"
    ledger = {
        **trajectory.ledger,
        "raw": record.raw,
        "trained": None if trained.turn_rewards is None else rewards_K,
        "batch": batch,
    }
    turns = tuple(replace(turn, reward=reward) for turn, reward in zip(trajectory.turns, rewards_K, strict=True))
    return replace(trajectory, turns=turns, ledger=ledger)


def _metrics(records: Sequence[BatchRecord], trained: Sequence[Trained]) -> dict[str, float]:
    sums = [
        math.fsum(each.turn_rewards)
        for record, each in zip(records, trained, strict=True)
        if record.counts and each.turn_rewards is not None
    ]
    metrics = {"reward/episodes_excluded": float(sum(each.turn_rewards is None for each in trained))}
    return metrics | ({"reward/trained_mean": math.fsum(sums) / len(sums)} if sums else {})
