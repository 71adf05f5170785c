"""Figures of a collection: errors are counted and never averaged in."""

from __future__ import annotations

import pytest

from agentrl.train.metrics import rollout_metrics
from agentrl.types import EndReason, Task, Trajectory, Turn


def _episode(task: int, reward: float, end: EndReason = EndReason.SUBMITTED, tokens: int = 2) -> Trajectory:
    turn = Turn((1,), tuple(range(tokens)), (-0.5,) * tokens, 0, "stop", "x", reward=reward)
    return Trajectory(
        id=f"{task}-{reward}-{end}",
        task=Task(f"train/{task}", "E", "?"),
        seed=0,
        opening=(),
        turns=(turn,),
        end=end,
        ledger={"components": {"a/b": reward, "c/d": None}},
        success=None if end.is_error else reward == 1.0,
        n_sampled=tokens,
    )


def test_means_over_what_counts_and_shares_of_all() -> None:
    episodes = [_episode(0, 1.0), _episode(0, 0.0), _episode(1, 1.0), _episode(1, 1.0, EndReason.MAX_TURNS, tokens=6)]
    episodes.append(_episode(2, 0.0, EndReason.ENV_ERROR))
    metrics = rollout_metrics(episodes)
    assert metrics["reward/mean"] == metrics["rollout/success"] == metrics["reward/a/b"] == 0.75
    assert metrics["rollout/response_tokens"] == 3.0
    assert metrics["rollout/action_tokens"] == 14.0
    assert metrics["rollout/n_error"] == 1.0
    assert metrics["rollout/end/submitted"] == pytest.approx(0.6)
    assert metrics["rollout/end/env_error"] == pytest.approx(0.2)
    assert metrics["rollout/groups_without_spread"] == 0.5
    assert "reward/c/d" not in metrics


def test_a_collection_of_errors_has_no_means() -> None:
    metrics = rollout_metrics([_episode(0, 0.0, EndReason.POLICY_ERROR)])
    assert "reward/mean" not in metrics
    assert metrics["rollout/n_error"] == 1.0
