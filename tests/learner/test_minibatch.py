"""A minibatch's gradient, however it is cut into micro-batches, lines and ranks, and whatever fills unused slots."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from agentrl.learner.batch import make_microbatches, read_rollout
from agentrl.learner.credit import Scored, make_targets
from agentrl.learner.importance import importance_weights
from agentrl.learner.minibatch import Batch, Objective

F64 = torch.float64
CPU = torch.device("cpu")
LOSS = {"entropy_coef": 0.05, "value_clip": 0.2}
KL = {"coef": 0.3, "estimator": "k2", "placement": "loss"}
aggregations = pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])


class World:
    """A model whose policy has moved away from the one that sampled, and targets with weights and unkept tokens."""

    def __init__(self, kit, *, dtype=F64, seed=0, **changes):
        self.config = kit.config(**changes)
        self.model = kit.actor_critic(self.config, dtype=dtype)
        rollout = read_rollout(kit.relabel(self.model, kit.batch(seed)), context=96, vocab_size=kit.vocab)
        generator = torch.Generator().manual_seed(7)
        n = rollout.n_actions

        def noise(scale):
            return scale * torch.randn(n, generator=generator, dtype=F64)

        final = torch.randn(len(rollout.rows), generator=generator, dtype=F64)
        scored = Scored(rollout.logprob_N + noise(0.3), torch.ones(n, dtype=torch.bool), noise(1.0), final)
        targets, _ = make_targets(rollout, scored, 0.0, self.config.ppo)
        weight, _, _ = importance_weights(
            rollout.logprob_N, scored.logprob_N, rollout.episode_id_N, self.config.ppo.importance
        )
        keep = torch.arange(n) % 7 != 2
        self.batch = Batch(rollout, replace(targets, weight_N=weight, keep_N=keep), scored.logprob_N + noise(0.2), 0.3)

    @property
    def rows(self):
        return list(range(len(self.batch.rollout.rows)))

    def weights(self):
        return self.model.policy_parameters() + self.model.critic_parameters()

    def gradients(self):
        found = [torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in self.weights()]
        for weight in self.weights():
            weight.grad = None
        return found

    def objective(self, **ppo):
        config = self.config.ppo.model_copy(update=ppo)
        return Objective(self.model, config, 0.8)

    def whole(self, batch=None, **ppo):
        met = self.objective(microbatch_tokens=10**6, **ppo).accumulate(batch or self.batch, self.rows)
        return self.gradients(), met


def world_of(kit, aggregation="token_mean", **changes):
    ppo = {"loss": LOSS | {"aggregation": aggregation}, "kl": KL, "importance": {"weight": "token", "cap": 1.2}}
    return World(kit, ppo=ppo | changes.pop("ppo", {}), **changes)


def near(found, expected, tolerance=1e-12):
    scale = max(float(x.abs().max()) for x in expected)
    return all(bool((a - b).abs().max() <= tolerance * scale) for a, b in zip(found, expected, strict=True))


@aggregations
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("critic", ["separate", "head"])
def test_rows_in_a_micro_batch_change_nothing(kit, aggregation, size, critic):
    """Rank after rank and micro-batch after micro-batch, with the minibatch's denominators: gradients add up."""
    world = world_of(kit, aggregation, critic=critic)
    expected, met = world.whole()
    objective, total = world.objective(), {}
    policy = objective._share(world.batch.rollout, world.rows, None)
    value = objective._share(world.batch.rollout, world.rows, world.batch.targets.value_keep_N)
    for rank in (world.rows[0::2], world.rows[1::2]):
        for start in range(0, len(rank), size):
            (micro,) = make_microbatches(world.batch.rollout, rank[start : start + size], 10**6, CPU)
            objective._backward(world.batch, micro, policy, value, total)
    assert near(world.gradients(), expected)
    for name, value in met.metrics.items():
        assert float(total[name]) == pytest.approx(float(value), rel=1e-9, abs=1e-12), name


@aggregations
@pytest.mark.parametrize("estimator", ["boundary", "turn"])
@pytest.mark.parametrize("budget", [16, 60, 120])
def test_token_budget_and_packing_change_nothing(kit, aggregation, estimator, budget):
    world = world_of(kit, aggregation, critic="head", ppo={"advantage": {"estimator": estimator}})
    expected, met = world.whole()
    for packing in (False, True):
        found = world.objective(microbatch_tokens=budget, packing=packing).accumulate(world.batch, world.rows)
        assert near(world.gradients(), expected)
        for name in ("logprob_N", "value_N", "entropy_N"):
            assert torch.allclose(getattr(found, name), getattr(met, name), atol=1e-12)
        for name, value in met.metrics.items():
            assert float(found.metrics[name]) == pytest.approx(float(value), rel=1e-9, abs=1e-12), name


def test_float32_splits_agree_to_its_own_precision(kit):
    world = world_of(kit, dtype=torch.float32)
    expected, _ = world.whole()
    world.objective(microbatch_tokens=30).accumulate(world.batch, world.rows)
    assert near(world.gradients(), expected, 1e-5)


def test_means_of_micro_batches_would_be_wrong_here(kit):
    """The control: with a share of its own for each row the gradient is another one, so the tests above can fail."""
    world = world_of(kit)
    expected, _ = world.whole()
    for row in world.rows:
        world.objective(microbatch_tokens=10**6).accumulate(world.batch, [row])
    found = [g / len(world.rows) for g in world.gradients()]
    assert not near(found, expected, 0.1)


@pytest.mark.parametrize("critic", ["separate", "head"])
def test_what_stands_in_slots_that_are_not_kept_changes_nothing(kit, critic):
    world = world_of(kit, critic=critic)
    expected, met = world.whole()
    t = world.batch.targets
    dirty = {name: torch.where(t.keep_N, getattr(t, name), math.nan) for name in ("advantage_N", "weight_N")}
    reference = torch.where(t.keep_N, world.batch.reference_N, math.nan)
    found, other = world.whole(replace(world.batch, targets=replace(t, **dirty), reference_N=reference))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert {n: float(v) for n, v in other.metrics.items()} == {n: float(v) for n, v in met.metrics.items()}


def test_targets_of_tokens_without_a_value_loss_change_nothing(kit):
    world = world_of(kit, ppo={"advantage": {"estimator": "turn"}})
    assert 0 < int(world.batch.targets.value_keep_N.sum()) < world.batch.rollout.n_actions
    expected, _ = world.whole()
    t = world.batch.targets
    dirty = {name: torch.where(t.value_keep_N, getattr(t, name), math.nan) for name in ("return_N", "old_value_N")}
    found, _ = world.whole(replace(world.batch, targets=replace(t, **dirty)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("estimator", ["boundary", "turn"])
def test_warm_up_fits_the_critic_to_what_updates_fit_it_to(kit, estimator):
    world = world_of(kit, ppo={"advantage": {"estimator": estimator}})
    expected, met = world.whole()
    t = world.batch.targets
    dirty = {name: torch.where(t.value_keep_N, getattr(t, name), math.nan) for name in ("return_N", "old_value_N")}
    objective = world.objective(microbatch_tokens=60)
    metrics = objective.fit_values(world.batch.rollout, replace(t, **dirty), world.rows)
    n_policy = len(world.model.policy_parameters())
    found = world.gradients()
    assert near(found[n_policy:], expected[n_policy:])
    assert all(bool((g == 0).all()) for g in found[:n_policy])
    assert float(metrics["loss/value"]) == pytest.approx(float(met.metrics["loss/value"]))


def test_what_was_met_lies_in_the_rows_and_nowhere_else(kit):
    world = world_of(kit)
    rows = [4, 1]
    met = world.objective(microbatch_tokens=30).accumulate(world.batch, rows)
    inside = torch.isin(world.batch.rollout.episode_id_N, torch.tensor(rows))
    for met_N in (met.logprob_N, met.value_N, met.entropy_N):
        assert torch.equal(~met_N.isnan(), inside)
    assert met.rows == (4, 1)
    record = met.record(stepped=True)
    assert record.kl_loss == pytest.approx(float(met.metrics["loss/kl"]))
    assert record.entropy_bonus == pytest.approx(float(met.metrics["loss/entropy_bonus"])) != 0.0
    assert record.policy_loss == pytest.approx(float(met.metrics["loss/policy"]))
    assert record.value_loss == pytest.approx(float(met.metrics["loss/value"]))


def test_when_nothing_can_teach_the_policy(kit):
    """Idle: no kept token; or advantages of 0 (or weights of 0) and no other term with a gradient."""
    plain = World(kit, ppo={"loss": {"entropy_coef": 0.0}})
    batch = replace(plain.batch, reference_N=None, kl_coef=0.0)
    t = batch.targets
    none, zero = torch.zeros_like(t.keep_N), torch.zeros_like(t.advantage_N)
    for targets, expected in (
        (t, False),
        (replace(t, keep_N=none), True),
        (replace(t, advantage_N=zero), True),
        (replace(t, weight_N=zero), True),
    ):
        gradients, met = plain.whole(replace(batch, targets=targets))
        assert met.idle is expected
        n_policy = len(plain.model.policy_parameters())
        assert all(bool((g == 0).all()) for g in gradients[:n_policy]) is expected
    rich = world_of(kit)
    assert not rich.whole(replace(rich.batch, targets=replace(rich.batch.targets, advantage_N=zero)))[1].idle
    assert rich.whole(replace(rich.batch, targets=replace(rich.batch.targets, keep_N=none)))[1].idle


def test_packing_puts_several_rows_into_a_line(kit):
    world = world_of(kit)
    lines = [
        sum(micro.token_ids_BT.shape[0] for micro in world.objective(packing=packing).micros(world.batch.rollout))
        for packing in (False, True)
    ]
    assert lines[0] == len(world.rows) > lines[1]
