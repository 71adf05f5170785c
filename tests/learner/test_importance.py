"""Weights and masks for the gap between engine and learner: by hand, exactly, and at their worst inputs."""

from __future__ import annotations

import math

import pytest
import torch
from categorical import Categorical
from pydantic import ValidationError

from agentrl.config import ImportanceConfig, LossConfig
from agentrl.learner.importance import effective_share, importance_weights
from agentrl.learner.losses import make_share, policy_loss

F64 = torch.float64
EPISODE = torch.tensor([0, 0, 1, 1, 1])
ENGINE = torch.tensor([0.5, 0.4, 0.25, 0.5, 0.1], dtype=F64).log()
OLD = torch.tensor([0.5, 0.5, 0.75, 0.4, 0.1], dtype=F64).log()
RATIOS = [1.0, 1.25, 3.0, 0.8, 1.0]


def test_weights_by_hand():
    weight, keep, metrics = importance_weights(ENGINE, OLD, EPISODE, ImportanceConfig(weight="token"))
    assert weight.tolist() == pytest.approx([1.0, 1.25, 2.0, 0.8, 1.0])
    assert weight.dtype == F64
    assert bool(keep.all())
    assert metrics["ppo/importance_mean"] == pytest.approx(sum(RATIOS) / 5)
    assert metrics["ppo/importance_ess"] == pytest.approx(sum(RATIOS) ** 2 / (5 * sum(r * r for r in RATIOS)))
    assert metrics["ppo/importance_capped"] == pytest.approx(0.2)
    assert metrics["ppo/importance_masked"] == 0.0


def test_the_band_is_on_the_geometric_mean_of_an_episode():
    """Geometric means: sqrt(1.25) = 1.118 and 2.4 to the third = 1.339."""
    for band, expected in (((0.9, 1.12), [1, 1, 0, 0, 0]), ((0.9, 1.1), [0] * 5), ((0.9, 1.35), [1] * 5)):
        weight, keep, metrics = importance_weights(ENGINE, OLD, EPISODE, ImportanceConfig(band=band))
        assert keep.long().tolist() == expected
        assert weight.tolist() == [1.0] * 5
        assert metrics["ppo/importance_masked"] == pytest.approx(1 - sum(expected) / 5)
        assert metrics["ppo/importance_capped"] == 0.0
    _, keep, _ = importance_weights(OLD, ENGINE, EPISODE, ImportanceConfig(band=(0.8, 1.5)))
    assert keep.long().tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("length", [1, 10, 4000])
def test_length_alone_never_masks_an_episode(length):
    """A steady gap of 2 %: the product over 4000 tokens is e to the 79, the geometric mean is 1.02 at every length."""
    old = torch.full((length,), math.log(1.02), dtype=F64)
    _, keep, _ = importance_weights(
        torch.zeros_like(old), old, torch.zeros(length).long(), ImportanceConfig(band=(0.9, 1.1))
    )
    assert bool(keep.all())


def test_an_exact_engine_has_weights_of_one():
    weight, keep, metrics = importance_weights(OLD, OLD, EPISODE, ImportanceConfig(weight="token", band=(0.99, 1.01)))
    assert weight.tolist() == [1.0] * 5
    assert bool(keep.all())
    assert metrics["ppo/importance_ess"] == pytest.approx(1.0)
    assert metrics["ppo/importance_mean"] == 1.0


def test_extreme_gaps_stay_finite_and_do_not_reach_other_episodes():
    old = OLD.clone()
    old[0], old[2] = -900.0, 0.0
    engine = ENGINE.clone()
    engine[2] = -900.0
    config = ImportanceConfig(weight="token", band=(0.5, 2.0))
    weight, keep, metrics = importance_weights(engine, old, EPISODE, config)
    assert bool(weight.isfinite().all())
    assert float(weight[2]) == 2.0
    assert not bool(keep.any())
    assert all(math.isfinite(value) for value in metrics.values())


def test_nothing_to_weigh():
    nothing = torch.zeros(0, dtype=F64)
    config = ImportanceConfig(weight="token", band=(0.5, 2.0))
    weight, keep, metrics = importance_weights(nothing, nothing, torch.zeros(0).long(), config)
    assert (weight.numel(), keep.numel(), metrics) == (0, 0, {})


def test_effective_share_by_hand():
    assert effective_share(torch.ones(7)) == pytest.approx(1.0)
    assert effective_share(torch.tensor([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_share(torch.tensor([1.0, 3.0])) == pytest.approx(16 / 20)


def test_weights_take_the_bias_out_of_the_gradient_and_truncation_leaves_little_of_it():
    """One state, samples of the engine: without weights the gradient is that of another policy."""
    world = Categorical(4, stale=True)
    advantage = torch.tensor([1.0, -0.5, 0.2, -1.0, 0.7], dtype=F64)
    old = world.logits.detach().log_softmax(0)

    def gradient(weight):
        def loss(log_pi):
            return policy_loss(log_pi, old, advantage, world.share, LossConfig(), weight_N=weight)[0]

        return world.gradient(loss)

    wanted = world.gradient(lambda log_pi: -(log_pi.exp() * advantage).sum())
    full = importance_weights(world.sampler, old, torch.zeros(5).long(), ImportanceConfig(weight="token", cap=1e6))[0]
    truncated = importance_weights(world.sampler, old, torch.zeros(5).long(), ImportanceConfig(weight="token"))[0]
    assert torch.allclose(gradient(full), wanted, rtol=0, atol=1e-12)
    errors = [float((gradient(weight) - wanted).norm() / wanted.norm()) for weight in (truncated, None)]
    assert errors[0] < 0.5 * errors[1]


def test_masked_tokens_leave_the_loss_and_nobody_else_counts_for_more():
    share = make_share(EPISODE, torch.ones(5, dtype=torch.bool), "token_mean", 1)
    _, keep, _ = importance_weights(ENGINE, OLD, EPISODE, ImportanceConfig(band=(0.9, 1.12)))
    logprob = OLD.clone().requires_grad_(True)
    policy_loss(logprob, OLD, torch.ones(5, dtype=F64), share, LossConfig(), keep_N=keep)[0].backward()
    assert logprob.grad.tolist() == pytest.approx([-0.2, -0.2, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("band", [(1.1, 1.2), (0.0, 2.0), (0.5, 0.9)])
def test_a_band_without_one_in_it_is_refused(band):
    with pytest.raises(ValidationError, match="expected .low, high. with 0 < low < 1 < high"):
        ImportanceConfig(band=band)


def test_whether_anything_is_corrected():
    assert not ImportanceConfig().is_on
    assert ImportanceConfig(weight="token").is_on
    assert ImportanceConfig(band=(0.9, 1.1)).is_on
