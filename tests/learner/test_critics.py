"""Kinds of critic and of adapters: gradients into the trunk, no critic, the last layers alone."""

from __future__ import annotations

import pytest
import torch

from agentrl.config import ModelConfig
from agentrl.errors import CheckpointError, ConfigError
from agentrl.learner.model import ActorCritic

F64 = torch.float64
LAST = {"rank": 4, "layers": 1}


def build(kit, dtype=F64, seed=0, **model):
    """An actor-critic whose adapters and value head are not at their zeros."""
    config = ModelConfig.model_validate({"path": "none", **model})
    built = ActorCritic(kit.model(seed, dtype=dtype), config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            if "lora_B" in name or name.startswith("critic.head"):
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator, dtype=F64).to(weight.dtype))
    return built


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_the_head_s_gradient_reaches_the_policy_only_where_asked(kit, lora):
    micro = kit.micro(kit.batch())
    found = {}
    for asked in (False, True):
        model = build(kit, lora=lora, critic="head", critic_gradient=asked)
        _, values = model.score(micro, 1.0)
        values.value_N.square().sum().backward()
        assert all(bool(weight.grad.any()) for weight in model.critic_parameters())
        reached = [w.grad for w in model.policy_parameters() if w.grad is not None and bool(w.grad.any())]
        assert bool(reached) == asked
        found[asked] = [w.grad for w in model.policy_parameters()]
        assert model.policy_parameters()[0].requires_grad
        model.zero_grad()
        # Warm-up fits the critic alone, so `values` never reaches the policy.
        model.values(micro).value_N.sum().backward()
        assert all(w.grad is None or not w.grad.any() for w in model.policy_parameters())
    plain = build(kit, lora=lora, critic="head")
    hidden = plain.policy.base_model(micro.token_ids_BT, use_cache=False).last_hidden_state.flatten(0, 1)
    plain.critic["head"](hidden[micro.state_N]).square().sum().backward()
    for ours, expected in zip(found[True], [w.grad for w in plain.policy_parameters()], strict=True):
        assert (ours is None) == (expected is None)
        assert expected is None or torch.allclose(ours, expected, atol=1e-9)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_without_a_critic_there_are_logprobs_and_no_values(kit, lora, tmp_path):
    model = build(kit, lora=lora, critic="none", dtype=torch.float32)
    micro = kit.micro(kit.batch())
    assert not model.has_critic
    assert not model.shares_trunk
    assert model.critic_parameters() == []
    model.begin_rl(reference=True)
    logprob_N = model.policy_logprobs(micro, 1.0).logprob_N
    assert torch.equal(model.reference_logprobs(micro, 1.0), logprob_N)
    logprob_N.sum().backward()
    for ask in (lambda: model.values(micro), lambda: model.score(micro, 1.0), lambda: model.set_value_bias(0.5)):
        with pytest.raises(ConfigError, match=r"model.critic is 'none', so there are no values: expected 'head'"):
            ask()
    model.save(tmp_path)
    assert not (tmp_path / "trainer" / "critic.safetensors").exists()
    other = build(kit, lora=lora, critic="none", dtype=torch.float32, seed=0 if lora else 3)
    with torch.no_grad():
        other.policy_parameters()[0].add_(1.0)
    other.load(tmp_path)
    assert torch.equal(other.policy_logprobs(micro, 1.0).logprob_N, logprob_N)
    assert build(kit, lora=lora, critic="head").has_critic


def test_adapters_of_the_last_layer_alone(kit):
    """Only they are trained, and below them nothing is walked through backwards."""
    model = build(kit, lora=LAST, critic="adapter")
    trained = {name for name, weight in model.policy.named_parameters() if weight.requires_grad}
    assert trained
    assert all(".layers.1." in name and "lora_" in name for name in trained)
    both = model.policy_parameters() + model.critic_parameters()
    assert len([w for w in both if w.dim() == 2]) == 7 * 2 * 2 + 1  # 7 linears, A and B, two adapters; the value head
    needs = []
    hooks = [
        layer.register_forward_hook(lambda *args: needs.append(args[2].requires_grad))
        for layer in model.policy.base_model.layers
    ]
    micro = kit.micro(kit.batch())
    scores, values = model.score(micro, 1.0)
    for hook in hooks:
        hook.remove()
    assert needs == [False, True] * 2
    (scores.logprob_N.sum() + values.value_N.sum()).backward()
    assert all(bool(weight.grad.any()) for weight in both)
    frozen = [weight for weight in model.parameters() if not any(weight is other for other in both)]
    assert all(weight.grad is None for weight in frozen)


def test_adapters_of_the_last_layer_are_saved_and_do_not_load_into_others(kit, tmp_path):
    from peft import PeftModel

    model = build(kit, lora=LAST, critic="adapter", dtype=torch.float32)
    model.save(tmp_path)
    micro = kit.micro(kit.batch())
    with torch.no_grad():
        expected = model.policy(micro.token_ids_BT, use_cache=False).logits
        adapted = PeftModel.from_pretrained(kit.model(), tmp_path / "policy").eval()
        assert torch.equal(adapted(micro.token_ids_BT, use_cache=False).logits, expected)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        build(kit, lora={"rank": 4}, critic="adapter", dtype=torch.float32).load(tmp_path)


def test_more_layers_than_the_model_has(kit):
    with pytest.raises(ConfigError, match=r"lora.layers is 3, and Llama.* has 2 decoder layers: expected 1 to 2"):
        build(kit, lora={"rank": 4, "layers": 3}, critic="head")
    assert build(kit, lora={"rank": 4, "layers": 2}, critic="head").policy_parameters()
