"""Figures of one collection, under the names of metrics.jsonl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from agentrl.evaluate import component_means, is_scored
from agentrl.types import EndReason, Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the episodes that count, and the share of each end among all; of rewards as they were earned.

    Args:
        trajectories: Of one collection, before a batch node makes of their rewards what is trained on.

    Returns:
        `reward/mean`, `reward/std`, `reward/<component>`, `rollout/success`, `rollout/response_tokens`,
        `rollout/turns`, `rollout/malformed` (share of turns), `rollout/end/<reason>` (shares), `rollout/episodes`,
        `rollout/n_error`, `rollout/action_tokens` and `rollout/dropped_tokens` (sums), and
        `rollout/groups_without_spread` (share of tasks whose episodes all earned the same).
    """
    counted = [t for t in trajectories if is_scored(t)]
    ends = Counter(t.end for t in trajectories)
    metrics: dict[str, float] = {
        "rollout/episodes": float(len(trajectories)),
        "rollout/n_error": float(sum(t.end.is_error for t in trajectories)),
        "rollout/dropped_tokens": float(sum(sum(t.dropped.values()) for t in trajectories)),
        "rollout/action_tokens": float(sum(t.n_sampled for t in trajectories)),
    }
    for reason in EndReason:
        if ends[reason]:
            metrics[f"rollout/end/{reason}"] = ends[reason] / len(trajectories)
    if not counted:
        return metrics
    rewards = np.array([t.reward for t in counted])
    turns = [turn for t in counted for turn in t.turns]
    metrics |= {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "rollout/success": float(np.mean([bool(t.success) for t in counted])),
        "rollout/response_tokens": float(np.mean([t.n_sampled for t in counted])),
        "rollout/turns": float(np.mean([len(t.turns) for t in counted])),
        "rollout/malformed": float(np.mean([turn.malformed is not None for turn in turns])) if turns else 0.0,
        "rollout/groups_without_spread": _share_without_spread(counted),
    }
    return metrics | {f"reward/{name}": mean for name, mean in component_means(counted).items()}


def _share_without_spread(counted: Sequence[Trajectory]) -> float:
    groups: dict[str, list[float]] = {}
    for trajectory in counted:
        groups.setdefault(trajectory.task.id, []).append(trajectory.reward)
    several = [rewards for rewards in groups.values() if len(rewards) > 1]
    return float(np.mean([max(r) == min(r) for r in several])) if several else 0.0
