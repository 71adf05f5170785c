"""The PPO loop: splits, states, guards, warm-up, and what happens to bad batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from agentrl.errors import ConfigError, InvariantError
from agentrl.learner.alarms import REMEDIES
from agentrl.learner.checkpoint import read_state, write_state
from agentrl.learner.ppo import PPOLearner
from agentrl.types import EndReason

F64 = torch.float64
KINDS = [(None, "separate"), (None, "head"), ({"rank": 4}, "adapter"), ({"rank": 4}, "head")]
kinds = pytest.mark.parametrize(
    ("lora", "critic"), KINDS, ids=["full-separate", "full-head", "lora-adapter", "lora-head"]
)


def weights(model):
    return [weight.detach().clone() for weight in model.policy_parameters() + model.critic_parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run(kit, batches, *, dtype=F64, **changes):
    """Some updates on relabelled batches; the model and the metrics of each."""
    config = kit.config(**changes)
    model = kit.actor_critic(config, dtype=dtype)
    learner = PPOLearner(model, config)
    return model, [learner.update(kit.relabel(model, batch)) for batch in batches], learner


@pytest.mark.parametrize("critic", ["separate", "head"])
def test_neither_budget_nor_chunk_nor_order_changes_the_update(kit, critic):
    """One row a pass, a few, all at once; episodes of 1 to 40 sampled tokens."""
    batch = kit.batch()
    expected = None
    for budget, chunk, order in ((16, 1, batch), (90, 7, batch), (10**6, 10**6, batch), (90, 50, batch[::-1])):
        ppo = {"epochs": 2, "minibatches": 1, "microbatch_tokens": budget, "logit_chunk": chunk, "target_kl": None}
        model, metrics, _ = run(kit, [order], critic=critic, ppo=ppo)
        found = (weights(model), metrics[0])
        expected = expected or found
        for a, b in zip(found[0], expected[0], strict=True):
            assert torch.allclose(a, b, atol=1e-10)
        for name, value in expected[1].items():
            assert found[1][name] == pytest.approx(value, rel=1e-6, abs=1e-7), name


@kinds
def test_a_restored_learner_goes_on_bit_for_bit(kit, lora, critic, tmp_path):
    """Three updates in one go, and with everything written, forgotten and read again after each."""
    ppo = {"epochs": 2, "minibatches": 3, "microbatch_tokens": 120, "policy": {"lr": 1e-3, "warmup_steps": 4}}
    config = kit.config(lora=lora, critic=critic, ppo=ppo | {"kl": {"coef": 0.05}}, seed=3)
    batches = [kit.batch(100 * i) for i in range(3)]
    whole = kit.actor_critic(config, reference=True)
    learner = PPOLearner(whole, config)
    learner.warmup(kit.relabel(whole, batches[0]))
    expected = [learner.update(kit.relabel(whole, batch)) for batch in batches]

    model = kit.actor_critic(config, reference=True)
    learner = PPOLearner(model, config)
    learner.warmup(kit.relabel(model, batches[0]))
    for i, batch in enumerate(batches):
        folder = tmp_path / str(i)
        model.save(folder)
        write_state(folder / "trainer" / "learner.pt", learner.state_dict())
        # Another seed: what was read must not depend on what was there.
        model = kit.actor_critic(config, seed=9) if lora is None else kit.actor_critic(config)
        model.load(folder)
        learner = PPOLearner(model, config)
        learner.load_state_dict(read_state(folder / "trainer" / "learner.pt"))
        found = learner.update(kit.relabel(model, batch))
        assert repr(found) == repr(expected[i])
    assert same(weights(model), weights(whole))


def test_the_same_seed_gives_the_same_bits_and_another_another_order(kit):
    ppo = {"epochs": 1, "minibatches": 3, "target_kl": None}
    first, second, other = (run(kit, [kit.batch()], dtype=torch.float32, ppo=ppo, seed=s)[0] for s in (1, 1, 2))
    assert same(weights(first), weights(second))
    assert not same(weights(first), weights(other))


def test_more_minibatches_than_episodes_are_one_episode_each(kit):
    _, metrics, _ = run(kit, [kit.batch()], ppo={"epochs": 2, "minibatches": 50, "target_kl": None})
    assert metrics[0]["ppo/steps"] == 12.0


def test_metrics_of_an_update(kit):
    batch = [*kit.batch(), replace(kit.trajectory([(2, 2, 0.0)], seed=9), end=EndReason.SANDBOX_ERROR)]
    _, (metrics,), _ = run(kit, [batch], critic="head", ppo={"epochs": 1, "minibatches": 1})
    expected = {
        "loss/policy", "loss/value", "ppo/clip_fraction", "ppo/clip_fraction_upper", "ppo/clip_fraction_lower",
        "ppo/clip_fraction_dual", "ppo/kl", "ppo/kl_k1", "ppo/entropy", "ppo/ratio_max", "ppo/engine_gap",
        "ppo/engine_gap_max", "ppo/first_ratio_gap", "ppo/first_kl", "ppo/grad_norm", "ppo/grad_norm_max", "ppo/lr",
        "ppo/advantage_mean", "ppo/advantage_std", "ppo/steps", "ppo/skipped_steps", "ppo/early_stop", "ppo/episodes",
        "ppo/episodes_error", "ppo/episodes_empty", "ppo/tokens", "critic/explained_variance",
        "critic/explained_variance_turn_start", "critic/value_mean", "critic/return_mean", "critic/return_std",
        "critic/clip_fraction", "critic/grad_norm", "critic/grad_norm_max", "critic/lr", "critic/skipped_steps",
        "critic/calibration_error", "ppo/engine_kl", "ppo/idle_steps", "ppo/kept_fraction",
        *(f"alarm/{name}" for name in REMEDIES),
    }  # fmt: skip
    found = {name for name in metrics if not name.startswith("critic/explained_variance_turn_")}
    assert found | {"critic/explained_variance_turn_start"} == expected
    assert metrics["ppo/episodes"] == 6.0
    assert metrics["ppo/episodes_error"] == 1.0
    assert metrics["ppo/tokens"] == sum(t.n_sampled for t in kit.batch())
    assert metrics["ppo/ratio_max"] == pytest.approx(1.0)
    assert metrics["ppo/kl"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["critic/value_mean"] == pytest.approx(metrics["critic/return_mean"], abs=0.3)
    assert 0 < metrics["ppo/entropy"] < math.log(kit.vocab)


def test_the_bias_is_set_from_the_first_returns_alone(kit):
    first = [kit.trajectory([(2, 3, 1.0)], seed=i) for i in range(4)]
    later = [kit.trajectory([(2, 3, 9.0)], seed=i) for i in range(4)]
    _, metrics, _ = run(kit, [first, later], ppo={"epochs": 1, "minibatches": 1})
    assert metrics[0]["critic/value_mean"] == pytest.approx(1.0)
    assert metrics[1]["critic/value_mean"] == pytest.approx(1.0, abs=0.1)


def test_first_value_loss_is_the_variance_of_the_returns(kit):
    """Zero head and a bias of the mean return: V is constant, EV is 0, the loss is half the variance."""
    batch = [replace(t, end=EndReason.SUBMITTED, trailing_ids=()) for t in kit.batch()]
    _, (metrics,), _ = run(kit, [batch], ppo={"epochs": 1, "minibatches": 1, "advantage": {"whiten": "none"}})
    n = metrics["ppo/tokens"]
    variance = metrics["critic/return_std"] ** 2 * (n - 1) / n
    assert metrics["loss/value"] == pytest.approx(variance / 2, rel=1e-5)
    assert metrics["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["critic/value_mean"] == pytest.approx(metrics["critic/return_mean"], abs=1e-6)


def test_an_update_stops_once_its_kl_is_above_one_and_a_half_times_the_target(kit):
    """Of two steps the first is taken at a KL of 0; what the second meets is twice the mean."""
    ppo = {"epochs": 2, "minibatches": 1, "policy": {"lr": 3e-2}}
    _, (free,), _ = run(kit, [kit.batch()], ppo=ppo | {"target_kl": None})
    assert (free["ppo/steps"], free["ppo/early_stop"]) == (2.0, 0.0)
    met = 2 * free["ppo/kl"]
    _, (near,), _ = run(kit, [kit.batch()], ppo=ppo | {"target_kl": met / 1.45})
    assert (near["ppo/steps"], near["ppo/early_stop"]) == (2.0, 0.0)
    model, (stopped,), _ = run(kit, [kit.batch()], ppo=ppo | {"target_kl": met / 1.55})
    assert (stopped["ppo/steps"], stopped["ppo/early_stop"]) == (1.0, 1.0)
    assert all(weight.grad is None for weight in model.parameters())


def test_gradients_of_policy_and_critic_are_clipped_apart(kit):
    """A critic gradient of any size leaves the policy's step as it is."""
    steps = []
    for scale in (1.0, 1e4):
        config = kit.config(ppo={"epochs": 1, "minibatches": 1, "advantage": {"whiten": "full", "min_std": 1e-9}})
        model = kit.actor_critic(config, dtype=F64)
        learner = PPOLearner(model, config)
        batch = [
            replace(t, turns=tuple(replace(turn, reward=scale * turn.reward) for turn in t.turns))
            for t in kit.batch()
            if t.end is not EndReason.CUT
        ]
        metrics = learner.update(kit.relabel(model, batch))
        steps.append(([p.detach().clone() for p in model.policy_parameters()], metrics))
    assert steps[1][1]["critic/grad_norm"] > 1e3 * steps[0][1]["critic/grad_norm"]
    for a, b in zip(steps[0][0], steps[1][0], strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_warmup_moves_the_critic_alone_and_explains_new_rollouts(kit):
    """Reward 1 where the prompt begins with token 3: a critic can know it from the first token on."""
    ppo = {"warmup_epochs": 8, "minibatches": 4, "critic": {"lr": 1e-2}, "warmup_explained_variance": 0.5}
    config = kit.config(ppo=ppo)
    model = kit.actor_critic(config, dtype=torch.float32)
    learner = PPOLearner(model, config)
    policy = [p.detach().clone() for p in model.policy_parameters()]

    def collection(seed):
        made = []
        for i in range(64):
            cue = (seed + i) % 2
            trajectory = kit.trajectory([(2, 3, float(cue))], seed=seed * 1000 + i)
            turn = replace(trajectory.turns[0], prompt_ids=(3 if cue else 5, trajectory.turns[0].prompt_ids[1]))
            made.append(replace(trajectory, turns=(turn,)))
        return made

    found = [learner.warmup(collection(seed)) for seed in (1, 2, 3)]
    assert same([p.detach() for p in model.policy_parameters()], policy)
    assert found[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert found[0]["critic/value_mean"] == pytest.approx(0.5)
    assert found[0]["critic/warm"] == 0.0
    assert found[2]["critic/explained_variance"] > 0.5
    assert found[2]["critic/warm"] == 1.0
    assert found[2]["loss/value"] < found[0]["loss/value"]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_batch_of_errors_changes_nothing_and_is_counted(kit, minibatches):
    failed = [replace(kit.trajectory([(2, 2, 0.0)], seed=i), end=EndReason.ENV_ERROR) for i in range(3)]
    config = kit.config(ppo={"minibatches": minibatches})
    model = kit.actor_critic(config)
    learner = PPOLearner(model, config)
    before = weights(model)
    metrics = learner.update(failed)
    assert metrics["ppo/steps"] == 0.0
    assert metrics["ppo/episodes_error"] == 3.0
    assert learner.warmup(failed)["ppo/episodes"] == 0.0
    assert learner.update([])["ppo/episodes"] == 0.0
    assert same(weights(model), before)


@kinds
def test_a_single_token_trains_and_keeps_every_figure_finite_or_undefined(kit, lora, critic):
    """A fresh critic's bias is this one return, which leaves no advantage; a critic that says 0 leaves one of 1."""
    batch = [kit.trajectory([(3, 1, 1.0)], seed=1)]
    config = kit.config(lora=lora, critic=critic)
    model = kit.actor_critic(config, dtype=torch.float32)
    learner = PPOLearner(model, config)
    for is_set, expected in ((False, (0.0, 1.0)), (True, (1.0, 0.0))):
        model.set_value_bias(0.0)
        learner.load_state_dict(learner.state_dict() | {"bias_is_set": is_set})
        metrics = learner.update(kit.relabel(model, batch))
        undefined = {name for name, value in metrics.items() if not math.isfinite(value)}
        assert undefined == {
            "critic/explained_variance", "critic/explained_variance_turn_start", "critic/return_std",
        }  # fmt: skip
        assert (metrics["ppo/steps"], metrics["ppo/idle_steps"]) == expected
        assert all(bool(weight.isfinite().all()) for weight in weights(model))


def test_equal_rewards_teach_the_policy_nothing(kit):
    batch = [kit.trajectory([(3, n, 1.0)], seed=n) for n in (1, 5, 20)]
    _, (metrics,), _ = run(kit, [batch], ppo={"epochs": 1, "minibatches": 1})
    assert math.isnan(metrics["critic/explained_variance"])
    assert metrics["ppo/grad_norm"] < 1e-9
    assert metrics["ppo/advantage_std"] < 1e-9
    assert (metrics["ppo/idle_steps"], metrics["ppo/steps"]) == (1.0, 0.0)


def test_gradients_that_are_not_finite_are_skipped_counted_and_at_last_fatal(kit):
    config = kit.config(ppo={"epochs": 1, "minibatches": 1, "advantage": {"whiten": "none"}})
    model = kit.actor_critic(config)
    learner = PPOLearner(model, config)
    learner.load_state_dict(learner.state_dict() | {"bias_is_set": True})
    batch = kit.relabel(model, [kit.trajectory([(3, 4, 1e30)], seed=1), kit.trajectory([(3, 4, 0.0)], seed=2)])
    before = weights(model)
    for _ in range(2):
        metrics = learner.update(batch)
        assert metrics["critic/skipped_steps"] == 1.0
        assert metrics["ppo/skipped_steps"] == 1.0
        assert metrics["ppo/steps"] == 0.0
    assert same(weights(model), before)
    restored = PPOLearner(model, config)
    restored.load_state_dict(learner.state_dict())
    with pytest.raises(InvariantError, match="policy's gradient was not finite 3 times in a row"):
        restored.update(batch)
    assert same(weights(model), before)


def test_damaged_weights_stop_the_run_before_any_step(kit):
    config = kit.config(critic="head")
    model = kit.actor_critic(config)
    batch = kit.relabel(model, kit.batch())
    model.set_value_bias(math.inf)
    learner = PPOLearner(model, config)
    learner.load_state_dict(learner.state_dict() | {"bias_is_set": True})
    with pytest.raises(InvariantError, match=r"critic's values.*not finite.*last good checkpoint"):
        learner.update(batch)


def test_a_kl_penalty_needs_a_reference(kit):
    config = kit.config(ppo={"kl": {"coef": 0.1}})
    with pytest.raises(ConfigError, match=r"begin_rl\(reference=True\)"):
        PPOLearner(kit.actor_critic(config), config)


def test_the_kl_penalty_pulls_back_to_the_reference(kit):
    """No reward but the penalty: after some updates the policy is nearer to the reference again."""
    ppo = {"minibatches": 1, "target_kl": None, "policy": {"lr": 5e-3}, "kl": {"coef": 1.0}}
    config = kit.config(ppo=ppo | {"advantage": {"whiten": "none"}})
    model = kit.actor_critic(config, reference=True, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.policy_parameters():
            weight.mul_(1.3)
    learner = PPOLearner(model, config)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(16):
        batch = [kit.trajectory([(3, 1, 0.0)], seed=j % 8) for j in range(128)]
        found.append(learner.update(sampled(kit, model, batch, generator))["ppo/kl_ref"])
    assert sum(found[-4:]) < 0.5 * sum(found[:4])


def sampled(kit, model, batch, generator):
    """The same prompts with one token drawn from the policy."""
    micro = kit.micro(batch)
    with torch.no_grad():
        logits = model.policy(micro.token_ids_BT, use_cache=False).logits[:, 2]
    drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0].tolist()
    order = {int(row): token for row, token in zip(micro.row_B, drawn, strict=True)}
    made = [replace(t, turns=(replace(t.turns[0], sampled_ids=(order[i],)),)) for i, t in enumerate(batch)]
    return kit.relabel(model, made)


def test_a_failed_update_leaves_no_gradients_behind(kit):
    config = kit.config(ppo={"epochs": 1, "minibatches": 1})
    norms = []
    for fails_first in (False, True):
        model = kit.actor_critic(config)
        learner = PPOLearner(model, config)
        good = kit.relabel(model, kit.batch())
        if fails_first:
            with pytest.raises(InvariantError):
                learner.update(kit.relabel(model, kit.batch(), temperature=0.5))
        norms.append(learner.update(good)["ppo/grad_norm"])
    assert norms[0] == norms[1]
