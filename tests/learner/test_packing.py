"""Several episodes in one line: every number as if each were alone, and models that mix them are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

from agentrl.errors import ConfigError
from agentrl.learner.batch import make_microbatches, read_rollout
from agentrl.learner.model import ActorCritic
from agentrl.learner.packing import fill_lines, group_lines

CPU = torch.device("cpu")
F64 = torch.float64
kinds = pytest.mark.parametrize(
    ("lora", "critic", "family"),
    [(None, "separate", "llama"), (None, "head", "qwen2"), ({"rank": 4}, "adapter", "qwen2")],
    ids=["full-separate", "full-head", "lora-adapter"],
)


def build(kit, lora, critic, family, **changes):
    """An actor-critic in float64 whose adapters and value head are not at their zeros."""
    model = kit.actor_critic(kit.config(lora=lora, critic=critic, **changes), dtype=F64, family=family)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name or name.startswith("critic.head"):
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator, dtype=F64).to(weight.dtype))
    return model


def read(trajectories):
    return read_rollout(trajectories, context=96, vocab_size=24)


def test_first_fit_decreasing_by_hand():
    """8 fills a line; 5 and 3 another; 4, 2 and 2 the third."""
    assert fill_lines([5, 4, 3, 2, 2, 8], 8) == [[5], [0, 2], [1, 3, 4]]
    assert fill_lines([9, 4, 4, 1], 8) == [[0], [1, 2], [3]]
    assert fill_lines([3, 1, 2], 100) == [[0], [2, 1]]  # no longer than the longest episode
    assert fill_lines([]) == []


@given(lengths=st.lists(st.integers(1, 120), max_size=60), line=st.integers(1, 100))
@settings(max_examples=60, deadline=None)
def test_lines_hold_each_episode_once_and_no_two_of_them_fit_into_one(lengths, line):
    lines = fill_lines(lengths, line)
    assert sorted(index for indices in lines for index in indices) == list(range(len(lengths)))
    tokens = [sum(lengths[index] for index in indices) for indices in lines]
    capacity = min(line, max(lengths, default=0))
    assert all(used <= capacity or len(indices) == 1 for used, indices in zip(tokens, lines, strict=True))
    assert len(tokens) < 2 or sum(sorted(tokens)[:2]) > capacity


def test_lines_are_grouped_longest_first_within_the_budget():
    assert group_lines([3, 10, 9, 2, 30], 20) == [[4], [1, 2], [0, 3]]


def test_a_packed_line_by_hand(kit):
    """Rows of 6, 3 and 2 tokens in lines of 6: 6; 3 and 2 and one place left. Places start again with each of them."""
    batch = [kit.trajectory([(a, b, 0.0)], seed=i) for i, (a, b) in enumerate([(2, 1), (4, 2), (1, 1)])]
    (micro,) = make_microbatches(read(batch), range(3), 12, CPU, packing=True)
    assert micro.row_B.tolist() == [1, 0, 2]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 0]]
    assert micro.state_N.tolist() == [3, 4, 6 + 1, 6 + 3]
    assert micro.final_B.tolist() == [5, 6 + 2, 6 + 4]
    assert micro.index_N.tolist() == [1, 2, 0, 3]
    ids = [torch.from_numpy(batch[row].pack().token_ids_T) for row in (1, 0, 2)]
    assert torch.equal(micro.token_ids_BT.flatten()[:-1], torch.cat(ids))


def test_packing_leaves_less_padding_than_sorting(kit):
    """180 tokens: sorted in batches of at most 120 they take 2 x 60 and 3 x 40, packed 3 x 60."""
    batch = [kit.trajectory([(n - 2, 2, 0.0)], seed=n + i) for i, n in enumerate([60, 40, 40, 20, 20])]

    def tokens(packing):
        micros = make_microbatches(read(batch), range(5), 120, CPU, packing)
        return sum(micro.token_ids_BT.numel() for micro in micros)

    assert (tokens(packing=False), tokens(packing=True)) == (240, 180)


def scored(model, micros, n, b):
    """Every score of a batch in the rollout's order, and the gradients of a loss in which each of them counts."""
    found = torch.zeros(3, n, dtype=F64)
    final = torch.zeros(b, dtype=F64)
    weight_N = torch.linspace(-1, 1, n, dtype=F64)
    for micro in micros:
        scores, values = model.score(micro, 0.8, entropy_grad=True)
        parts = torch.stack([scores.logprob_N, scores.entropy_N, values.value_N])
        (parts * weight_N[micro.index_N]).sum().backward()
        found[:, micro.index_N] = parts.detach()
        final[micro.row_B] = values.final_B.detach()
    weights = model.policy_parameters() + model.critic_parameters()
    gradients = [torch.zeros(()) if weight.grad is None else weight.grad for weight in weights]
    model.zero_grad()
    return [found, final, *gradients]


@kinds
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_equals_separate(kit, lora, critic, family, attention):
    model = build(kit, lora, critic, family)
    model.policy.set_attn_implementation(attention)
    batch = kit.batch()
    rollout = read(batch)
    n, b = rollout.n_actions, len(batch)
    one_by_one = [make_microbatches(rollout, [row], 16, CPU)[0] for row in range(b)]
    separate = scored(model, one_by_one, n, b)
    # Eager attention computes its softmax in float32 whatever the model's type is.
    tolerance = 1e-9 if attention == "sdpa" else 1e-4
    for budget in (50, 100, 10**6):
        micros = make_microbatches(rollout, range(b), budget, CPU, packing=True)
        assert any(len(micro.row_B) > micro.token_ids_BT.shape[0] for micro in micros)
        for one, other in zip(scored(model, micros, n, b), separate, strict=True):
            assert torch.allclose(one, other, atol=tolerance, rtol=0)


@kinds
def test_the_order_of_rows_in_a_pack_is_irrelevant(kit, lora, critic, family):
    model = build(kit, lora, critic, family)
    batch = [kit.trajectory([(2 + k, 3, 0.0), (1, 4 - k, 0.0)], seed=k) for k in range(4)]  # all of 10 tokens
    rollout = read([*batch, kit.trajectory([(20, 20, 0.0)], seed=9)])
    results = []
    for order in ([4, 0, 1, 2, 3], [3, 1, 4, 2, 0]):
        (micro,) = make_microbatches(rollout, order, 200, CPU, packing=True)
        assert micro.token_ids_BT.shape == (2, 40)
        results.append(([int(row) for row in micro.row_B], scored(model, [micro], rollout.n_actions, 5)))
    assert results[0][0] != results[1][0]
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(one, other, atol=1e-9, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_mask_or_a_cache_or_running_places_would_let_rows_see_each_other(kit, family):
    """What the learner must not do: transformers tells packed rows apart without a mask and without a cache only."""
    model = build(kit, None, "head", family)
    rollout = read(kit.batch())
    (micro,) = make_microbatches(rollout, range(6), 10**6, CPU, packing=True)
    ids, places = micro.token_ids_BT, micro.position_ids
    ends = zip(micro.row_B.tolist(), micro.final_B.tolist(), strict=True)
    row, end = next((row, end) for row, end in ends if (end + 1 - rollout.rows[row].n_tokens) % ids.shape[1])
    alone = model.policy.model(rollout.rows[row].token_ids_T[None], use_cache=False).last_hidden_state[0, -1]

    def gap(**inputs):
        hidden = model.policy.model(ids, **{"position_ids": places, "use_cache": False, **inputs}).last_hidden_state
        return float((hidden.flatten(0, 1)[end] - alone).abs().max().detach())

    assert gap() < 1e-9
    assert gap(attention_mask=torch.ones_like(ids)) > 1e-3
    assert gap(use_cache=True) > 1e-3
    assert gap(position_ids=torch.arange(ids.shape[1])[None]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_models_that_keep_rows_apart_pass_the_trial(kit, family, dtype):
    ActorCritic(kit.model(family=family, dtype=dtype), kit.config().model, packing=True)


def unmasked(module, query, key, value, attention_mask, **kwargs):
    """An attention kernel of somebody's own that is causal and looks at no mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.transpose(1, 2), None


def bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=24, hidden_size=16, n_layer=2, n_head=2))


def coarse_bloom():
    """In bfloat16, where what leaks here is smaller than the type's own error, and still is not nothing."""
    return bloom().to(torch.bfloat16)


def mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=24, hidden_size=16, num_hidden_layers=2, state_size=4))


@pytest.mark.parametrize("make", [bloom, coarse_bloom, mamba], ids=["no places", "bfloat16", "no attention"])
def test_models_that_mix_the_rows_of_a_line_are_refused(kit, make):
    model = make().eval()
    with pytest.raises(ConfigError, match=r"ppo.packing: .*Model does not keep the episodes.*packing = false"):
        ActorCritic(model, kit.config(critic="head").model, packing=True)
    ActorCritic(model, kit.config(critic="head").model)


def test_an_attention_kernel_that_ignores_masks_is_refused(kit):
    AttentionInterface.register("unmasked_for_test", unmasked)
    model = kit.model()
    model.set_attn_implementation("unmasked_for_test")
    with pytest.raises(ConfigError, match="LlamaModel does not keep the episodes of a packed line apart"):
        ActorCritic(model, kit.config().model, packing=True)
