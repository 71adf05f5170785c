"""The PPO loop's other modes: without a critic, with a KL in the loss or adapted, corrected engines, and the record."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from agentrl.errors import ConfigError, InvariantError
from agentrl.learner.checkpoint import read_state, write_state
from agentrl.learner.losses import entropy_loss, kl_k1, kl_loss, make_share, policy_loss, value_loss
from agentrl.learner.ppo import PPOLearner
from agentrl.learner.record import UpdateRecord
from agentrl.types import EndReason, Task

F64 = torch.float64
ESTIMATORS = ["boundary", "action", "turn", "grpo", "rloo", "reinforce_pp"]
FREE = {"grpo", "rloo", "reinforce_pp"}


def weights(model):
    return [weight.detach().clone() for weight in model.policy_parameters() + model.critic_parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def attempts(kit, seed=0, rewards=(0.0, 1.0, 0.5), tasks=2):
    """Episodes of unequal lengths, several at each task, all of them ended."""
    made = []
    for i in range(tasks * len(rewards)):
        turns = [(3, 1 + i, 0.0), (4, 2, rewards[i % len(rewards)])]
        trajectory = kit.trajectory(turns, seed=seed + i, end=EndReason.SUBMITTED)
        made.append(replace(trajectory, task=Task(f"g/{i // len(rewards)}", "toy", "")))
    return made


def start(kit, *, dtype=F64, reference=False, **changes):
    config = kit.config(**changes)
    model = kit.actor_critic(config, reference=reference, dtype=dtype)
    return model, PPOLearner(model, config)


def critic_of(estimator):
    return "none" if estimator in FREE else "head"


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_trains_and_says_nothing_of_what_it_lacks(kit, estimator):
    model, learner = start(kit, critic=critic_of(estimator), ppo={"advantage": {"estimator": estimator}})
    before = weights(model)
    metrics = learner.update(kit.relabel(model, attempts(kit)))
    assert metrics["ppo/steps"] == 2.0
    assert not same(before, weights(model))
    assert learner.has_critic is (estimator not in FREE)
    has_figures = any(name.startswith("critic/") or name == "loss/value" for name in metrics)
    assert has_figures is learner.has_critic
    assert metrics["ppo/kept_fraction"] == 1.0


def test_without_a_critic_warm_up_is_over_at_once(kit):
    model, learner = start(kit, critic="none", ppo={"advantage": {"estimator": "rloo"}})
    before, state = weights(model), learner.state_dict()
    metrics = learner.warmup(kit.relabel(model, attempts(kit)))
    assert metrics["critic/warm"] == 1.0
    assert metrics["ppo/episodes"] == 6.0
    assert same(before, weights(model))
    assert state["critic"] is None
    learner.load_state_dict(state)
    assert learner.update(kit.relabel(model, attempts(kit)))["ppo/steps"] == 2.0


@pytest.mark.parametrize("estimator", sorted(FREE))
def test_a_cut_episode_is_refused_without_a_critic(kit, estimator):
    model, learner = start(kit, critic="none", ppo={"advantage": {"estimator": estimator}})
    batch = attempts(kit)
    batch[1] = replace(batch[1], end=EndReason.CUT, trailing_ids=(1, 2))
    before = weights(model)
    with pytest.raises(InvariantError, match=r"were cut \(e1\)"):
        learner.update(kit.relabel(model, batch))
    assert same(before, weights(model))


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_groups_of_equal_returns_move_nothing_not_even_by_momentum(kit, estimator):
    """The first update builds up momentum; the second one holds no evidence."""
    ppo = {"advantage": {"estimator": estimator}, "minibatches": 1}
    model, learner = start(kit, critic="none", ppo=ppo)
    learner.update(kit.relabel(model, attempts(kit)))
    before = weights(model)
    metrics = learner.update(kit.relabel(model, attempts(kit, rewards=(1.0, 1.0, 1.0))))
    assert same(before, weights(model))
    assert (metrics["ppo/steps"], metrics["ppo/idle_steps"], metrics["ppo/grad_norm"]) == (0.0, 1.0, 0.0)
    assert not learner.record.steps[0].stepped
    alone = attempts(kit, rewards=(1.0,), tasks=3)
    metrics = learner.update(kit.relabel(model, alone))
    assert (metrics["ppo/idle_steps"], metrics["ppo/groups_too_small"], metrics["ppo/kept_fraction"]) == (1.0, 3.0, 0.0)
    assert same(before, weights(model))
    # What was skipped is not a broken gradient, and the next good batch is learned from.
    assert metrics["ppo/skipped_steps"] == 0.0
    assert learner.update(kit.relabel(model, attempts(kit)))["ppo/steps"] == 1.0


def test_with_everything_filtered_the_critic_still_learns(kit):
    model, learner = start(kit, ppo={"min_group_std": 10.0, "minibatches": 1})
    policy, critic = ([w.detach().clone() for w in ws] for ws in (model.policy_parameters(), model.critic_parameters()))
    metrics = learner.update(kit.relabel(model, attempts(kit)))
    assert same(policy, model.policy_parameters())
    assert not same(critic, model.critic_parameters())
    assert (metrics["ppo/idle_steps"], metrics["ppo/groups_filtered"], metrics["ppo/kept_fraction"]) == (1.0, 2.0, 0.0)
    assert metrics["loss/value"] > 0
    assert metrics["ppo/entropy"] > 0


def test_a_value_loss_in_the_policy_moves_it_by_its_coefficient(kit):
    """Advantages of 0 everywhere: what still moves the trunk is the value loss, and twice the weight is twice that."""
    found = {}
    for gradient, coef in ((False, 0.2), (True, 0.2), (True, 0.4)):
        ppo = {"minibatches": 1, "min_group_std": 10.0, "loss": {"value_coef": coef}}
        config = kit.config(critic="head", ppo=ppo)
        config = config.model_copy(update={"model": config.model.model_copy(update={"critic_gradient": gradient})})
        model = kit.actor_critic(config, dtype=F64)
        with torch.no_grad():
            model.critic["head"].weight.fill_(0.1)
        metrics = PPOLearner(model, config).update(kit.relabel(model, attempts(kit)))
        found[gradient, coef] = (metrics["ppo/grad_norm"], metrics["critic/grad_norm"])
    assert found[False, 0.2][0] == 0.0
    assert found[True, 0.2][0] > 0.0
    for i in range(2):
        assert found[True, 0.4][i] == pytest.approx(2 * found[True, 0.2][i])
    # Where it stays in the head it has its own rate, and no coefficient.
    assert found[False, 0.2][1] == pytest.approx(5 * found[True, 0.2][1])


def noisy(batch, scale, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def off(turn):
        noise = (scale * torch.randn(len(turn.logprobs), generator=generator, dtype=F64)).tolist()
        return replace(turn, logprobs=tuple(min(x + e, 0.0) for x, e in zip(turn.logprobs, noise, strict=True)))

    return [replace(t, turns=tuple(off(turn) for turn in t.turns)) for t in batch]


@pytest.mark.parametrize("epochs", [1, 2])
def test_another_engine_is_corrected_and_reported(kit, epochs):
    ppo = {"minibatches": 1, "epochs": epochs, "importance": {"weight": "token", "cap": 1.5}}
    model, learner = start(kit, ppo=ppo)
    batch = noisy(kit.relabel(model, kit.batch()), 0.2)
    metrics = learner.update(batch)
    engine = torch.tensor([x for t in batch for turn in t.turns for x in turn.logprobs], dtype=F64)
    record = learner.record
    assert bool(record.known_N.all())
    assert torch.allclose(record.weight_N, (record.old_logprob_N - engine).exp().clamp(max=1.5))
    assert metrics["ppo/engine_gap"] == pytest.approx(0.2 * math.sqrt(2 / math.pi), rel=0.3)
    assert metrics["ppo/engine_kl"] == pytest.approx(0.5 * 0.2**2, rel=0.5)
    assert metrics["ppo/importance_mean"] == pytest.approx(1.0, abs=0.1)
    assert 0.9 < metrics["ppo/importance_ess"] < 1.0


def test_episodes_outside_the_band_leave_the_policys_loss(kit):
    """One episode is off by a factor of 1.5 at each token."""
    ppo = {"minibatches": 1, "importance": {"weight": "token", "band": (0.8, 1.2)}}
    model, learner = start(kit, ppo=ppo)
    batch = kit.relabel(model, kit.batch())
    off = [replace(t, logprobs=tuple(x - math.log(1.5) for x in t.logprobs)) for t in batch[1].turns]
    batch[1] = replace(batch[1], turns=tuple(off))
    metrics = learner.update(batch)
    n = sum(t.n_sampled for t in batch)
    assert metrics["ppo/importance_masked"] == pytest.approx(18 / n)
    assert metrics["ppo/kept_fraction"] == pytest.approx(1 - 18 / n)
    assert int((~learner.record.keep_N).sum()) == 18


@pytest.mark.parametrize(("placement", "estimator"), [("reward", "k1"), ("loss", "k2")])
def test_an_adaptive_kl_goes_on_after_a_resume(kit, placement, estimator, tmp_path):
    kl = {"coef": 0.1, "target": 1.0, "horizon": 30, "placement": placement, "estimator": estimator}
    ppo = {"kl": kl, "minibatches": 1, "policy": {"lr": 1e-2}, "target_kl": None}
    model, learner = start(kit, ppo=ppo, reference=True)
    with torch.no_grad():
        for weight in model.policy_parameters():
            weight.mul_(1.2)
    coef = 0.1
    for i in range(4):
        if i == 2:
            write_state(tmp_path / "state.pt", learner.state_dict())
            learner = PPOLearner(model, kit.config(ppo=ppo))
            learner.load_state_dict(read_state(tmp_path / "state.pt"))
        batch = kit.relabel(model, kit.batch(10 * i))
        metrics, record = learner.update(batch), learner.record
        assert metrics["ppo/kl_coef"] == record.kl_coef == pytest.approx(coef, rel=1e-12)
        # What is observed is the KL of the batch before the update: six episodes, and a horizon of 30.
        k1 = kl_k1(record.old_logprob_N, record.reference_N)
        assert metrics["ppo/kl_ref_k1"] == pytest.approx(float(k1.mean()))
        means = [float(x.mean()) for x in k1.split([t.n_sampled for t in batch])]
        error = min(max(sum(means) / 6 - 1, -0.2), 0.2)
        coef *= 1 + error * 6 / 30
    assert coef != 0.1


def test_a_target_asks_for_a_reference_too(kit):
    config = kit.config(ppo={"kl": {"coef": 0.1, "target": 0.5}})
    with pytest.raises(ConfigError, match="no reference"):
        PPOLearner(kit.actor_critic(config), config)


def test_the_kl_in_the_loss_pulls_back_and_nothing_else_does(kit):
    """Zero rewards, so zero advantages: without the term the updates are idle, with it the policy moves."""
    kl = {"coef": 1.0, "placement": "loss", "estimator": "k2"}
    silent = [replace(t, turns=tuple(replace(x, reward=0.0) for x in t.turns)) for t in attempts(kit)]
    for section, idle in (({}, 2.0), ({"kl": kl}, 0.0)):
        model, learner = start(kit, critic="none", reference=True, ppo={"advantage": {"estimator": "rloo"}} | section)
        with torch.no_grad():
            for weight in model.policy_parameters():
                weight.mul_(1.1)
        metrics = learner.update(kit.relabel(model, silent))
        assert metrics["ppo/idle_steps"] == idle
        assert ("loss/kl" in metrics) == bool(section)


@pytest.mark.parametrize("critic", ["head", "none"])
def test_the_record_is_enough_to_compute_every_loss_again(kit, critic, tmp_path):
    """Read back from its file, without any weights."""
    estimator = "turn" if critic == "head" else "rloo"
    ppo = {
        "minibatches": 2, "epochs": 2, "policy": {"lr": 1e-2}, "target_kl": None, "microbatch_tokens": 40,
        "advantage": {"estimator": estimator}, "importance": {"weight": "token", "cap": 1.1},
        "kl": {"coef": 0.3, "placement": "loss", "estimator": "k2"},
        "loss": {"entropy_coef": 0.1, "value_clip": 0.2, "aggregation": "seq_mean_token_mean"},
    }  # fmt: skip
    model, learner = start(kit, critic=critic, reference=True, ppo=ppo)
    batch = noisy(kit.relabel(model, attempts(kit)), 0.1)
    metrics = learner.update(batch)
    learner.record.save(tmp_path / "learning.safetensors")
    record = UpdateRecord.load(tmp_path / "learning.safetensors")
    config = kit.config(critic=critic, ppo=ppo).ppo.loss
    assert record.episodes == tuple(t.id for t in batch)
    assert [step.stepped for step in record.steps] == [True] * 4
    episode = torch.repeat_interleave(torch.arange(6), torch.tensor([t.n_sampled for t in batch]))
    for step in record.steps:
        mask = torch.isin(episode, torch.tensor(step.rows))
        share = make_share(episode, mask, config.aggregation, config.norm_length)
        extra = {"weight_N": record.weight_N, "keep_N": record.keep_N}
        old, reference = record.old_logprob_N, record.reference_N
        policy = policy_loss(step.logprob_N, old, record.advantage_N, share, config, **extra)[0]
        kl = record.kl_coef * kl_loss(step.logprob_N, old, reference, share, **extra)
        bonus = entropy_loss(step.entropy_N, share, config.entropy_coef, keep_N=record.keep_N)[0]
        assert step.policy_loss == pytest.approx(float(policy), abs=1e-12)
        assert step.kl_loss == pytest.approx(float(kl), abs=1e-12)
        assert step.entropy_bonus == pytest.approx(float(bonus), abs=1e-12)
        if critic == "none":
            assert bool(step.value_N.isnan().all())
            assert step.value_loss == 0.0
            continue
        value_share = make_share(episode, mask & record.value_keep_N, config.aggregation, config.norm_length)
        value = value_loss(step.value_N, record.old_value_N, record.return_N, value_share, config.value_clip)[0]
        assert step.value_loss == pytest.approx(float(value), abs=1e-12)
    assert metrics["loss/policy"] == pytest.approx(sum(s.policy_loss for s in record.steps) / 4)


def test_there_is_a_record_of_the_last_update_alone(kit):
    model, learner = start(kit, ppo={"policy": {"lr": 3e-2}, "epochs": 4, "minibatches": 1, "target_kl": 1e-9})
    assert learner.record is None
    batch = kit.relabel(model, kit.batch())
    learner.update(batch)
    # The step at which the update stopped is written down, as not taken.
    assert [step.stepped for step in learner.record.steps] == [True, False]
    assert learner.record.reference_N is None
    assert learner.record.kl_coef == 0.0
    learner.warmup(kit.relabel(model, kit.batch()))
    assert learner.record is None
    learner.update(kit.relabel(model, kit.batch()))
    learner.update([])
    assert learner.record is None


def test_alarms_ring_through_the_learner_and_are_in_its_state(kit):
    model, learner = start(kit)
    batch = [replace(t, end=EndReason.MAX_TURNS, trailing_ids=()) for t in kit.batch()]
    metrics = learner.update(kit.relabel(model, batch))
    assert metrics["alarm/truncation"] == 1.0
    assert learner.alarms.lines[0].startswith("alarm/truncation: more than 10 %")
    other = PPOLearner(model, kit.config())
    other.load_state_dict(learner.state_dict())
    other.update(kit.relabel(model, batch))
    assert other.alarms.lines == ()
