"""Each loss's gradient against finite differences in float64, away from the kinks of its clips."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.config import LossConfig
from agentrl.learner.logits import logprob_and_entropy
from agentrl.learner.losses import (
    aggregate,
    entropy_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_loss,
    make_share,
    policy_loss,
    value_loss,
)

F64 = torch.float64
LENGTHS = [1, 3, 40, 7]
N = sum(LENGTHS)
EPISODE = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
aggregations = pytest.mark.parametrize("aggregation", AGGREGATIONS)


def draw(seed, scale=1.0):
    return scale * torch.randn(N, generator=torch.Generator().manual_seed(seed), dtype=F64)


def away_from(x, kinks):
    for kink in kinks:
        x = torch.where((x - kink).abs() < 0.02, x + 0.05, x)
    return x


def share_of(aggregation):
    return make_share(EPISODE, torch.arange(N) % 7 != 3, aggregation, 16)


@aggregations
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_policy_loss(aggregation, dual_clip, weighted):
    old, advantage, config = draw(1), draw(2), LossConfig(dual_clip=dual_clip)
    logprob = (old + away_from(draw(3, 0.7), [math.log(0.8), math.log(1.28), math.log(3.0)])).requires_grad_(True)
    extra = {"weight_N": draw(7).exp().clamp(max=2.0), "keep_N": torch.arange(N) % 5 != 1} if weighted else {}
    share = share_of(aggregation)
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, advantage, share, config, **extra)[0], [logprob])


@aggregations
@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss(aggregation, clip):
    old, target = draw(5), draw(6)
    # The clipped and the plain error cross where both are equally far from the target.
    moved = away_from(draw(4), [-0.3, 0.3])
    share = share_of(aggregation)
    value = (old + moved).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, target, share, clip)[0], [value])


@aggregations
def test_entropy_and_kl_terms(aggregation):
    share, reference, keep, weight = share_of(aggregation), draw(8), torch.arange(N) % 5 != 1, draw(9).exp()
    x = draw(4).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: entropy_loss(x, share, 0.3, keep_N=keep)[0], [x])
    for estimate in (kl_k1, kl_k2, kl_k3):
        assert torch.autograd.gradcheck(lambda x, e=estimate: aggregate(e(x, reference), share), [x])
    drift = draw(10, 0.3)

    # The ratio is a constant in the loss, so it must be one in the finite differences too.
    def term(x):
        return kl_loss(x, x.detach() + drift, reference, share, weight_N=weight, keep_N=keep)

    assert torch.autograd.gradcheck(term, [x])


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprob_and_entropy_in_chunks(chunk, bias, temperature):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 4, generator=generator, dtype=F64, requires_grad=True)
    target = torch.tensor([0, 5, 3, 3, 1, 2, 5])
    head = torch.nn.Linear(4, 6, bias=bias, dtype=F64)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=F64))

    names, module = [f"head.{name}" for name, _ in head.named_parameters()], _Scores(head)

    def scores(hidden, *weights):
        given = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(module, given, (hidden, target, temperature, chunk))

    assert torch.autograd.gradcheck(scores, [hidden, *head.parameters()])


class _Scores(torch.nn.Module):
    """Lets the head's weights be inputs of a function."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden, target, temperature, chunk):
        return logprob_and_entropy(hidden, target, self.head, temperature=temperature, chunk=chunk, entropy_grad=True)
