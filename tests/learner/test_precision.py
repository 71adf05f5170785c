"""bfloat16 weights: what stays float32, and how far logprobs are from float32's."""

from __future__ import annotations

import pytest
import torch

from agentrl.config import ModelConfig
from agentrl.learner.logits import logprob_and_entropy
from agentrl.learner.model import ActorCritic
from agentrl.learner.optim import Optimizer, linear_warmup

BF16 = torch.bfloat16


def build(kit, dtype, family="llama", **model):
    return ActorCritic(kit.model(dtype=dtype, family=family), ModelConfig.model_validate({"path": "none", **model}))


def test_logits_are_multiplied_in_float32():
    """On one set of bfloat16 states and weights a bfloat16 product is 8e-3 off on average, and ours is not."""
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(256, 4096, bias=False, dtype=BF16)
    with torch.no_grad():
        head.weight.copy_(torch.randn(4096, 256, generator=generator) * 0.1)
    states_NH = torch.randn(32, 256, generator=generator).to(BF16)
    target_N = torch.randint(0, 4096, (32,), generator=generator)
    exact_N = (states_NH.double() @ head.weight.double().T).log_softmax(-1).gather(-1, target_N[:, None])[:, 0]
    ours_N, entropy_N = logprob_and_entropy(states_NH, target_N, head, temperature=1.0, chunk=8)
    coarse_N = head(states_NH).float().log_softmax(-1).gather(-1, target_N[:, None])[:, 0]
    assert ours_N.dtype == entropy_N.dtype == torch.float32
    assert (ours_N - exact_N).abs().max() < 1e-5
    assert (coarse_N - exact_N).abs().mean() > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logprobs_of_a_bfloat16_model_agree_with_float32(kit, family):
    """Of the same weights, rounded once: the trunk's rounding alone is left."""
    coarse = build(kit, BF16, family, critic="head")
    fine = build(kit, torch.float32, family, critic="head")
    fine.policy.load_state_dict({name: weight.float() for name, weight in coarse.policy.state_dict().items()})
    micro = kit.micro(kit.batch())
    with torch.no_grad():
        gap_N = coarse.policy_logprobs(micro, 1.0).logprob_N - fine.policy_logprobs(micro, 1.0).logprob_N
    assert 0 < gap_N.abs().mean() < 2e-2
    assert gap_N.abs().max() < 0.25  # these weights are large, 0.3 a piece, and so are the logits
    assert abs(gap_N.mean()) < 5e-3


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_heads_scores_and_adapters_are_float32(kit, lora):
    model = build(kit, BF16, lora=lora, critic="adapter" if lora else "separate")
    scores, values = model.score(kit.micro(kit.batch()), 1.0)
    assert {t.dtype for t in (*scores, *values)} == {torch.float32}
    assert {w.dtype for w in model.critic["head"].parameters()} == {torch.float32}
    if lora:
        both = model.policy_parameters() + model.critic_parameters()
        assert {weight.dtype for weight in both} == {torch.float32}
        assert model.dtype == BF16
        (scores.logprob_N.sum() + values.value_N.sum()).backward()
        assert {weight.grad.dtype for weight in model.policy_parameters()} == {torch.float32}


def test_adapters_of_a_bfloat16_model_come_back_bit_for_bit(kit, tmp_path):
    model = build(kit, BF16, lora={"rank": 4}, critic="adapter")
    with torch.no_grad():
        for weight in model.policy_parameters() + model.critic_parameters():
            weight.add_(1e-4)  # not a bfloat16 number
    model.begin_rl(reference=True)
    model.save(tmp_path)
    other = build(kit, BF16, lora={"rank": 4}, critic="adapter")
    other.load(tmp_path)
    micro = kit.micro(kit.batch())
    for one, two in zip(
        model.policy_parameters() + model.critic_parameters(),
        other.policy_parameters() + other.critic_parameters(),
        strict=True,
    ):
        assert one.dtype == two.dtype == torch.float32
        assert torch.equal(one, two)
    assert torch.equal(model.reference_logprobs(micro, 1.0), other.reference_logprobs(micro, 1.0))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_of_a_bfloat16_model_moves_it_as_one_of_float32(kit, checkpointing):
    """Ten steps of 1e-4: their sum arrives in the weights, though most single steps are below bfloat16's spacing."""
    start = build(kit, BF16, critic="head").policy.state_dict()
    moved = {}
    for dtype in (BF16, torch.float32):
        model = build(kit, dtype, critic="head", gradient_checkpointing=checkpointing)
        model.policy.load_state_dict({name: weight.to(dtype) for name, weight in start.items()})
        optimizer = Optimizer("policy", model.policy_parameters(), kit.config().ppo.policy, linear_warmup(0))
        micro = kit.micro(kit.batch())
        for _ in range(10):
            (-model.policy_logprobs(micro, 1.0).logprob_N.mean()).backward()
            optimizer.step()
        masters = optimizer.state_dict()["masters"] or [w.detach() for w in model.policy_parameters()]
        before = [start[name].float() for name, _ in model.policy.named_parameters()]
        moved[dtype] = torch.cat([(m - b).flatten() for m, b in zip(masters, before, strict=True)])
    assert torch.nn.functional.cosine_similarity(moved[BF16], moved[torch.float32], dim=0) > 0.9
