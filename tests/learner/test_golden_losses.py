"""What public implementations computed of losses, KL estimates and logprobs; `golden_records` tells of each record."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from categorical import Categorical
from golden_records import DTYPES, EPSILON, Random, near

from agentrl.config import ImportanceConfig, KlConfig, LossConfig
from agentrl.learner.importance import importance_weights
from agentrl.learner.kl import KlController
from agentrl.learner.logits import logprob_and_entropy
from agentrl.learner.losses import aggregate, kl_k1, kl_k2, kl_k3, make_share, policy_loss, value_loss

pytestmark = pytest.mark.shared

AGGREGATIONS = {
    name.replace("_", "-"): name
    for name in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
}


@pytest.fixture
def golden(shared_data: Path) -> dict:
    return json.loads((shared_data / "ppo_golden.json").read_text())


@pytest.fixture(params=sorted(DTYPES))
def case(request, golden):
    return Random(golden, DTYPES[request.param][0]), request.param, DTYPES[request.param][1]


def share_of(random: Random, aggregation: str):
    width = len(random.inputs["values"][0])
    return make_share(random.episodes, torch.ones_like(random.episodes, dtype=torch.bool), aggregation, width)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_losses(case, name):
    random, dtype, tolerance = case
    share = share_of(random, AGGREGATIONS[name])
    near_enough = max(tolerance, EPSILON) * 10
    expected = random.outputs[f"verl.policy_loss_vanilla[{name}|is=none]"][dtype]
    args = (random.get("log_probs"), random.get("old_log_probs"), random.get("advantages"), share)
    loss, metrics = policy_loss(*args, LossConfig())
    assert loss.item() == pytest.approx(expected["loss"], abs=near_enough)
    assert metrics["clip_fraction"].item() == pytest.approx(expected["actor/pg_clipfrac"], abs=1e-6)
    assert metrics["clip_fraction_dual"].item() == pytest.approx(expected["actor/pg_clipfrac_lower"], abs=1e-6)
    assert metrics["kl_k1"].item() == pytest.approx(expected["actor/ppo_kl"], abs=1e-6)
    weight, _, _ = weights_of(random, weight="token")
    expected = random.outputs[f"verl.policy_loss_vanilla[{name}|is=tis]"][dtype]
    loss, metrics = policy_loss(*args, LossConfig(), weight_N=weight)
    assert loss.item() == pytest.approx(expected["loss"], abs=near_enough)
    assert metrics["clip_fraction"].item() == pytest.approx(expected["actor/pg_clipfrac"], abs=1e-6)

    assert aggregate(random.get("vpreds"), share).item() == pytest.approx(
        random.outputs[f"verl.agg_loss[{name}]"][dtype], abs=near_enough
    )

    expected = random.outputs[f"verl.value_loss[{name}]"][dtype]
    loss, metrics = value_loss(random.get("vpreds"), random.get("values"), random.get("returns"), share, 0.5)
    assert loss.item() == pytest.approx(expected["loss"], abs=near_enough)
    assert metrics["clip_fraction"].item() == pytest.approx(expected["clipfrac"], abs=1e-6)


def test_an_older_sum_norm_forgot_the_episodes(case, golden):
    """Ours is the mended one: the older is B = 4 times it, and the others were the same."""
    random, dtype, tolerance = case
    for name, aggregation in AGGREGATIONS.items():
        old = random.outputs[f"verl_jan2026.agg_loss[{name}]"][dtype]
        factor = 4.0 if name.endswith("-norm") else 1.0
        ours = aggregate(random.get("vpreds"), share_of(random, aggregation)).item()
        assert ours * factor == pytest.approx(old, abs=max(tolerance, EPSILON) * 10)
        assert golden["cross_checks"][f"agg_loss {name} new/old ratio {dtype}"] == pytest.approx(1 / factor)


def weights_of(random: Random, **config):
    """Learner against engine: the recorded weights are exp(old_log_probs - rollout_log_probs)."""
    engine, old = random.get("rollout_log_probs"), random.get("old_log_probs")
    return importance_weights(engine, old, random.episodes, ImportanceConfig(**config))


def test_truncated_importance_weights(case):
    random, dtype, tolerance = case
    weight, keep, metrics = weights_of(random, weight="token")
    expected = random.found(random.outputs["verl.TIS_token(C=2)"][dtype])
    assert near(weight, expected, tolerance)
    assert bool(keep.all())
    assert metrics["ppo/importance_capped"] == pytest.approx(float((expected == 2.0).double().mean()))


def test_the_band_on_the_geometric_mean(case):
    """Theirs is on engine / learner: [.9, 1.1] there is [1 / 1.1, 1 / .9] for ours."""
    random, dtype, _ = case
    _, keep, metrics = weights_of(random, band=(1 / 1.1, 1 / 0.9))
    expected = random.found(random.outputs["verl.RS[seq_mean_k1|0.9_1.1]"][dtype])
    assert torch.equal(keep.double(), expected)
    assert metrics["ppo/importance_masked"] == pytest.approx(1 - float(expected.mean()))


def test_adaptive_kl_controller(golden):
    key = "verl.AdaptiveKLController(0.2,target=6,horizon=10000,n=512; kl=3,6,12,100,0,6.6)"
    controller, found = KlController(KlConfig(coef=0.2, target=6.0, horizon=10_000)), []
    for kl in (3.0, 6.0, 12.0, 100.0, 0.0, 6.6):
        controller.observe(kl, 512)
        found.append(controller.coef)
    assert found == pytest.approx(golden["random"]["outputs"][key]["python_float"], rel=1e-12)


def test_another_implementation_of_the_policy_loss(case):
    random, dtype, tolerance = case
    expected = random.outputs["openrlhf.PolicyLoss[token-mean,dual3]"][dtype]
    args = (random.get("log_probs"), random.get("old_log_probs"), random.get("advantages"))
    loss, metrics = policy_loss(*args, share_of(random, "token_mean"), LossConfig())
    assert loss.item() == pytest.approx(expected["loss"], abs=tolerance)
    assert metrics["clip_fraction"].item() == pytest.approx(expected["clip"], abs=1e-6)
    assert metrics["kl_k1"].item() == pytest.approx(expected["kl"], abs=1e-6)


def test_kl_estimates(case):
    random, dtype, tolerance = case
    logprob, reference = random.get("log_probs"), random.get("ref_log_probs")
    for name, estimate in (("k1", kl_k1), ("k2", kl_k2), ("k3", kl_k3)):
        expected = random.found(random.outputs[f"verl.kl_penalty.{name}"][dtype])
        assert near(estimate(logprob, reference), expected, tolerance)
    # Their k3+ has the value of k3 and the gradient of k2, which is what we put into the loss.
    leaf = logprob.clone().requires_grad_(True)
    kl_k2(leaf, reference).sum().backward()
    assert near(leaf.grad, random.found(random.outputs["verl.kl_penalty.k3+_grad"][dtype]), tolerance)


def test_kl_in_the_reward(case):
    """k1 on each token, and scores of 1, -1, .5 and 0 on the last; theirs is float32 inside."""
    random, dtype, _ = case
    expected = random.found(random.outputs["openrlhf.compute_reward(kl=.1)"][dtype])
    is_last = torch.ones_like(random.episodes, dtype=torch.bool)
    is_last[:-1] = random.episodes[1:] != random.episodes[:-1]
    reward = torch.zeros_like(random.get("log_probs"))
    reward[is_last] = torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=random.dtype)
    penalised = reward - 0.1 * kl_k1(random.get("log_probs"), random.get("ref_log_probs"))
    assert near(penalised, expected, 1e-7)


def test_logprobs_and_entropies(case):
    random, dtype, tolerance = case
    logits = torch.tensor(random.inputs["logits"], dtype=random.dtype)[random.mask]
    labels = torch.tensor(random.inputs["labels"])[random.mask]
    head = torch.nn.Linear(logits.shape[1], logits.shape[1], bias=False, dtype=random.dtype)
    torch.nn.init.eye_(head.weight)
    logprob, entropy = logprob_and_entropy(logits, labels, head, temperature=1.0, chunk=5)
    assert near(logprob, random.found(random.outputs["verl.logprobs_from_logits_v2"][dtype]), tolerance)
    assert near(entropy, random.found(random.outputs["verl.entropy_from_logits"][dtype]), tolerance)
    mean = random.outputs["verl.compute_entropy_loss[token-mean]"][dtype]
    assert entropy.mean().item() == pytest.approx(mean, abs=tolerance)


def test_analytic_gradients(golden):
    record = golden["analytic"]["ppo_dL_dlogp(lo=.2,hi=.28,dual_c=3; loss=per-token, N=1)"]["(ratio,A)->grad"]
    one = make_share(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool), "token_mean", 1)
    for ratio, advantage, gradient in record:
        logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        wanted = torch.tensor([float(advantage)], dtype=torch.float64)
        policy_loss(logprob, torch.zeros(1, dtype=torch.float64), wanted, one, LossConfig())[0].backward()
        assert logprob.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_kl_gradient_identities(golden):
    record = golden["analytic"]["kl_gradient_identities(on-policy expectation, exact categorical)"]
    for seed in range(3):
        world, stale = Categorical(seed), Categorical(seed, stale=True)
        names = {
            "0": torch.zeros_like(world.reverse),
            "grad RKL": world.reverse,
            "grad FKL(ref||pi)": world.forward,
            "grad RKL - grad FKL": world.reverse - world.forward,
        }
        found = {
            "k1 in reward": world.in_reward(kl_k1),
            "k3 in reward": world.in_reward(kl_k3),
            "k1 as loss": world.in_loss(kl_k1),
            "k2 as loss": world.in_loss(kl_k2),
            "k3 as loss": world.in_loss(kl_k3),
            "rho*k3 as loss, rho differentiable, any behaviour policy": stale.in_loss(
                lambda x, reference, world=stale: (x - world.sampler).exp() * kl_k3(x, reference)
            ),
        }
        assert set(found) == set(record)
        for placement, name in record.items():
            assert torch.allclose(found[placement], names[name], rtol=0, atol=1e-12), placement
