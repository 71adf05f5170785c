"""The actor-critic: what is scored, what gets a gradient, what stays frozen, what survives a save."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from agentrl.errors import CheckpointError, ConfigError
from agentrl.learner.model import ActorCritic

F64 = torch.float64
LAST = {"rank": 4, "layers": 1}
KINDS = [(None, "separate"), (None, "head"), ({"rank": 4}, "adapter"), ({"rank": 4}, "head"), (LAST, "adapter")]
kinds = pytest.mark.parametrize(
    ("lora", "critic"), KINDS, ids=["full-separate", "full-head", "lora-adapter", "lora-head", "lora-last-adapter"]
)


def build(kit, lora, critic, *, reference=False, dtype=F64, disturb=True, **model):
    """An actor-critic whose adapters and value head are not at their zeros."""
    built = kit.actor_critic(kit.config(lora=lora, critic=critic), dtype=dtype, **model)
    generator = torch.Generator().manual_seed(7)
    if disturb:
        with torch.no_grad():
            for name, weight in built.named_parameters():
                if "lora_B" in name or name.startswith("critic.head"):
                    noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                    weight.add_(0.3 * noise.to(weight.dtype))
    if reference:
        built.begin_rl(reference=True)
    return built


def by_hand(model, trajectory, temperature=1.0):
    """Logprobs, values and the final value of one trajectory, from the whole model's own forward pass."""
    packed = trajectory.pack()
    ids = torch.from_numpy(packed.token_ids_T)[None]
    with torch.no_grad():
        out = model.policy(ids, output_hidden_states=True, use_cache=False)
    log_pi = (out.logits[0] / temperature).log_softmax(-1)
    where = [t for t, action in enumerate(packed.is_action_T) if action]
    return torch.stack([log_pi[t - 1, ids[0, t]] for t in where]), out.hidden_states[-1][0], where


@kinds
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logprobs_are_those_of_the_whole_model_one_position_before(kit, lora, critic, family):
    model = build(kit, lora, critic, family=family, tied=family == "llama")
    for trajectory in kit.batch():
        for temperature in (1.0, 0.7):
            expected, _, _ = by_hand(model, trajectory, temperature)
            found = model.policy_logprobs(kit.micro([trajectory]), temperature)
            assert torch.allclose(found.logprob_N, expected, atol=1e-12)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_values_are_read_from_the_state_before_the_token_and_from_the_last_state(kit, lora):
    model = build(kit, lora, "head")
    for trajectory in kit.batch():
        _, hidden, where = by_hand(model, trajectory)
        value_T = model.critic["head"](hidden).squeeze(-1)
        found = model.values(kit.micro([trajectory]))
        assert torch.allclose(found.value_N, value_T[[t - 1 for t in where]], atol=1e-12)
        assert torch.allclose(found.final_B, value_T[-1:], atol=1e-12)


@kinds
def test_padding_and_the_composition_of_a_microbatch_change_nothing(kit, lora, critic):
    model = build(kit, lora, critic)
    batch = kit.batch()
    alone = {}
    for trajectory in batch:
        scores, values = model.score(kit.micro([trajectory]), 1.0)
        alone[trajectory.id] = (scores.logprob_N, scores.entropy_N, values.value_N, values.final_B)
    micro = kit.micro(batch)
    wider = torch.nn.functional.pad(micro.token_ids_BT, (0, 5), value=9)
    width = micro.token_ids_BT.shape[1]
    padded = replace(
        micro,
        token_ids_BT=wider,
        position_ids=torch.arange(width + 5)[None],
        state_N=micro.state_N + micro.state_N // width * 5,
        final_B=micro.final_B + micro.final_B // width * 5,
    )
    for whole in (micro, padded):
        scores, values = model.score(whole, 1.0)
        rows = {int(row): batch[int(row)].id for row in whole.row_B}
        starts = torch.tensor([t.n_sampled for t in batch]).cumsum(0) - torch.tensor([t.n_sampled for t in batch])
        for line, (row, name) in enumerate(rows.items()):
            mine = (whole.index_N >= starts[row]) & (whole.index_N < starts[row] + batch[row].n_sampled)
            for found, expected in zip(
                (scores.logprob_N[mine], scores.entropy_N[mine], values.value_N[mine], values.final_B[line : line + 1]),
                alone[name],
                strict=True,
            ):
                assert torch.allclose(found, expected, atol=1e-11)


def test_right_padding_needs_no_attention_mask(kit):
    model = build(kit, None, "head")
    batch = kit.batch()
    micro = kit.micro(batch)
    lengths = [batch[int(row)].n_tokens for row in micro.row_B]
    mask = torch.tensor([[t < n for t in range(micro.token_ids_BT.shape[1])] for n in lengths]).long()
    with_mask = model.policy.model(micro.token_ids_BT, attention_mask=mask, use_cache=False).last_hidden_state
    without = model.policy.model(micro.token_ids_BT, attention_mask=None, use_cache=False).last_hidden_state
    real = mask.bool()
    assert torch.allclose(with_mask[real], without[real], atol=1e-12)


@kinds
def test_gradients_of_policy_and_critic_never_mix(kit, lora, critic):
    model = build(kit, lora, critic)
    micro = kit.micro(kit.batch())
    policy, critics = model.policy_parameters(), model.critic_parameters()
    assert not {id(p) for p in policy} & {id(p) for p in critics}
    trained = {id(p) for p in policy + critics}

    model.policy_logprobs(micro, 1.0).logprob_N.sum().backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in policy)
    assert all(p.grad is None or not p.grad.any() for p in critics)
    model.zero_grad()

    model.values(micro).value_N.sum().backward()
    assert all(p.grad is not None for p in critics)
    assert all(p.grad is None or not p.grad.any() for p in policy)
    model.zero_grad()

    scores, values = model.score(micro, 1.0)
    values.value_N.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy)
    assert all(p.grad is None for p in model.parameters() if id(p) not in trained)
    assert scores.logprob_N.requires_grad


@kinds
def test_score_is_logprobs_and_values_in_one(kit, lora, critic):
    model = build(kit, lora, critic)
    micro = kit.micro(kit.batch())
    scores, values = model.score(micro, 0.8)
    assert torch.equal(scores.logprob_N, model.policy_logprobs(micro, 0.8).logprob_N)
    assert torch.equal(values.value_N, model.values(micro).value_N)


@kinds
def test_a_fresh_critic_says_zero_and_then_its_bias(kit, lora, critic):
    model = build(kit, lora, critic, disturb=False, dtype=torch.float32)
    micro = kit.micro(kit.batch())
    assert not model.values(micro).value_N.any()
    model.set_value_bias(0.25)
    assert torch.equal(model.values(micro).value_N, torch.full((micro.target_N.numel(),), 0.25))
    assert model.critic["head"].weight.dtype == torch.float32


def test_fresh_adapters_are_the_base_and_the_reference_stays_it_bit_for_bit(kit):
    base = kit.model(dtype=torch.float32)
    micro = kit.micro(kit.batch())
    plain = ActorCritic(kit.model(dtype=torch.float32), kit.config(critic="head").model)
    expected = plain.policy_logprobs(micro, 1.0).logprob_N.detach()
    model = ActorCritic(base, kit.config(lora={"rank": 4}, critic="adapter").model)
    model.begin_rl(reference=True)
    assert torch.equal(model.policy_logprobs(micro, 1.0).logprob_N, expected)
    with torch.no_grad():
        for weight in model.policy_parameters() + model.critic_parameters():
            weight.add_(0.1)
    assert not torch.equal(model.policy_logprobs(micro, 1.0).logprob_N, expected)
    assert torch.equal(model.reference_logprobs(micro, 1.0), expected)


@kinds
def test_the_reference_is_the_policy_as_it_was_when_rl_began(kit, lora, critic):
    """With LoRA too, where SFT has already moved the adapter: then the base is not what KL should refer to."""
    model = build(kit, lora, critic, reference=True)
    micro = kit.micro(kit.batch())
    before = model.policy_logprobs(micro, 1.0).logprob_N.detach()
    assert torch.equal(model.reference_logprobs(micro, 1.0), before)
    with torch.no_grad():
        for weight in model.policy_parameters():
            weight.add_(0.05)
    assert torch.equal(model.reference_logprobs(micro, 1.0), before)
    assert not torch.equal(model.policy_logprobs(micro, 1.0).logprob_N, before)
    reference = {id(p) for n, p in model.named_parameters() if ".reference." in n or n.startswith("_reference")}
    assert not any(id(p) in reference for p in model.policy_parameters() + model.critic_parameters())


def test_without_a_reference_asking_for_it_says_what_to_do(kit):
    model = build(kit, None, "head")
    with pytest.raises(ConfigError, match=r"begin_rl\(reference=True\)"):
        model.reference_logprobs(kit.micro(kit.batch()), 1.0)


def active(model):
    return {module.active_adapters[0] for module in model.policy.modules() if hasattr(module, "lora_A")}


def test_the_policy_adapter_is_active_again_whatever_happens(kit):
    model = build(kit, {"rank": 4}, "adapter", reference=True)
    micro = kit.micro(kit.batch())
    for ask in (model.values, lambda m: model.reference_logprobs(m, 1.0)):
        ask(micro)
        assert active(model) == {"policy"}
        with pytest.raises(IndexError):
            ask(replace(micro, token_ids_BT=micro.token_ids_BT + 999))
        assert active(model) == {"policy"}
    assert all(p.requires_grad for p in model.policy_parameters() + model.critic_parameters())


@kinds
def test_the_critic_starts_from_the_policy_as_sft_left_it(kit, lora, critic):
    model = build(kit, lora, critic)
    micro = kit.micro(kit.batch())
    with torch.no_grad():
        for weight in model.policy_parameters():
            weight.add_(0.05)
    model.begin_rl(reference=False)
    _, hidden, where = by_hand(model, kit.batch()[1])
    value_T = model.critic["head"](hidden).squeeze(-1)
    found = model.values(kit.micro([kit.batch()[1]])).value_N
    assert torch.allclose(found, value_T[[t - 1 for t in where]], atol=1e-12)
    assert model.values(micro).value_N.isfinite().all()


def test_adapters_depend_on_the_seed_alone_and_leave_the_global_generator_untouched(kit):
    config = kit.config(lora={"rank": 4}, critic="adapter").model
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    one = ActorCritic(kit.model(), config, seed=5)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(99)
    two, other = ActorCritic(kit.model(), config, seed=5), ActorCritic(kit.model(), config, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(one.policy_parameters(), two.policy_parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.policy_parameters(), other.policy_parameters(), strict=True))


def test_dropout_stays_off(kit):
    policy = kit.model()
    policy.config.attention_dropout = 0.5
    for layer in policy.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model = ActorCritic(policy, kit.config().model)
    model.train()
    micro = kit.micro(kit.batch())
    assert not any(module.training for module in model.modules())
    assert torch.equal(model.policy_logprobs(micro, 1.0).logprob_N, model.policy_logprobs(micro, 1.0).logprob_N)


def test_a_model_that_caps_its_logits_is_refused(kit):
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "final_logit_softcapping": 0.05}
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM does not compute its logits"):
        ActorCritic(Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)), kit.config().model)


@kinds
@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load_bit_for_bit(kit, lora, critic, tied, tmp_path):
    model = build(kit, lora, critic, reference=True, dtype=torch.float32, tied=tied)
    micro = kit.micro(kit.batch())
    with torch.no_grad():
        for weight in model.policy_parameters() + model.critic_parameters():
            weight.add_(0.01)
    model.save(tmp_path)
    fresh = build(kit, lora, critic, dtype=torch.float32, disturb=False, tied=tied, seed=0)
    fresh.load(tmp_path)
    for a, b in zip(
        model.policy_parameters() + model.critic_parameters(),
        fresh.policy_parameters() + fresh.critic_parameters(),
        strict=True,
    ):
        assert torch.equal(a, b)
    assert torch.equal(model.score(micro, 1.0)[0].logprob_N, fresh.score(micro, 1.0)[0].logprob_N)
    assert torch.equal(model.values(micro).value_N, fresh.values(micro).value_N)
    assert torch.equal(model.reference_logprobs(micro, 1.0), fresh.reference_logprobs(micro, 1.0))
    names = {path.name for path in tmp_path.iterdir()}
    assert {"trainer"} | ({"model.safetensors", "config.json"} if lora is None else {"policy"}) <= names


def test_a_saved_model_is_an_ordinary_hugging_face_folder(kit, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    micro = kit.micro(kit.batch())
    full = build(kit, None, "head", dtype=torch.float32)
    full.save(tmp_path / "full")
    loaded = ActorCritic(AutoModelForCausalLM.from_pretrained(tmp_path / "full").eval(), full.config)
    assert torch.equal(loaded.policy_logprobs(micro, 1.0).logprob_N, full.policy_logprobs(micro, 1.0).logprob_N)
    lora = build(kit, {"rank": 4}, "adapter", dtype=torch.float32)
    lora.save(tmp_path / "lora")
    adapted = PeftModel.from_pretrained(kit.model(), tmp_path / "lora" / "policy").eval()
    with torch.no_grad():
        expected = lora.policy(micro.token_ids_BT, use_cache=False).logits
        assert torch.equal(adapted(micro.token_ids_BT, use_cache=False).logits, expected)


def test_loading_what_does_not_fit_says_so(kit, tmp_path):
    build(kit, None, "separate", dtype=torch.float32).save(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"does not fit this model.*critic='head'"):
        build(kit, None, "head", dtype=torch.float32).load(tmp_path / "a")
    with pytest.raises(CheckpointError, match="does not fit this model"):
        build(kit, {"rank": 4}, "adapter", dtype=torch.float32).load(tmp_path / "a")
    build(kit, {"rank": 4}, "adapter", dtype=torch.float32).save(tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"does not fit this model.*rank=8"):
        build(kit, {"rank": 8}, "adapter", dtype=torch.float32).load(tmp_path / "b")
    with pytest.raises(CheckpointError, match="does not fit this model"):
        build(kit, None, "head", dtype=torch.float32).load(tmp_path / "nowhere")
