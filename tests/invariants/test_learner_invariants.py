"""Runtime invariants of the learner: what silently breaks elsewhere stops here, with its cause named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agentrl.errors import InvariantError
from agentrl.learner import invariants
from agentrl.learner.ppo import PPOLearner
from agentrl.types import EndReason


def start(kit, *, dtype=torch.float32, **changes):
    config = kit.config(**changes)
    model = kit.actor_critic(config, dtype=dtype)
    return model, PPOLearner(model, config)


@pytest.mark.parametrize("critic", ["separate", "head"])
@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_ratios_are_one_before_the_first_step(kit, critic, minibatches):
    model, learner = start(kit, critic=critic, ppo={"minibatches": minibatches, "microbatch_tokens": 64})
    metrics = learner.update(kit.relabel(model, kit.batch()))
    assert metrics["ppo/first_ratio_gap"] <= 1e-5
    assert metrics["ppo/first_kl"] <= 1e-10
    assert metrics["ppo/engine_gap"] <= 1e-6


def test_bfloat16_is_held_to_its_own_bound(kit):
    model, learner = start(kit, critic="head", dtype=torch.bfloat16, ppo={"microbatch_tokens": 64})
    metrics = learner.update(kit.relabel(model, kit.batch()))
    assert metrics["ppo/first_ratio_gap"] < 1.0


def test_rounding_never_stops_an_update_that_has_not_begun(kit):
    ppo = {"microbatch_tokens": 64, "minibatches": 2, "target_kl": 1e-12}
    model, learner = start(kit, critic="head", dtype=torch.bfloat16, ppo=ppo)
    metrics = learner.update(kit.relabel(model, kit.batch()))
    assert metrics["ppo/kl"] > 1.5e-12
    assert (metrics["ppo/steps"], metrics["ppo/early_stop"]) == (1.0, 1.0)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_stale_weights_stop_the_update_before_any_step(kit, minibatches):
    model, learner = start(kit, ppo={"minibatches": minibatches})
    batch = kit.relabel(model, kit.batch())
    with torch.no_grad():
        for weight in model.policy_parameters():
            weight.mul_(1.01)
    before = [weight.clone() for weight in model.policy_parameters()]
    with pytest.raises(InvariantError, match=r"differ by .* on average .*policy version 0.*other weights"):
        learner.update(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.policy_parameters(), strict=True))


def test_another_temperature_in_the_engine_is_noticed(kit):
    model, learner = start(kit, temperature=0.8)
    with pytest.raises(InvariantError, match="another temperature"):
        learner.update(kit.relabel(model, kit.batch(), temperature=1.0))
    learner.update(kit.relabel(model, kit.batch(), temperature=0.8))


def test_other_tokens_than_were_sampled_are_noticed(kit):
    model, learner = start(kit)
    batch = kit.relabel(model, kit.batch())
    turn = batch[2].turns[0]
    wrong = tuple((token + 1) % kit.vocab for token in turn.sampled_ids)
    batch[2] = replace(batch[2], turns=(replace(turn, sampled_ids=wrong),))
    with pytest.raises(InvariantError, match=rf"most in episode {batch[2].id}"):
        learner.update(batch)


def test_dropout_between_scoring_and_update_is_noticed(kit):
    model, learner = start(kit, ppo={"minibatches": 2})
    batch = kit.relabel(model, kit.batch())
    for layer in model.policy.model.layers:
        layer.self_attn.attention_dropout = 0.3
        layer.self_attn.training = True
    with pytest.raises(InvariantError, match=r"ratios are not 1.*dropout"):
        learner.update(batch)


def test_first_minibatch_bounds():
    old = torch.full((1000,), -2.0, dtype=torch.float64)
    invariants.check_first_minibatch(old, old + 5e-5, torch.float32)
    with pytest.raises(InvariantError, match=r"k3 <= 1e-08"):
        invariants.check_first_minibatch(old, old + 2e-4, torch.float32)
    invariants.check_first_minibatch(old, old + 2e-4, torch.bfloat16)
    rounding = 0.03 * (-1.0) ** torch.arange(1000, dtype=torch.float64)
    invariants.check_first_minibatch(old, old + rounding, torch.bfloat16)
    with pytest.raises(InvariantError, match=r"mean \|ratio - 1\| <= 0.1"):
        invariants.check_first_minibatch(old, old + 5 * rounding, torch.bfloat16)
    with pytest.raises(InvariantError, match=r"\|mean log ratio\| <= 0.01"):
        invariants.check_first_minibatch(old, old + 2e-2, torch.bfloat16)
    with pytest.raises(InvariantError, match="ratios are not 1"):
        invariants.check_first_minibatch(old, old * float("nan"), torch.float32)


@pytest.mark.parametrize("critic", ["separate", "head", "none"])
@pytest.mark.parametrize("packing", [False, True])
def test_old_logprobs_come_from_a_batch_of_their_own(kit, critic, packing):
    """Dropout in one layer: had the update's own scores stood for the old ones, the ratios would be 1 all the same."""
    estimator = "reinforce_pp" if critic == "none" else "boundary"
    for minibatches in (1, 2):
        ppo = {"minibatches": minibatches, "packing": packing, "advantage": {"estimator": estimator}}
        model, learner = start(kit, critic=critic, ppo=ppo)
        batch = [replace(t, end=EndReason.MAX_TURNS, trailing_ids=()) for t in kit.batch()]
        assert learner.update(kit.relabel(model, batch))["ppo/first_ratio_gap"] <= 1e-5
        batch = kit.relabel(model, batch)
        for layer in model.policy.model.layers:
            layer.self_attn.attention_dropout = 0.3
            layer.self_attn.training = True
        with pytest.raises(InvariantError, match=r"ratios are not 1.*dropout"):
            learner.update(batch)


def off_by(batch, gap):
    return [
        replace(t, turns=tuple(replace(x, logprobs=tuple(y - gap for y in x.logprobs)) for x in t.turns)) for t in batch
    ]


def test_a_corrected_engine_may_differ_but_not_absurdly(kit):
    """A steady gap of .3 is corrected; one of .6 is another policy, whatever the type of the weights."""
    corrected = {"importance": {"weight": "token"}}
    for dtype in (torch.float32, torch.bfloat16):
        model, learner = start(kit, critic="head", dtype=dtype, ppo=corrected)
        assert learner.update(off_by(kit.relabel(model, kit.batch()), 0.3))["ppo/engine_gap"] == pytest.approx(
            0.3, abs=0.02
        )
        before = [weight.clone() for weight in model.policy_parameters()]
        with pytest.raises(InvariantError, match=r"differ by 0.6.* on average \(expected at most 0.5\)"):
            learner.update(off_by(kit.relabel(model, kit.batch()), 0.6))
        assert all(torch.equal(a, b) for a, b in zip(before, model.policy_parameters(), strict=True))


@pytest.mark.parametrize("importance", [{}, {"band": (0.5, 2.0)}])
def test_an_engine_that_is_not_corrected_must_be_exact(kit, importance):
    """A band masks, and corrects nothing; the message says what would."""
    model, learner = start(kit, ppo={"importance": importance})
    with pytest.raises(InvariantError, match=r"expected at most 0.0001.*ppo.importance.weight = 'token'"):
        learner.update(off_by(kit.relabel(model, kit.batch()), 0.01))


def test_a_damaged_reference_stops_the_update_before_any_step(kit):
    config = kit.config(ppo={"kl": {"coef": 0.1}})
    model = kit.actor_critic(config, reference=True)
    learner = PPOLearner(model, config)
    batch = kit.relabel(model, kit.batch())
    with torch.no_grad():
        model._reference.model.embed_tokens.weight.mul_(float("nan"))
    before = [weight.clone() for weight in model.policy_parameters()]
    with pytest.raises(InvariantError, match=r"reference's logprobs.*not finite"):
        learner.update(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.policy_parameters(), strict=True))
