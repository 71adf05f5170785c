"""SFT: the masks and denominators of PPO, a deterministic order, a state that resumes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from agentrl.errors import ConfigError
from agentrl.learner.checkpoint import read_state, write_state
from agentrl.learner.model import ActorCritic
from agentrl.learner.optim import cosine, linear_warmup
from agentrl.learner.sft import SftTrainer
from agentrl.types import EndReason

F64 = torch.float64


def config(kit, **changes):
    sft = {"steps": 20, "batch_episodes": 4, "optim": {"lr": 5e-3, "warmup_steps": 2}}
    return kit.config(sft=sft | changes.pop("sft", {}), **changes)


@pytest.mark.parametrize(("lora", "critic"), [(None, "separate"), (None, "head"), ({"rank": 4}, "adapter")])
@pytest.mark.parametrize(("budget", "packing"), [(16, False), (10**6, False), (100, True)])
def test_one_step_equals_the_plain_likelihood_of_the_sampled_tokens(kit, lora, critic, budget, packing):
    ppo = {"microbatch_tokens": budget, "packing": packing, "logit_chunk": 9}
    chosen = config(kit, lora=lora, critic=critic, ppo=ppo)
    model, plain = (kit.actor_critic(chosen, dtype=F64) for _ in range(2))
    batch = kit.batch()
    metrics = SftTrainer(model, chosen).step(batch)

    total, n = torch.zeros((), dtype=F64), 0
    for trajectory in batch:
        packed = trajectory.pack()
        ids = torch.from_numpy(packed.token_ids_T)
        log_pi = plain.policy(ids[None], use_cache=False).logits[0].log_softmax(-1)
        for t in range(1, len(ids)):
            if packed.is_action_T[t]:
                total, n = total - log_pi[t - 1, ids[t]], n + 1
    adamw = torch.optim.AdamW(plain.policy_parameters(), lr=5e-3 / 3, betas=(0.9, 0.95), weight_decay=0.0)
    (total / n).backward()
    torch.nn.utils.clip_grad_norm_(plain.policy_parameters(), 1.0)
    adamw.step()
    assert metrics["loss/sft"] == pytest.approx(float(total.detach()) / n)
    assert metrics["sft/tokens"] == n
    assert metrics["sft/lr"] == pytest.approx(5e-3 / 3)
    for a, b in zip(model.policy_parameters(), plain.policy_parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-10)
    for a, b in zip(model.critic_parameters(), plain.critic_parameters(), strict=True):
        assert torch.equal(a, b)


def test_it_learns_the_demonstrations(kit):
    chosen = config(kit, sft={"steps": 60, "optim": {"lr": 1e-2}})
    model = kit.actor_critic(chosen)
    trainer = SftTrainer(model, chosen)
    demonstrations = [kit.trajectory([(2, 4, 0.0), (3, 2, 0.0)], seed=i) for i in range(4)]
    found = [trainer.step(trainer.next_batch(demonstrations))["loss/sft"] for _ in range(60)]
    assert found[0] > 2.5
    assert found[-1] < 0.2


def test_every_demonstration_once_an_epoch_in_an_order_of_the_seed(kit):
    demonstrations = [kit.trajectory([(2, 1, 0.0)], seed=i) for i in range(10)]

    def drawn(seed, n):
        trainer = SftTrainer(kit.actor_critic(config(kit, seed=seed)), config(kit, seed=seed))
        order = []
        for _ in range(n):
            batch = trainer.next_batch(demonstrations)
            trainer.step(batch)
            order += [trajectory.id for trajectory in batch]
        return order

    order = drawn(1, 5)
    assert sorted(order[:10]) == sorted(order[10:20]) == sorted(t.id for t in demonstrations)
    assert order[:10] != order[10:20]
    assert order == drawn(1, 5)
    assert order != drawn(2, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_bit_for_bit(kit, tmp_path, dtype):
    """In bfloat16 that needs the float32 copies of the weights, which the optimiser keeps."""
    chosen = config(kit)
    demonstrations = [kit.trajectory([(2, 3, 0.0)], seed=i) for i in range(7)]
    whole = kit.actor_critic(chosen, dtype=dtype)
    trainer = SftTrainer(whole, chosen)
    expected = [trainer.step(trainer.next_batch(demonstrations)) for _ in range(6)]

    model = kit.actor_critic(chosen, dtype=dtype)
    trainer = SftTrainer(model, chosen)
    for _ in range(3):
        trainer.step(trainer.next_batch(demonstrations))
    model.save(tmp_path)
    write_state(tmp_path / "sft.pt", trainer.state_dict())
    model = kit.actor_critic(chosen, seed=8, dtype=dtype)
    model.load(tmp_path)
    trainer = SftTrainer(model, chosen)
    trainer.load_state_dict(read_state(tmp_path / "sft.pt"))
    assert [trainer.step(trainer.next_batch(demonstrations)) for _ in range(3)] == expected[3:]
    assert all(torch.equal(a, b) for a, b in zip(model.policy_parameters(), whole.policy_parameters(), strict=True))


def test_bad_demonstrations(kit):
    chosen = config(kit)
    trainer = SftTrainer(kit.actor_critic(chosen), chosen)
    failed = replace(kit.trajectory([(2, 2, 0.0)], seed=1), end=EndReason.ENV_ERROR)
    assert trainer.step([failed]) == {"sft/tokens": 0.0}
    with pytest.raises(ConfigError, match="needs demonstrations"):
        trainer.next_batch([])
    with pytest.raises(ConfigError, match=r"\[sft\] section"):
        SftTrainer(kit.actor_critic(chosen), kit.config())


def test_packing_is_tried_before_the_first_step(kit):
    model = MambaForCausalLM(MambaConfig(vocab_size=24, hidden_size=16, num_hidden_layers=2, state_size=4)).eval()
    chosen = config(kit, critic="head", ppo={"packing": True})
    with pytest.raises(ConfigError, match="ppo.packing: MambaModel does not keep"):
        SftTrainer(ActorCritic(model, chosen.model), chosen)


def test_schedules():
    warm = linear_warmup(4)
    assert [warm(step) for step in (0, 1, 3, 4, 99)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert linear_warmup(0)(0) == 1.0
    fall = cosine(2, 12)
    assert [round(fall(step), 6) for step in (0, 1, 2, 7, 12, 50)] == [0.333333, 0.666667, 1.0, 0.55, 0.1, 0.1]
