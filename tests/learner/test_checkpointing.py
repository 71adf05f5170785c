"""Gradient checkpointing: the same numbers from less memory, and nobody else notices."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.config import ModelConfig
from agentrl.learner.model import ActorCritic

F64 = torch.float64
KINDS = [
    (None, "separate"),
    (None, "head"),
    ({"rank": 4}, "adapter"),
    ({"rank": 4}, "head"),
    ({"rank": 4, "layers": 1}, "adapter"),
]
kinds = pytest.mark.parametrize(
    ("lora", "critic"), KINDS, ids=["full-separate", "full-head", "lora-adapter", "lora-head", "lora-last-adapter"]
)


def build(kit, lora, critic, family="llama", **changes):
    config = ModelConfig.model_validate({"path": "none", "lora": lora, "critic": critic, **changes})
    model = ActorCritic(kit.model(dtype=F64, family=family), config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name or name.startswith("critic.head"):
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator, dtype=F64).to(weight.dtype))
    return model


@kinds
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gradients_are_the_same_and_reach_every_trained_weight(kit, lora, critic, family):
    """Backward comes after the switch back to the policy's adapter: the second pass must find its own again."""
    micro = kit.micro(kit.batch())
    found = []
    for checkpointing in (False, True):
        model = build(kit, lora, critic, family, gradient_checkpointing=checkpointing)
        scores, values = model.score(micro, 0.8)
        (scores.logprob_N.sum() + values.value_N.square().sum()).backward()
        weights = model.policy_parameters() + model.critic_parameters()
        found.append([weight.grad for weight in weights])
        assert all(weight.requires_grad for weight in weights)
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)
        assert bool(again.any())


def test_each_layer_runs_again_in_the_backward_pass_and_keeps_less(kit):
    micro = kit.micro(kit.batch())
    runs, kept = {}, {}
    for checkpointing in (False, True):
        model = build(kit, None, "head", gradient_checkpointing=checkpointing)
        count, sizes = [], {}
        hook = model.policy.model.layers[0].input_layernorm.register_forward_hook(
            lambda *_, count=count: count.append(1)
        )

        def note(tensor, sizes=sizes):
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            states = model.policy_logprobs(micro, 1.0).logprob_N
        assert len(count) == 1
        states.sum().backward()
        hook.remove()
        runs[checkpointing], kept[checkpointing] = len(count), sum(sizes.values())
        with torch.no_grad():
            model.policy_logprobs(micro, 1.0)
    assert runs == {False: 1, True: 2}
    assert kept[True] < 0.5 * kept[False]


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_whoever_samples_from_the_same_model_is_not_disturbed(kit, lora):
    model = build(kit, lora, "head", gradient_checkpointing=True)
    micro, prompt = kit.micro(kit.batch()), torch.tensor([[1, 2, 3]])

    def sample():
        return model.policy.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=99, pad_token_id=0)

    before = sample()
    scores, _ = model.score(micro, 1.0)
    assert torch.equal(sample(), before)
    out = model.policy(prompt, use_cache=True)
    assert out.past_key_values.get_seq_length() == 3
    scores.logprob_N.sum().backward()
    assert torch.equal(sample(), before)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module.training for module in model.modules())


def test_an_error_in_a_forward_pass_leaves_the_layers_as_they_were(kit):
    from dataclasses import replace

    model = build(kit, None, "head", gradient_checkpointing=True)
    micro = kit.micro(kit.batch())
    with pytest.raises(IndexError):
        model.score(replace(micro, token_ids_BT=micro.token_ids_BT + 999), 1.0)
    assert not any("forward" in vars(module) for module in model.modules())


def test_without_gradients_nothing_is_run_twice(kit):
    model = build(kit, None, "head", gradient_checkpointing=True)
    seen = []
    layer = model.policy.model.layers[0]
    hook = layer.register_forward_hook(lambda *_: seen.append("forward" in vars(layer)))
    with torch.no_grad():
        model.policy_logprobs(kit.micro(kit.batch()), 1.0)
    model.values(kit.micro(kit.batch()))
    hook.remove()
    assert seen == [False, False]


def test_dropout_stays_off(kit):
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    policy = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=0.5)).eval()
    config = ModelConfig.model_validate({"path": "none", "critic": "head", "gradient_checkpointing": True})
    model = ActorCritic(policy, config)
    micro = kit.micro(kit.batch())
    one, other = (model.policy_logprobs(micro, 1.0).logprob_N for _ in range(2))
    assert torch.equal(one, other)
