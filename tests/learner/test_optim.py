"""The optimiser: float32 copies of coarse weights, so that no update is lost, and a state that goes on bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.config import OptimConfig
from agentrl.errors import CheckpointError
from agentrl.learner.checkpoint import read_state, write_state
from agentrl.learner.optim import Optimizer, linear_warmup

BF16 = torch.bfloat16


def make(weights, lr=1e-4, **changes):
    return Optimizer("policy", weights, OptimConfig(lr=lr, **changes), linear_warmup(0))


def ones(dtype, n=4):
    return torch.nn.Parameter(torch.ones(n, dtype=dtype))


def push(optimizer, weight, gradient=1.0):
    (gradient * weight.float().sum()).backward()
    return optimizer.step()


def test_small_steps_of_bfloat16_weights_add_up():
    """Below 1 the next bfloat16 is 1 - 2^-8 = 0.99609. Steps of 1e-4 (AdamW's, for a constant gradient) reach it only
    because they are kept: after 19 of them 0.9981 still rounds to 1, after 20 of them 0.9980 does not."""
    weight = ones(BF16)
    optimizer = make([weight])
    for _ in range(19):
        push(optimizer, weight)
    assert weight.tolist() == [1.0] * 4
    push(optimizer, weight)
    assert weight.tolist() == [1 - 2**-8] * 4


def test_a_tiny_update_is_kept_exactly():
    """A step of 1e-6 times a gradient of 1e-6: AdamW divides the gradient's size out, so 1e-6 is left of 1."""
    weight = ones(BF16)
    optimizer = make([weight], lr=1e-6, grad_clip=10.0)
    push(optimizer, weight, gradient=1e-3)
    (master,) = optimizer.state_dict()["masters"]
    assert master.dtype == torch.float32
    assert master.tolist() == pytest.approx([1 - 1e-6] * 4, abs=1e-7)
    assert weight.tolist() == [1.0] * 4


def test_weights_follow_float32_training_to_the_last_bit_of_bfloat16():
    torch.manual_seed(0)
    start = torch.randn(64).to(BF16)
    coarse, fine = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    optimizers = [make([weight], lr=3e-3, weight_decay=0.1) for weight in (coarse, fine)]
    gradients = torch.randn(30, 64).to(BF16)
    for gradient in gradients:
        for weight, optimizer in zip((coarse, fine), optimizers, strict=True):
            weight.grad = gradient.float()
            optimizer.step()
    assert torch.equal(coarse, fine.to(BF16))
    assert torch.equal(optimizers[0].state_dict()["masters"][0], fine)


@pytest.mark.skipif(not hasattr(torch.ones(1), "grad_dtype"), reason="torch before 2.10 adds up in the weight's type")
def test_gradients_of_many_microbatches_add_up_in_float32():
    """1 and 200 times 1/1024: in bfloat16 each of them is lost beside 1."""
    weight = ones(BF16, n=1)
    optimizer = make([weight], grad_clip=10.0)
    for gradient in [1.0, *[2**-10] * 200]:
        (gradient * weight).sum().backward()
    norm, _ = optimizer.step()
    assert norm == pytest.approx(1 + 200 / 1024, abs=1e-6)


def test_float32_weights_have_no_copies():
    weight = ones(torch.float32)
    optimizer = make([weight])
    push(optimizer, weight)
    assert optimizer.state_dict()["masters"] == []
    assert weight.tolist() == pytest.approx([1 - 1e-4] * 4)


def test_resumed_bit_for_bit_from_a_file(tmp_path):
    """New copies made from the rounded weights would be up to 2^-9 off, and so would the next weights."""
    torch.manual_seed(0)
    gradients = torch.randn(12, 64)

    def train(optimizer, weight, some):
        for gradient in some:
            weight.grad = gradient.clone()
            optimizer.step()

    whole = torch.nn.Parameter(torch.randn(64).to(BF16))
    half = torch.nn.Parameter(whole.detach().clone())
    optimizer = make([whole], lr=1e-3)
    train(optimizer, whole, gradients)

    first = make([half], lr=1e-3)
    train(first, half, gradients[:6])
    write_state(tmp_path / "state.pt", first.state_dict())
    resumed = torch.nn.Parameter(half.detach().clone())
    second = make([resumed], lr=1e-3)
    second.load_state_dict(read_state(tmp_path / "state.pt"))
    train(second, resumed, gradients[6:])
    assert torch.equal(resumed, whole)
    assert torch.equal(second.state_dict()["masters"][0], optimizer.state_dict()["masters"][0])


def test_weights_that_were_loaded_or_trained_elsewhere_are_where_the_next_step_starts():
    weight = ones(BF16)
    optimizer = make([weight], lr=1e-6)
    push(optimizer, weight)
    with torch.no_grad():
        weight[0] = 3.0
    push(optimizer, weight)
    (master,) = optimizer.state_dict()["masters"]
    assert weight.tolist() == [3.0, 1.0, 1.0, 1.0]
    assert master.tolist() == pytest.approx([3 - 1e-6, *[1 - 2e-6] * 3], abs=3e-7)


def test_a_checkpoint_of_another_type_says_so():
    coarse, fine = make([ones(BF16)]), make([ones(torch.float32)])
    with pytest.raises(CheckpointError, match=r"holds 0 float32 copies of weights, expected 1.*model.dtype"):
        coarse.load_state_dict(fine.state_dict())
    with pytest.raises(CheckpointError, match="holds 1 float32 copies of weights, expected 0"):
        fine.load_state_dict(coarse.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_gradients_that_are_not_finite_move_nothing_and_are_dropped(dtype):
    weight = ones(dtype)
    optimizer = make([weight])
    norm, stepped = push(optimizer, weight, gradient=math.inf)
    assert (norm, stepped) == (math.inf, False)
    assert weight.grad is None
    assert weight.tolist() == [1.0] * 4
    assert push(optimizer, weight)[1]


def test_the_norm_is_clipped_before_the_step():
    """A gradient of 3, 4 has the norm 5; AdamW's first step has the size of the rate whatever is left of it."""
    for dtype in (torch.float32, BF16):
        weight = ones(dtype, n=2)
        optimizer = make([weight], lr=0.5, grad_clip=1.0)
        (weight.float() * torch.tensor([3.0, 4.0])).sum().backward()
        norm, _ = optimizer.step()
        assert norm == pytest.approx(5.0, rel=1e-3)
        moment = optimizer.state_dict()["adamw"]["state"][0]["exp_avg"]
        assert moment.tolist() == pytest.approx([0.1 * 0.6, 0.1 * 0.8], rel=1e-3)


def test_nothing_to_train_is_no_error():
    optimizer = make([])
    assert optimizer.step() == (0.0, True)
    optimizer.load_state_dict(optimizer.state_dict())
