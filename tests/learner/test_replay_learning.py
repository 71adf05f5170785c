"""Whatever the config asks for, targets and losses follow from the record of the update alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agentrl.learner.batch import read_rollout
from agentrl.learner.ppo import PPOLearner
from agentrl.learner.record import UpdateRecord
from agentrl.replay.learning import learning_rows
from agentrl.types import EndReason, Task, Trajectory

SETTINGS = {
    "boundary": {},
    "several epochs": {"epochs": 2, "minibatches": 3},
    "one step": {"minibatches": 1, "microbatch_tokens": 64},
    "action": {"advantage": {"estimator": "action", "gamma_turn": 0.9}},
    "turn": {"advantage": {"estimator": "turn", "lambda_value": 0.7}},
    "value clip": {"loss": {"value_clip": 0.05}, "epochs": 3},
    "entropy": {"loss": {"entropy_coef": 0.1, "aggregation": "seq_mean_token_mean"}},
    "k1 in the reward": {"kl": {"coef": 0.1, "target": 0.2, "horizon": 10}},
    "k2 in the loss": {"kl": {"coef": 0.1, "estimator": "k2", "placement": "loss"}, "epochs": 2},
    "importance": {"importance": {"weight": "token", "cap": 1.03, "band": (0.95, 1.05)}, "minibatches": 3},
    "packing": {"packing": True, "loss": {"aggregation": "seq_mean_token_sum_norm"}},
    "grpo": {"advantage": {"estimator": "grpo"}},
    "rloo": {"advantage": {"estimator": "rloo"}, "min_group_std": 0.05},
    "reinforce_pp": {"advantage": {"estimator": "reinforce_pp"}, "kl": {"coef": 0.1}},
}


def drifted(trajectory: Trajectory, by: float) -> Trajectory:
    """As an engine reports it whose arithmetic is another."""
    turns = (replace(turn, logprobs=tuple(x - by for x in turn.logprobs)) for turn in trajectory.turns)
    return replace(trajectory, turns=tuple(turns))


def update(kit, ppo: dict[str, object], steps: int = 2):
    """The record of the second of two updates, when reference and policy have parted, and what it learned from."""
    is_free = ppo.get("advantage", {}).get("estimator") in {"grpo", "rloo", "reinforce_pp"}
    ppo = {"target_kl": None, "policy": {"lr": 1e-2}, **ppo}
    config = kit.config(ppo=ppo, critic="none" if is_free else "separate")
    model = kit.actor_critic(config, reference=config.ppo.kl.needs_reference)
    learner = PPOLearner(model, config)
    for _ in range(steps):
        episodes = [t for t in kit.batch() + kit.batch(seed=20) if not (is_free and t.end is EndReason.CUT)]
        task = Task("t/0", "toy", "")
        episodes = [replace(t, task=task) if k % 2 else t for k, t in enumerate(episodes)]
        episodes = kit.relabel(model, episodes)
        if config.ppo.importance.is_on:
            episodes = [drifted(t, 0.01 * k) for k, t in enumerate(episodes)]
        metrics = learner.update(episodes)
    rollout = read_rollout(episodes, context=10**6, vocab_size=kit.vocab)
    return config.ppo, rollout, learner.record, metrics


@pytest.mark.parametrize("ppo", SETTINGS.values(), ids=SETTINGS.keys())
def test_targets_and_losses_follow_from_the_record(kit, tmp_path, ppo: dict[str, object]) -> None:
    config, rollout, record, metrics = update(kit, ppo)
    record.save(tmp_path / "learning.safetensors")
    learned = learning_rows(config, rollout, UpdateRecord.load(tmp_path / "learning.safetensors"))
    assert [row.what for row in learned.rows if not row.ok] == []
    found = learned.credit | learned.losses
    same = {name: found[name] for name in found if name in metrics}
    assert {"loss/policy", "ppo/kl"} <= same.keys()
    assert same == pytest.approx({name: metrics[name] for name in same}, abs=1e-5, rel=1e-5, nan_ok=True)
    assert ("loss/value" in same) == (not config.advantage.is_critic_free)


def test_masks_are_really_used(kit) -> None:
    """Else the settings above would prove nothing of them."""
    _, rollout, record, _ = update(kit, SETTINGS["turn"])
    assert 0 < int(record.value_keep_N.sum()) < rollout.n_actions
    _, rollout, record, _ = update(kit, SETTINGS["one step"])
    assert 0 < int(record.known_N.sum()) < rollout.n_actions
    config, rollout, record, _ = update(kit, SETTINGS["k2 in the loss"])
    assert any(step.kl_loss > 0 for step in record.steps)
    assert record.kl_coef == config.kl.coef
    _, rollout, record, _ = update(kit, SETTINGS["importance"])
    assert 0 < int(record.keep_N.sum()) < rollout.n_actions
    assert record.weight_N.unique().numel() > 3
    _, _, record, _ = update(kit, SETTINGS["entropy"])
    assert all(step.entropy_bonus < 0 for step in record.steps)


@pytest.mark.parametrize(
    ("name", "field", "what"),
    [
        ("turn", "value_keep_N", "value loss"),
        ("k2 in the loss", "reference_N", "kl loss"),
        ("value clip", "old_value_N", "value loss"),
        ("grpo", "keep_N", "policy loss"),
    ],
)
def test_what_a_setting_reads_is_read(kit, name: str, field: str, what: str) -> None:
    config, rollout, record, _ = update(kit, SETTINGS[name])
    value = getattr(record, field)
    changed = ~value if value.dtype is torch.bool else value + 0.2
    rows = learning_rows(config, rollout, replace(record, **{field: changed})).rows
    assert what in [row.what for row in rows if not row.ok]
