"""What public implementations computed, where our definitions are the same in kind."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from agentrl.config import AdvantageConfig, LossConfig
from agentrl.learner.advantages import boundary_gae, whiten
from agentrl.learner.logits import logprob_and_entropy
from agentrl.learner.losses import aggregate, kl_k1, kl_k2, kl_k3, make_share, policy_loss, value_loss

pytestmark = pytest.mark.shared

DTYPES = {"float64": (torch.float64, 1e-9), "float32": (torch.float32, 1e-5)}
"""Type of the inputs, and how near the outputs must come."""
EPSILON = 1e-8
"""How near in float64 where the other side adds 1e-8 to a count."""
AGGREGATIONS = {
    name.replace("_", "-"): name
    for name in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
}


@pytest.fixture
def golden(shared_data: Path) -> dict:
    return json.loads((shared_data / "ppo_golden.json").read_text())


class Random:
    """The random inputs, compacted to model tokens."""

    def __init__(self, golden: dict, dtype: torch.dtype) -> None:
        self.inputs, self.outputs, self.dtype = golden["random"]["inputs"], golden["random"]["outputs"], dtype
        self.mask = torch.tensor(self.inputs["response_mask"]) == 1
        self.turns = torch.tensor(self.inputs["turn_id"])[self.mask]
        self.episodes = torch.arange(4)[:, None].expand_as(self.mask)[self.mask]

    def get(self, name: str) -> torch.Tensor:
        return torch.tensor(self.inputs[name], dtype=self.dtype)[self.mask]

    def found(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[self.mask]

    def share(self, aggregation: str):
        width = len(self.inputs["values"][0])
        return make_share(self.episodes, torch.ones_like(self.episodes, dtype=torch.bool), aggregation, width)


@pytest.fixture(params=sorted(DTYPES))
def case(request, golden):
    return Random(golden, DTYPES[request.param][0]), request.param, DTYPES[request.param][1]


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((found.double() - expected).abs().max() <= tolerance)


def gae(
    random: Random, rewards: str, pairs: tuple[float, float, float, float], *, bootstrap: bool, lambda_value: float
):
    config = AdvantageConfig(
        gamma_token=pairs[0],
        lambda_token=pairs[1],
        gamma_turn=pairs[2],
        lambda_turn=pairs[3],
        lambda_value=lambda_value,
    )
    final = torch.tensor(random.inputs["bootstrap"], dtype=random.dtype)
    return boundary_gae(
        random.get(f"rewards_{rewards}"),
        random.get("values"),
        random.turns,
        random.episodes,
        final if bootstrap else torch.zeros(4),
        config,
    )


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.95), (0.9, 0.5)])
@pytest.mark.parametrize("rewards", ["turn_end", "dense"])
def test_action_gae(case, gamma, lam, rewards):
    random, dtype, tolerance = case
    key = f"[{rewards}]/g{gamma}_l{lam}"
    pairs = (gamma, lam, gamma, lam)
    ended, returns = gae(random, rewards, pairs, bootstrap=False, lambda_value=lam)
    verl = random.outputs[f"verl.gae{key}"][dtype]
    assert near(returns, random.found(verl["returns_masked"]), tolerance)
    assert near(whiten(ended, "full", 1e-12)[0], random.found(verl["adv_whitened"]), max(tolerance, EPSILON))
    assert near(ended, random.found(random.outputs[f"areal.gae_inline{key}"][dtype]["adv_masked"]), tolerance)
    cleanrl = random.outputs[f"cleanrl.gae_on_action_tokens{key}"][dtype]
    assert near(ended, random.found(cleanrl["terminated"]), tolerance)

    cut, returns = gae(random, rewards, pairs, bootstrap=True, lambda_value=lam)
    assert near(cut, random.found(random.outputs[f"areal.gae_inline_boot{key}"][dtype]["adv_masked"]), tolerance)
    assert near(cut, random.found(cleanrl["truncated_boot"]), tolerance)
    sb3 = random.found(random.outputs[f"sb3.gae_on_action_tokens{key}"][dtype]["truncated_boot"])
    assert near(cut, sb3, max(tolerance, 2e-7))
    if rewards == "turn_end":
        expected = random.outputs[f"ref.a_with_boot{key}"][dtype]
        assert near(cut, random.found(expected["adv"]), tolerance)
        assert near(returns, random.found(expected["returns"]), tolerance)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.95), (0.9, 0.5)])
def test_boundary_gae_and_the_first_tokens_of_turn_gae(case, gamma, lam):
    random, dtype, tolerance = case
    key = f"[turn_end]/g{gamma}_l{lam}"
    expected = random.outputs[f"ref.estar_with_boot{key}"][dtype]
    found, _ = gae(random, "turn_end", (1.0, 1.0, gamma, lam), bootstrap=True, lambda_value=1.0)
    assert near(found, random.found(expected["adv"]), tolerance)
    assert near(found + random.get("values"), random.found(expected["returns"]), tolerance)
    turn_level = random.found(random.outputs[f"ref.c_first_with_boot{key}"][dtype]["adv"])
    first = torch.ones_like(random.turns, dtype=torch.bool)
    first[1:] = (random.turns[1:] != random.turns[:-1]) | (random.episodes[1:] != random.episodes[:-1])
    assert near(found[first], turn_level[first], tolerance)
    without, _ = gae(random, "turn_end", (1.0, 1.0, gamma, lam), bootstrap=False, lambda_value=1.0)
    vagen = random.found(random.outputs[f"vagen.no_concat_gae_first{key}"][dtype]["adv_unwhitened"])
    assert near(without[first], vagen[first], tolerance)


def test_naive_gae_agrees_only_where_nothing_is_lost(case):
    """Stepping through observations is harmless with gamma = lambda = 1 and wrong otherwise: the trap we avoid."""
    random, dtype, tolerance = case
    for upstream in ("trl.gae_inline", "openrlhf.gae", "slime.vanilla_gae"):
        ours, _ = gae(random, "turn_end", (1.0, 1.0, 1.0, 1.0), bootstrap=False, lambda_value=1.0)
        assert near(ours, random.found(random.outputs[f"{upstream}[turn_end]/g1.0_l1.0"][dtype]["adv"]), tolerance)
        ours, _ = gae(random, "turn_end", (0.9, 0.5, 0.9, 0.5), bootstrap=False, lambda_value=1.0)
        theirs = random.found(random.outputs[f"{upstream}[turn_end]/g0.9_l0.5"][dtype]["adv"])
        assert not near(ours, theirs, 1e-2)


def test_whitening(case):
    """Theirs add 1e-8 to the variance, to the count, or to both; the biased one divides by n."""
    random, dtype, tolerance = case
    x = random.get("advantages")
    ours, n, variance = whiten(x, "full", 1e-12)[0], x.numel(), float(x.double().var())
    damped = ours * math.sqrt(variance / (variance + 1e-8))
    for key in ("verl.masked_whiten", "trl.masked_whiten"):
        assert near(damped, random.found(random.outputs[key][dtype]), tolerance)
    biased = random.found(random.outputs["openrlhf.batch_norm_adv(biased)"][dtype])
    assert near(ours * math.sqrt(n / (n - 1)), biased, max(tolerance, EPSILON))
    # Theirs divides the centred values and adds the mean back; ours only divides.
    noshift = random.found(random.outputs["verl.masked_whiten_noshift"][dtype])
    assert near(damped + float(x.mean()), noshift, tolerance)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_losses(case, name):
    random, dtype, tolerance = case
    share = random.share(AGGREGATIONS[name])
    near_enough = max(tolerance, EPSILON) * 10
    expected = random.outputs[f"verl.policy_loss_vanilla[{name}|is=none]"][dtype]
    args = (random.get("log_probs"), random.get("old_log_probs"), random.get("advantages"), share)
    loss, metrics = policy_loss(*args, LossConfig())
    assert loss.item() == pytest.approx(expected["loss"], abs=near_enough)
    assert metrics["clip_fraction"].item() == pytest.approx(expected["actor/pg_clipfrac"], abs=1e-6)
    assert metrics["clip_fraction_dual"].item() == pytest.approx(expected["actor/pg_clipfrac_lower"], abs=1e-6)
    assert metrics["kl_k1"].item() == pytest.approx(expected["actor/ppo_kl"], abs=1e-6)
    tis = random.found(random.outputs["verl.TIS_token(C=2)"][dtype]).to(random.dtype)
    each = _token_losses(*args[:3]) * tis
    expected = random.outputs[f"verl.policy_loss_vanilla[{name}|is=tis]"][dtype]
    assert aggregate(each, share).item() == pytest.approx(expected["loss"], abs=near_enough)

    assert aggregate(random.get("vpreds"), share).item() == pytest.approx(
        random.outputs[f"verl.agg_loss[{name}]"][dtype], abs=near_enough
    )

    expected = random.outputs[f"verl.value_loss[{name}]"][dtype]
    loss, metrics = value_loss(random.get("vpreds"), random.get("values"), random.get("returns"), share, 0.5)
    assert loss.item() == pytest.approx(expected["loss"], abs=near_enough)
    assert metrics["clip_fraction"].item() == pytest.approx(expected["clipfrac"], abs=1e-6)


def _token_losses(logprob, old, advantage):
    """Each token's loss, as the aggregated loss of a minibatch of one."""
    one = make_share(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool), "token_mean", 1)
    singles = zip(logprob.split(1), old.split(1), advantage.split(1), strict=True)
    return torch.stack([policy_loss(*single, one, LossConfig())[0] for single in singles])


def test_another_implementation_of_the_policy_loss(case):
    random, dtype, tolerance = case
    expected = random.outputs["openrlhf.PolicyLoss[token-mean,dual3]"][dtype]
    args = (random.get("log_probs"), random.get("old_log_probs"), random.get("advantages"))
    loss, metrics = policy_loss(*args, random.share("token_mean"), LossConfig())
    assert loss.item() == pytest.approx(expected["loss"], abs=tolerance)
    assert metrics["clip_fraction"].item() == pytest.approx(expected["clip"], abs=1e-6)
    assert metrics["kl_k1"].item() == pytest.approx(expected["kl"], abs=1e-6)


def test_kl_estimates(case):
    random, dtype, tolerance = case
    logprob, reference = random.get("log_probs"), random.get("ref_log_probs")
    for name, estimate in (("k1", kl_k1), ("k2", kl_k2), ("k3", kl_k3)):
        expected = random.found(random.outputs[f"verl.kl_penalty.{name}"][dtype])
        assert near(estimate(logprob, reference), expected, tolerance)


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


def test_reward_lands_on_the_last_token_and_not_one_past_it(golden):
    record = golden["analytic"]["trl_reward_one_past_last_token"]
    values = torch.tensor(record["v"], dtype=torch.float64)
    rewards = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    zeros = torch.zeros(3, dtype=torch.int64)
    lam, gamma = record["lam"], record["gamma"]
    config = AdvantageConfig(gamma_token=gamma, gamma_turn=gamma, lambda_token=lam, lambda_turn=lam)
    found, _ = boundary_gae(rewards, values, zeros, zeros, torch.zeros(1), config)
    assert found.tolist() == pytest.approx(record["reward_on_last_token_adv"], abs=1e-12)


def test_worked_example(golden):
    inputs, outputs = golden["worked_example"]["inputs"], golden["worked_example"]["outputs"]
    mask = torch.tensor(inputs["action_mask"]) == 1
    arrays = [
        torch.tensor(inputs[name], dtype=torch.float64)[mask] for name in ("rewards", "values_state_before_token")
    ]
    turns = torch.tensor(inputs["turn_id"])[mask]
    settings = {
        "a_action_only": (0.9, 0.5, 0.9, 0.5, 0.5),
        "estar_boundary_ltok0.5": (1.0, 0.5, 0.9, 0.5, 0.5),
        "estar_boundary_ltok1": (1.0, 1.0, 0.9, 0.5, None),
        "a_decoupled_lampi0.5_lamv1": (0.9, 0.5, 0.9, 0.5, 1.0),
    }
    for name, (gamma_token, lambda_token, gamma_turn, lambda_turn, lambda_value) in settings.items():
        for end, bootstrap in (("terminated", 0.0), ("truncated", 0.9)):
            config = AdvantageConfig(
                gamma_token=gamma_token,
                lambda_token=lambda_token,
                gamma_turn=gamma_turn,
                lambda_turn=lambda_turn,
                lambda_value=1.0 if lambda_value is None else lambda_value,
            )
            ids, final = torch.zeros_like(turns), torch.tensor([bootstrap], dtype=torch.float64)
            advantages, returns = boundary_gae(*arrays, turns, ids, final, config)
            expected = outputs[f"{name}/{end}"]
            assert advantages.tolist() == pytest.approx(
                torch.tensor(expected["advantages"], dtype=torch.float64)[mask].tolist(), abs=1e-12
            )
            if lambda_value is not None:
                assert returns.tolist() == pytest.approx(
                    torch.tensor(expected["returns"], dtype=torch.float64)[mask].tolist(), abs=1e-12
                )
