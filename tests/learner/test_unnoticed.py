"""What mutants showed that no other test noticed: rates, decay, counters, a metric; all numbers by hand."""

from __future__ import annotations

import pytest
import torch

from agentrl.config import LossConfig, OptimConfig
from agentrl.errors import InvariantError
from agentrl.learner.losses import make_share, policy_loss
from agentrl.learner.optim import Optimizer, cosine, linear_warmup


def optimizer(schedule, **config) -> tuple[torch.nn.Parameter, Optimizer]:
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    return weight, Optimizer("policy", [weight], OptimConfig(**config), schedule)


def test_steps_are_as_long_as_the_schedule_says():
    """AdamW's first step is the rate, whatever the gradient; under an even gradient the next ones are too."""
    weight, found = optimizer(linear_warmup(3), lr=0.1)
    for expected in (1.975, 1.925, 1.85, 1.75, 1.65):
        weight.grad = torch.ones_like(weight)
        found.step()
        assert weight.item() == pytest.approx(expected, abs=1e-6)


def test_weight_decay_is_taken_off_at_the_rate():
    weight, found = optimizer(linear_warmup(0), lr=0.1, weight_decay=0.5)
    weight.grad = torch.ones_like(weight)
    found.step()
    assert weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) - 0.1, abs=1e-6)


def test_the_cosine_falls_to_its_floor():
    factor = cosine(warmup_steps=4, total_steps=14)
    assert [factor(step) for step in (0, 3, 4, 9, 14, 100)] == pytest.approx([0.2, 0.8, 1.0, 0.55, 0.1, 0.1])


def test_gradients_that_are_not_finite_end_a_run_only_in_a_row():
    weight, found = optimizer(linear_warmup(0), lr=0.1)
    for gradient in ("nan", "nan", "1", "nan", "nan"):
        weight.grad = torch.full_like(weight, float(gradient))
        found.step()
    assert (found.steps, found.skipped) == (1, 4)
    weight.grad = torch.full_like(weight, float("nan"))
    with pytest.raises(InvariantError, match="3 times in a row"):
        found.step()


def test_clip_fractions_count_only_what_loses_its_gradient():
    """Of ratios 0.5 and 2 with advantages 1 and -1, those lose it that have gone far enough in their own direction."""
    ratio_N, advantage_N = torch.tensor([0.5, 2.0, 0.5, 2.0]), torch.tensor([1.0, -1.0, -1.0, 1.0])
    share = make_share(torch.arange(4), torch.ones(4, dtype=torch.bool), "token_mean", 1)
    _, metrics = policy_loss(ratio_N.log(), torch.zeros(4), advantage_N, share, LossConfig())
    assert (float(metrics["clip_fraction_lower"]), float(metrics["clip_fraction_upper"])) == (0.25, 0.25)
    assert float(metrics["clip_fraction"]) == 0.5


def test_the_reference_adapter_is_frozen(kit):
    model = kit.actor_critic(kit.config(lora={"rank": 2}, critic="adapter"))
    with torch.no_grad():
        for weight in model.policy_parameters():
            weight.add_(0.1)
    model.begin_rl(reference=True)
    frozen = {name: weight.requires_grad for name, weight in model.policy.named_parameters() if "lora_" in name}
    assert {name.split(".")[-2] for name, trains in frozen.items() if not trains} == {"reference"}
    assert {name.split(".")[-2] for name, trains in frozen.items() if trains} == {"policy", "critic"}
