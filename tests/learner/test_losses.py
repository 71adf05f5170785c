"""Losses against hand-made gradients, masked NaN, weights, kept tokens, and splits of very unequal episodes."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.config import LossConfig
from agentrl.learner.losses import (
    Share,
    aggregate,
    entropy_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_loss,
    make_share,
    merge_metrics,
    policy_loss,
    value_loss,
)

F64 = torch.float64
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
LENGTHS = [1, 3, 40, 7]


def everything(n: int, aggregation: str = "token_mean") -> Share:
    return make_share(torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool), aggregation, 5)


def draw(n: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (0.5, 1, -0.5),
        (0.5, -1, 0.0),
        (0.9, 1, -0.9),
        (0.9, -1, 0.9),
        (1.0, 2, -2.0),
        (1.2, 1, -1.2),
        (1.2, -1, 1.2),
        (1.4, 1, 0.0),
        (1.4, -1, 1.4),
        (2.0, 1, 0.0),
        (2.0, -1, 2.0),
        (3.5, 1, 0.0),
        (3.5, -1, 0.0),
    ],
)
def test_gradient_of_the_clipped_surrogate(ratio, advantage, gradient):
    logprob = torch.tensor([math.log(ratio)], dtype=F64, requires_grad=True)
    old, wanted = torch.zeros(1, dtype=F64), torch.tensor([float(advantage)], dtype=F64)
    loss, _ = policy_loss(logprob, old, wanted, everything(1), LossConfig())
    loss.backward()
    assert logprob.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_values_and_metrics_of_the_policy_loss_by_hand():
    """Ratios .5, 1.4, 3.5 and 1 with advantages -1, 1, -1, 2."""
    logprob = torch.tensor([0.5, 1.4, 3.5, 1.0], dtype=F64).log()
    old, advantage = torch.zeros(4, dtype=F64), torch.tensor([-1.0, 1.0, -1.0, 2.0], dtype=F64)
    loss, metrics = policy_loss(logprob, old, advantage, everything(4), LossConfig())
    assert loss.item() == pytest.approx((0.8 - 1.28 + 3.0 - 2.0) / 4)
    found = {name: value.item() for name, value in metrics.items()}
    assert found["clip_fraction"] == pytest.approx(0.5)
    assert found["clip_fraction_lower"] == found["clip_fraction_upper"] == found["clip_fraction_dual"] == 0.25
    assert found["ratio_max"] == pytest.approx(3.5)
    assert found["kl_k1"] == pytest.approx(-sum(math.log(r) for r in (0.5, 1.4, 3.5)) / 4)
    assert found["kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in (0.5, 1.4, 3.5, 1.0)) / 4)


def test_without_dual_clip_negative_advantages_are_unbounded():
    logprob = torch.tensor([math.log(10.0)], dtype=F64)
    args = (logprob, torch.zeros(1, dtype=F64), torch.tensor([-1.0], dtype=F64), everything(1))
    assert policy_loss(*args, LossConfig(dual_clip=None))[0].item() == pytest.approx(10.0)
    assert policy_loss(*args, LossConfig(dual_clip=3.0))[0].item() == pytest.approx(3.0)


def test_value_loss_by_hand():
    value, old, target = (torch.tensor(x, dtype=F64) for x in ([1.0, 3.0], [0.0, 2.9], [0.0, 1.0]))
    assert value_loss(value, old, target, everything(2), None)[0].item() == pytest.approx(0.5 * (1.0 + 4.0) / 2)
    # Clipped to 0.5: errors .25 and 4, so the unclipped ones are the worse.
    loss, metrics = value_loss(value, old, target, everything(2), 0.5)
    assert loss.item() == pytest.approx(1.25)
    assert metrics["clip_fraction"].item() == 0.0
    # The move toward the target is clipped away: |0 + .5 - 2| is worse than |1.8 - 2|.
    loss, metrics = value_loss(value[:1] * 1.8, old[:1], target[:1] + 2.0, everything(1), 0.5)
    assert loss.item() == pytest.approx(0.5 * 1.5**2)
    assert metrics["clip_fraction"].item() == 1.0


def test_entropy_bonus_and_kl_estimates():
    loss, metrics = entropy_loss(torch.tensor([1.0, 3.0]), everything(2), 0.1)
    assert loss.item() == pytest.approx(-0.2)
    assert metrics["entropy"].item() == pytest.approx(2.0)
    p, q = torch.tensor([-1.0], dtype=F64), torch.tensor([-1.5], dtype=F64)
    assert kl_k1(p, q).item() == pytest.approx(0.5)
    assert kl_k2(p, q).item() == pytest.approx(0.125)
    assert kl_k3(p, q).item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_k3_keeps_its_digits_near_zero():
    """exp(x) - 1 - x in float32 is noise of 1e-7 here; the invariant's bound is 1e-8."""
    assert kl_k3(torch.tensor([0.0]), torch.tensor([1e-4])).item() == pytest.approx(5e-9, rel=0.05)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 4) / 4),
        ("seq_mean_token_mean", (1 + 3) / 2),
        ("seq_mean_token_sum", (1 + 9) / 2),
        ("seq_mean_token_sum_norm", (1 + 9) / 2 / 5),
    ],
)
def test_aggregations_by_hand(aggregation, expected):
    episode = torch.tensor([0, 1, 1, 2, 2, 2])
    mask = torch.tensor([True, False, False, True, True, True])
    share = make_share(episode, mask, aggregation, norm_length=5)
    loss = torch.tensor([1.0, math.nan, math.nan, 2.0, 3.0, 4.0], dtype=F64)
    assert aggregate(loss, share).item() == pytest.approx(expected)


def losses_of(logprob, value, entropy, share, config=LossConfig(value_clip=0.3)):  # noqa: B008
    n = logprob.numel()
    old, advantage, before, target = draw(n, 11), draw(n, 12), draw(n, 13), draw(n, 14)
    loss = policy_loss(logprob, old, advantage, share, config)[0]
    loss = loss + value_loss(value, before, target, share, config.value_clip)[0]
    return loss + entropy_loss(entropy, share, 0.1)[0] + 0.3 * kl_loss(logprob, old, target, share)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_what_stands_in_masked_slots_changes_neither_value_nor_gradient(bad, aggregation):
    n = 12
    mask = torch.arange(n) % 3 != 1
    share = make_share(torch.arange(n) // 5, mask, aggregation, 5)
    clean = [draw(n, seed) for seed in (21, 22, 23)]
    dirty = [torch.where(mask, x, bad) for x in clean]
    results = []
    for inputs in (clean, dirty):
        leaves = [x.clone().requires_grad_(True) for x in inputs]
        loss = losses_of(*leaves, share)
        loss.backward()
        results.append((loss.detach(), *(leaf.grad for leaf in leaves)))
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)
    assert all(bool((grad[~mask] == 0).all()) for grad in results[1][1:])


def test_masked_nan_in_targets_and_metrics():
    n = 6
    mask = torch.tensor([True, True, False, True, False, True])
    share = make_share(torch.zeros(n, dtype=torch.int64), mask, "token_mean", 1)
    dirt = torch.where(mask, draw(n, 1), math.nan)
    loss, metrics = policy_loss(draw(n, 2), dirt, dirt, share, LossConfig())
    assert loss.isfinite()
    assert all(value.isfinite() for value in metrics.values())
    assert kl_loss(draw(n, 2), dirt, dirt, share, weight_N=dirt).isfinite()
    loss, metrics = value_loss(draw(n, 2), dirt, dirt, share, 0.2)
    assert loss.isfinite()
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 2], [3, 1], [4]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 1e-6)])
def test_gradient_does_not_depend_on_the_split(aggregation, sizes, dtype, tolerance):
    """Episodes of 1, 3, 40 and 7 tokens: with equal lengths a wrong denominator would go unseen."""
    n = sum(LENGTHS)
    episode = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    share = make_share(episode, torch.ones(n, dtype=torch.bool), aggregation, 16)
    config = LossConfig(value_clip=0.3)
    old, advantage, before, target = (draw(n, seed).to(dtype) for seed in (11, 12, 13, 14))
    weight, keep = draw(n, 15).exp().to(dtype), torch.arange(n) % 5 != 2

    def gradients(parts):
        leaves = [draw(n, seed).to(dtype).requires_grad_(True) for seed in (21, 22, 23)]
        total = {}
        for part in parts:
            i = torch.cat([torch.nonzero(episode == e).flatten() for e in part])
            logprob, value, entropy = (leaf[i] for leaf in leaves)
            taken = share.take(i)
            loss, metrics = policy_loss(
                logprob, old[i], advantage[i], taken, config, weight_N=weight[i], keep_N=keep[i]
            )
            merge_metrics(total, metrics)
            loss = loss + value_loss(value, before[i], target[i], taken, config.value_clip)[0]
            loss = loss + 0.3 * kl_loss(logprob, old[i], before[i], taken, weight_N=weight[i], keep_N=keep[i])
            (loss + entropy_loss(entropy, taken, 0.1, keep_N=keep[i])[0]).backward()
        return [leaf.grad for leaf in leaves], total

    whole, metrics = gradients([[0, 1, 2, 3]])
    order, parts = [2, 0, 3, 1], []
    for size in sizes:
        parts.append(order[:size])
        order = order[size:]
    split, summed = gradients(parts)
    for a, b in zip(whole, split, strict=True):
        assert (a - b).abs().max() <= tolerance
    for name, value in metrics.items():
        assert summed[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-7)


def test_at_ratio_one_the_gradient_is_minus_the_advantage_over_the_tokens():
    n = 9
    mask = torch.arange(n) != 4
    share = make_share(torch.zeros(n, dtype=torch.int64), mask, "token_mean", 1)
    logprob, advantage = draw(n, 1).requires_grad_(True), draw(n, 2)
    policy_loss(logprob, logprob.detach(), advantage, share, LossConfig())[0].backward()
    assert torch.allclose(logprob.grad, torch.where(mask, -advantage / 8, 0.0), atol=1e-15)


def test_a_minibatch_without_tokens_is_zero_and_not_nan():
    share = make_share(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool), "seq_mean_token_mean", 1)
    loss, metrics = policy_loss(draw(3, 1), draw(3, 2), draw(3, 3), share, LossConfig())
    assert loss.item() == 0.0
    assert metrics["kl"].item() == 0.0


def test_kept_tokens_and_their_weights_by_hand():
    """Four tokens at ratio 1, of which the second is not kept: -A w / 4 for the others, nothing made up for."""
    logprob = torch.zeros(4, dtype=F64, requires_grad=True)
    advantage, weight = torch.tensor([1.0, 9.0, -2.0, 3.0], dtype=F64), torch.tensor([2.0, 1.0, 0.5, 1.0], dtype=F64)
    keep = torch.tensor([True, False, True, True])
    old = torch.zeros(4, dtype=F64)
    loss, metrics = policy_loss(logprob, old, advantage, everything(4), LossConfig(), weight_N=weight, keep_N=keep)
    loss.backward()
    assert loss.item() == pytest.approx((-2.0 + 1.0 - 3.0) / 4)
    assert logprob.grad.tolist() == pytest.approx([-0.5, 0.0, 0.25, -0.75])
    assert metrics["clip_fraction"].item() == 0.0
    assert entropy_loss(torch.tensor([1.0, 5.0, 2.0, 3.0]), everything(4), 0.5, keep_N=keep)[0].item() == pytest.approx(
        -0.5 * 6 / 4
    )
    # k2 of log ratios 1, 3, 2 to the reference; ratios e^.5, -, 1 to the old policy.
    new, old, reference = (torch.tensor(x, dtype=F64) for x in ([0.0, 0.0, 0.0], [-0.5, 7.0, 0.0], [-1.0, -3.0, 2.0]))
    found = kl_loss(new, old, reference, everything(3), weight_N=weight[:3], keep_N=keep[:3])
    assert found.item() == pytest.approx((2.0 * math.exp(0.5) * 0.5 + 0.5 * 2.0) / 3)


def test_clipping_is_counted_on_kept_tokens_and_drift_on_all():
    """Ratios 2, 2 and 1 with advantages of 1: both are clipped, one of them is kept."""
    logprob, advantage = torch.tensor([2.0, 2.0, 1.0], dtype=F64).log(), torch.ones(3, dtype=F64)
    keep = torch.tensor([True, False, True])
    _, metrics = policy_loss(logprob, torch.zeros(3, dtype=F64), advantage, everything(3), LossConfig(), keep_N=keep)
    assert metrics["clip_fraction"].item() == metrics["clip_fraction_upper"].item() == pytest.approx(1 / 3)
    assert metrics["kl_k1"].item() == pytest.approx(-2 * math.log(2) / 3)
    assert metrics["ratio_max"].item() == pytest.approx(2.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_kept_may_be_anything(bad):
    n = 9
    keep, share = torch.arange(n) % 3 != 1, everything(n)
    found = []
    for dirty in (False, True):
        targets = [draw(n, seed) for seed in (2, 3, 4, 5)]
        old, advantage, weight, reference = (torch.where(keep, x, bad) if dirty else x for x in targets)
        logprob, entropy = draw(n, 1).requires_grad_(True), draw(n, 6).requires_grad_(True)
        loss = policy_loss(logprob, old, advantage, share, LossConfig(), weight_N=weight, keep_N=keep)[0]
        loss = loss + kl_loss(logprob, old, reference, share, weight_N=weight, keep_N=keep)
        loss = loss + entropy_loss(torch.where(keep, entropy, bad), share, 0.1, keep_N=keep)[0]
        loss.backward()
        found.append((loss.detach(), logprob.grad, entropy.grad))
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty)


def test_weights_and_ratios_are_constants():
    """A weight that was computed with a gradient passes none on."""
    logprob = draw(5, 1).requires_grad_(True)
    weight = logprob.exp()
    old, advantage = logprob.detach(), draw(5, 2)
    policy_loss(logprob, old, advantage, everything(5), LossConfig(), weight_N=weight)[0].backward()
    assert torch.allclose(logprob.grad, -advantage * logprob.detach().exp() / 5, atol=1e-15)
    logprob.grad = None
    reference = draw(5, 3)
    kl_loss(logprob, old - 0.3, reference, everything(5)).backward()
    assert torch.allclose(logprob.grad, math.exp(0.3) * (old - reference) / 5, atol=1e-15)


def test_log_ratios_are_clamped_before_the_exponential():
    logprob = torch.tensor([800.0, -800.0], dtype=F64)
    loss, metrics = policy_loss(logprob, -logprob, torch.ones(2, dtype=F64), everything(2), LossConfig())
    assert loss.isfinite()
    assert metrics["ratio_max"].item() == pytest.approx(math.exp(20.0))
    assert kl_loss(logprob, -logprob, -logprob, everything(2)).isfinite()


def test_a_value_loss_on_some_tokens_has_their_denominators():
    """Two of five tokens have a value loss, in episodes of 2 and 3: its means are over those."""
    episode, keep = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([True, False, True, True, False])
    value = torch.tensor([1.0, 9.0, 2.0, 4.0, 9.0], dtype=F64, requires_grad=True)
    zeros = torch.zeros(5, dtype=F64)
    for aggregation, expected in (("token_mean", 21 / 3), ("seq_mean_token_mean", (1 + 10) / 2)):
        share = make_share(episode, keep, aggregation, 5)
        assert value_loss(value, zeros, zeros, share, None)[0].item() == pytest.approx(0.5 * expected)


def test_the_value_loss_of_a_zero_head_is_half_the_second_moment():
    """Rewards of 0 and 1 with probability p: p / 2."""
    target = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=F64)
    zeros = torch.zeros(5, dtype=F64)
    assert value_loss(zeros, zeros, target, everything(5), None)[0].item() == pytest.approx(0.2)
