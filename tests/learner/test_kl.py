"""The KL to the reference: what each placement optimises, exactly; its weight; its figures; what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from categorical import Categorical, cosine
from pydantic import ValidationError

from agentrl.config import KlConfig
from agentrl.errors import InvariantError
from agentrl.learner.kl import KlController, kl_stat, score_reference
from agentrl.learner.losses import kl_k1, kl_k2, kl_k3, kl_loss

F64 = torch.float64
seeds = pytest.mark.parametrize("seed", [1, 2, 3])


def close(a, b):
    return bool(torch.allclose(a, b, rtol=0, atol=1e-12))


@seeds
def test_gradients_of_the_placements_on_policy(seed):
    """k1 in the reward and k2 in the loss are the gradient of KL(pi, reference); the others are something else."""
    world = Categorical(seed)
    assert close(world.in_reward(kl_k1), world.reverse)
    assert close(world.in_loss(kl_k2), world.reverse)
    assert close(world.gradient(lambda x: kl_loss(x, x.detach(), world.reference, world.share)), world.reverse)
    assert close(world.in_loss(kl_k1), torch.zeros(5, dtype=F64))
    assert close(world.in_loss(kl_k3), world.forward)
    assert close(world.in_reward(kl_k3), world.reverse - world.forward)
    assert not close(world.reverse, world.forward)


def test_k3_in_the_reward_can_point_away_from_what_is_wanted():
    assert min(cosine(Categorical(seed).in_reward(kl_k3), Categorical(seed).reverse) for seed in range(6)) < 0


@seeds
def test_the_loss_term_stays_exact_on_stale_samples(seed):
    """Plain k2 is biased once the policy has moved; with the ratio as a constant factor it is not."""
    world = Categorical(seed, stale=True)
    assert cosine(world.in_loss(kl_k2), world.reverse) < 0.9999
    ours = world.gradient(lambda x: kl_loss(x, world.sampler, world.reference, world.share))
    assert close(ours, world.reverse)

    def differentiable(x):
        return (world.sampler.exp() * (x - world.sampler).exp() * kl_k3(x, world.reference)).sum()

    assert close(world.gradient(differentiable), world.reverse)


@seeds
def test_importance_weights_make_it_exact_for_another_engine_too(seed):
    """Samples of mu, an anchor old that is neither mu nor pi: old / mu as weights, pi / old as the ratio."""
    world = Categorical(seed, stale=True)
    old = (0.5 * world.sampler + 0.5 * world.logits.detach()).log_softmax(0)
    weight = (old - world.sampler).exp()
    ours = world.gradient(lambda x: kl_loss(x, old, world.reference, world.share, weight_N=weight))
    assert close(ours, world.reverse)


def test_estimates_agree_where_the_policies_are_near():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=generator, dtype=F64)
    p = logits.log_softmax(0)
    q = (logits + 0.2 * torch.randn(50, generator=generator, dtype=F64)).log_softmax(0)
    k1, k2, k3 = (float((p.exp() * estimate(p, q)).sum()) for estimate in (kl_k1, kl_k2, kl_k3))
    assert 0.005 < k1 < 0.05
    assert k3 == pytest.approx(k1, abs=1e-12)
    assert k2 == pytest.approx(k1, rel=0.1)


def test_a_fixed_weight_stays():
    controller = KlController(KlConfig(coef=0.2))
    controller.observe(100.0, 512)
    assert controller.coef == 0.2


def test_an_adaptive_weight_by_hand():
    """Target 6, horizon 1000, 100 episodes: errors -.2 (clipped), 0, +.1, +.2 (clipped)."""
    controller = KlController(KlConfig(coef=0.5, target=6.0, horizon=1000))
    expected = 0.5
    for kl, factor in ((1.0, 0.98), (6.0, 1.0), (6.6, 1.01), (100.0, 1.02)):
        controller.observe(kl, 100)
        expected *= factor
        assert controller.coef == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kl", [0.0, -3.0, 1e9])
def test_no_batch_is_so_large_that_the_weight_changes_its_sign(kl):
    controller = KlController(KlConfig(coef=0.5, target=1.0, horizon=10))
    for _ in range(50):
        before = controller.coef
        controller.observe(kl, 10_000)
        assert 0.8 * before <= controller.coef * (1 + 1e-12)
        assert controller.coef <= 1.2 * before * (1 + 1e-12)
    assert controller.coef > 0


def test_a_kl_that_is_no_number_stops_the_run():
    controller = KlController(KlConfig(coef=0.5, target=1.0))
    with pytest.raises(InvariantError, match="KL to the reference is nan"):
        controller.observe(math.nan, 4)


def test_the_weight_is_in_the_state():
    config = KlConfig(coef=0.5, target=1.0, horizon=100)
    first, second = KlController(config), KlController(config)
    first.observe(5.0, 50)
    second.load_state_dict(first.state_dict())
    assert second.coef == first.coef != 0.5


def test_figures_by_hand():
    """Episodes of 1, 3 and 0 tokens: sums 2 and 3, means 2 and 1; the empty one counts nowhere."""
    k1, episode = torch.tensor([2.0, 0.5, 0.5, 2.0]), torch.tensor([0, 2, 2, 2])
    assert kl_stat(k1, episode, "token_mean") == pytest.approx(1.5)
    assert kl_stat(k1, episode, "seq_sum") == pytest.approx(2.5)
    assert kl_stat(torch.zeros(0), torch.zeros(0, dtype=torch.int64), "seq_sum") == 0.0


def test_the_reference_is_scored_at_the_temperature_of_sampling(kit):
    config = kit.config(ppo={"kl": {"coef": 0.1}})
    model = kit.actor_critic(config, reference=True, dtype=F64)
    batch = kit.batch()
    micros = kit.micros(batch, 60)
    for temperature in (0.5, 1.0):
        logprob_N = torch.zeros(sum(t.n_sampled for t in batch), dtype=F64)
        for micro in micros:
            logprob_N[micro.index_N] = model.policy_logprobs(micro, temperature).logprob_N.detach()
        reference_N, metrics = score_reference(model, micros, temperature, logprob_N)
        assert torch.allclose(reference_N, logprob_N, atol=1e-12)
        assert metrics == {"ppo/kl_ref": pytest.approx(0.0, abs=1e-12), "ppo/kl_ref_k1": pytest.approx(0.0, abs=1e-12)}


@pytest.mark.parametrize(
    ("estimator", "placement", "reason"),
    [
        ("k3", "reward", r"minus that of KL\(reference, policy\), which can point the wrong way"),
        ("k2", "reward", "its expectation there is not the KL"),
        ("k1", "loss", "its expected gradient there is 0"),
        ("k3", "loss", "the other direction"),
    ],
)
def test_pairs_with_another_gradient_are_refused_with_the_reason(estimator, placement, reason):
    with pytest.raises(ValidationError, match=rf"{estimator} in the {placement} is refused: .*{reason}"):
        KlConfig(coef=0.1, estimator=estimator, placement=placement)


def test_the_two_right_pairs_are_taken():
    assert KlConfig(coef=0.1).needs_reference
    assert KlConfig(coef=0.1, estimator="k2", placement="loss", target=0.1).needs_reference
    assert not KlConfig().needs_reference


def test_a_target_without_a_weight_to_adapt_is_refused():
    with pytest.raises(ValidationError, match="a coef of 0 stays 0: expected a coef above 0"):
        KlConfig(target=0.1)
