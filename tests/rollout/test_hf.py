"""HFPolicy: the same tokens with and without kept keys and values, alone or in company; logprobs that are right."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import rollout_parts as parts
import torch

from agentrl.errors import ConfigError, InvariantError, PolicyError
from agentrl.rollout import hf
from agentrl.rollout.codec import Codec
from agentrl.rollout.hf import HFPolicy
from agentrl.rollout.requests import GenerationRequest, draws
from agentrl.types import Sampling

TOKENIZER = parts.make_tokenizer()
N_VOCAB = len(TOKENIZER)
END, OTHER_END = TOKENIZER.convert_tokens_to_ids(["<|im_end|>", "<|other_end|>"])
CODEC = Codec(TOKENIZER)
SAMPLED, GREEDY = Sampling(max_tokens=16), Sampling(temperature=0.0, max_tokens=16)

torch.set_num_threads(1)


def double_llama(**changes):
    """In float64, so that a draw near the border between two tokens falls the same way however the sums are ordered."""
    return parts.tiny_llama(N_VOCAB, **({"end_id": END} | changes)).double()


@pytest.fixture(params=["llama", "qwen"])
def model(request):
    return double_llama() if request.param == "llama" else parts.tiny_qwen(N_VOCAB, end_id=END).double()


def tokens_of(generations):
    return [generation.token_ids for generation in generations]


def prompts_of(n: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, N_VOCAB - 4, size=int(length)).tolist() for length in rng.integers(1, 40, size=n)]


def ask(policy, prompts, sampling, turn=0, names=None):
    names = names or [f"e{k}" for k in range(len(prompts))]
    requests = [
        GenerationRequest(name, prompt, sampling, (7, name, turn)) for name, prompt in zip(names, prompts, strict=True)
    ]
    return policy.generate_batch(requests)


def by_full_forward(model, prompt, sampling, key):
    """The oracle: one whole forward pass a token, without any cache, in float64."""
    ids, logprobs = list(prompt), []
    noise = draws(key, sampling.max_tokens)
    for u in noise:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        logprob = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
        if sampling.temperature == 0.0:
            drawn = int(logits.argmax())
        else:
            drawn = int((logprob.exp().cumsum(0) <= u * logprob.exp().sum()).sum())
        ids.append(drawn)
        logprobs.append(float(logprob[drawn]))
        if drawn == END:
            break
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY, Sampling(temperature=0.7, max_tokens=9)])
def test_messages_and_logprobs_are_those_of_full_forward_passes(model, sampling):
    prompts = prompts_of(6)
    for k, found in enumerate(ask(HFPolicy(model, CODEC), prompts, sampling)):
        ids, logprobs = by_full_forward(model, prompts[k], sampling, (7, f"e{k}", 0))
        assert list(found.token_ids) == ids
        gaps = np.abs(np.subtract(found.logprobs, logprobs))
        assert gaps.mean() <= 1e-5
        assert found.finish_reason == ("stop" if ids[-1] == END else "length")


def test_float32_logprobs_are_within_1e_5_of_a_full_forward_pass():
    model = parts.tiny_llama(N_VOCAB, end_id=END, initializer_range=0.1)
    prompts = prompts_of(16, seed=4)
    gaps = []
    for prompt, found in zip(prompts, ask(HFPolicy(model, CODEC), prompts, SAMPLED), strict=True):
        ids = torch.tensor([prompt + list(found.token_ids)])
        with torch.no_grad():
            logprob_TV = model(ids).logits[0].log_softmax(-1)
        expected = logprob_TV[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        gaps += (expected - torch.tensor(found.logprobs)).abs().tolist()
    assert np.mean(gaps) <= 1e-5


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY])
def test_kept_keys_and_values_change_no_token_over_four_turns(model, sampling):
    kept = HFPolicy(model, CODEC)
    rng = np.random.default_rng(3)
    prompts = prompts_of(8, seed=1)
    for turn in range(4):
        with_cache = ask(kept, prompts, sampling, turn)
        without = ask(HFPolicy(model, CODEC), prompts, sampling, turn)
        assert tokens_of(with_cache) == tokens_of(without)
        for a, b in zip(with_cache, without, strict=True):
            assert np.abs(np.subtract(a.logprobs, b.logprobs)).max() < 1e-4
        seen = rng.integers(0, N_VOCAB - 4, size=(8, int(rng.integers(1, 12))))
        prompts = [p + list(g.token_ids) + s.tolist() for p, g, s in zip(prompts, with_cache, seen, strict=True)]


def test_a_draw_does_not_depend_on_the_company(model):
    prompts = prompts_of(12, seed=2)
    together = ask(HFPolicy(model, CODEC), prompts, SAMPLED)
    backwards = ask(HFPolicy(model, CODEC), prompts[::-1], SAMPLED, names=[f"e{k}" for k in range(12)][::-1])
    policy = HFPolicy(model, CODEC)
    alone = [ask(policy, [prompt], SAMPLED, names=[f"e{k}"])[0] for k, prompt in enumerate(prompts)]
    assert tokens_of(together) == tokens_of(alone) == tokens_of(backwards[::-1])


def test_rows_of_unlike_sampling_share_a_call():
    model = double_llama()
    policy = HFPolicy(model, CODEC)
    prompts = prompts_of(3)
    mixed = [SAMPLED, GREEDY, Sampling(max_tokens=3)]
    requests = [GenerationRequest(f"e{k}", prompts[k], mixed[k], (7, f"e{k}", 0)) for k in range(3)]
    found = policy.generate_batch(requests)
    alone = [ask(HFPolicy(model, CODEC), [prompts[k]], mixed[k], names=[f"e{k}"]) for k in range(3)]
    assert tokens_of(found) == [generation.token_ids for (generation,) in alone]
    assert policy.generate_batch([]) == []


def test_every_end_token_stops_and_is_part_of_the_message():
    model = double_llama(end_id=[END, OTHER_END])
    policy = HFPolicy(model, CODEC)
    assert policy.stop_ids == {END, OTHER_END}
    found = ask(policy, prompts_of(64), Sampling(max_tokens=200))
    ends = {g.token_ids[-1] for g in found if g.finish_reason == "stop"}
    assert ends == {END, OTHER_END}
    assert all(not {END, OTHER_END}.intersection(g.token_ids[:-1]) for g in found)


def test_a_small_budget_gives_the_same_messages_in_waves():
    model = double_llama()
    prompts = prompts_of(20)
    policy = HFPolicy(model, CODEC, kv_cache_mib=1)
    assert policy._slab.most_rows(64) == 4
    first = ask(policy, prompts, SAMPLED)
    assert tokens_of(first) == tokens_of(ask(HFPolicy(model, CODEC), prompts, SAMPLED))
    longer = [p + list(g.token_ids) + [1, 2] for p, g in zip(prompts, first, strict=True)]
    again = ask(policy, longer, SAMPLED, turn=1)
    fresh = ask(HFPolicy(model, CODEC), longer, SAMPLED, turn=1)
    assert tokens_of(again) == tokens_of(fresh)


def test_long_prompts_are_read_in_pieces(monkeypatch):
    model = double_llama()
    prompts = [p * 7 for p in prompts_of(5)]
    whole = ask(HFPolicy(model, CODEC), prompts, SAMPLED)
    monkeypatch.setattr(hf, "PREFILL_TOKENS", 13)
    assert tokens_of(ask(HFPolicy(model, CODEC), prompts, SAMPLED)) == tokens_of(whole)


def test_other_ids_than_the_kept_ones_are_noticed():
    model = double_llama()
    policy = HFPolicy(model, CODEC)
    ask(policy, [[1, 2, 3, 4, 5]], SAMPLED)
    changed = ask(policy, [[1, 2, 9, 4, 5, 6]], SAMPLED)
    assert tokens_of(changed) == tokens_of(ask(HFPolicy(model, CODEC), [[1, 2, 9, 4, 5, 6]], SAMPLED))


def test_new_weights_forget_the_old_keys_and_count_a_version():
    model = double_llama()
    policy = HFPolicy(model, CODEC, policy_version=4)
    prompts = prompts_of(3)
    assert {g.policy_version for g in ask(policy, prompts, SAMPLED)} == {4}
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    asyncio.run(policy.update())
    found = ask(policy, prompts, SAMPLED)
    assert {g.policy_version for g in found} == {5}
    assert found == ask(HFPolicy(model, CODEC, policy_version=5), prompts, SAMPLED)


def test_the_model_is_left_as_it_was_found():
    model = double_llama(attention_dropout=0.5).train()
    policy = HFPolicy(model, CODEC)
    attention = model.config._attn_implementation
    first, second = ask(policy, prompts_of(2), SAMPLED), ask(HFPolicy(model, CODEC), prompts_of(2), SAMPLED)
    assert first == second
    assert model.training
    assert model.config._attn_implementation == attention
    loss = model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
    loss.backward()


def test_adapters_are_sampled_with():
    import peft

    model = double_llama()
    plain = ask(HFPolicy(model, CODEC), prompts_of(4), GREEDY)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert ask(HFPolicy(adapted, CODEC), prompts_of(4), GREEDY) == plain
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    prompts = prompts_of(4)
    found = ask(HFPolicy(adapted, CODEC), prompts, GREEDY)
    assert found != plain
    assert list(found[0].token_ids) == by_full_forward(adapted, prompts[0], GREEDY, (0,))[0]


def test_bfloat16_logits_are_float32():
    model = parts.tiny_llama(N_VOCAB, end_id=END).to(torch.bfloat16)
    prompt = prompts_of(1)[0]
    found = ask(HFPolicy(model, CODEC), [prompt], SAMPLED)[0]
    ids = torch.tensor([prompt + list(found.token_ids)])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(hidden @ model.lm_head.weight.float().T, -1)
    expected = logprobs.gather(1, torch.tensor(found.token_ids)[:, None]).squeeze(1)
    assert (expected - torch.tensor(found.logprobs)).abs().mean() < 1e-2


def test_generate_goes_on_where_it_ended():
    model = double_llama()
    policy = HFPolicy(model, CODEC, seed=3)
    first = asyncio.run(policy.generate([1, 2, 3], SAMPLED))
    second = asyncio.run(policy.generate([1, 2, 3, *first.token_ids, 4], SAMPLED))
    other = HFPolicy(model, CODEC, seed=3)
    assert asyncio.run(other.generate([1, 2, 3], SAMPLED)) == first
    assert asyncio.run(other.generate([1, 2, 3, *first.token_ids, 4], SAMPLED)) == second
    assert asyncio.run(other.generate([1, 2, 3], SAMPLED)) != first


def test_weights_that_are_not_finite_stop_the_run_and_leave_nothing_behind():
    model = double_llama()
    policy = HFPolicy(model, CODEC)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(InvariantError, match=r"not finite.*lower learning rate"):
        ask(policy, prompts_of(3), SAMPLED)
    assert {slot.episode for slot in policy._slab.slots} == set()


def test_a_prompt_without_room_is_a_policy_error():
    policy = HFPolicy(double_llama(max_position_embeddings=64), CODEC)
    assert policy.max_context == 64
    assert len(ask(policy, [[1] * 62], Sampling(max_tokens=99, temperature=0.0))[0].token_ids) <= 2
    with pytest.raises(PolicyError, match=r"64 tokens cannot be continued.*1 to 63.*rollout.max_context"):
        ask(policy, [[1] * 64], SAMPLED)


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="304 tokens and the model embeds 290"):
        HFPolicy(parts.tiny_llama(290, end_id=END), CODEC)


def test_models_whose_attention_slides_are_used_inside_their_window():
    from transformers import MistralConfig, MistralForCausalLM

    settings = {"vocab_size": N_VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": END}
    model = MistralForCausalLM(MistralConfig(**settings, **heads, sliding_window=48)).eval()
    assert HFPolicy(model, CODEC).max_context == 48


def test_models_that_are_not_plain_decoders_are_refused():
    from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

    settings = {"vocab_size": N_VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "eos_token_id": END}
    with pytest.raises(ConfigError, match=r"softcap|plain decoder"):
        HFPolicy(Gemma2ForCausalLM(Gemma2Config(**settings, **heads, initializer_range=0.5)), CODEC)
    linear = {"layer_types": ["linear_attention"], "num_experts": 2, "num_experts_per_tok": 1}
    with pytest.raises(ConfigError, match=r"linear_attention.*OpenAI-compatible"):
        HFPolicy(Qwen3NextForCausalLM(Qwen3NextConfig(**settings, **heads, **linear)), CODEC)
