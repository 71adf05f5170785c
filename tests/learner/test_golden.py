"""What public implementations computed of advantages and returns, where our definitions are the same in kind."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from golden_records import ACCOUNTS, CREDIT, DTYPES, EPSILON, LOSSES, Random, account_of, naive_gae, near

from agentrl.config import AdvantageConfig
from agentrl.learner.advantages import action_gae, boundary_gae, turn_gae, turn_starts, whiten
from agentrl.learner.critic_free import reinforce_pp

pytestmark = pytest.mark.shared

F64 = torch.float64
PAIRS = [(1.0, 1.0), (1.0, 0.95), (0.99, 0.95), (0.9, 0.5)]
pairs = pytest.mark.parametrize(("gamma", "lam"), PAIRS)
both_rewards = pytest.mark.parametrize("rewards", ["turn_end", "dense"])


@pytest.fixture
def golden(shared_data: Path) -> dict:
    return json.loads((shared_data / "ppo_golden.json").read_text())


@pytest.fixture(params=sorted(DTYPES))
def case(request, golden):
    return Random(golden, DTYPES[request.param][0]), request.param, DTYPES[request.param][1]


@pytest.mark.parametrize("section", sorted(ACCOUNTS))
def test_every_record_is_accounted_for(golden, section):
    records = golden[section]["outputs"] if section in {"worked_example", "random"} else golden[section]
    found = {key: account_of(section, key) for key in records}
    assert [key for key, prefix in found.items() if prefix is None] == []
    assert set(ACCOUNTS[section]) == set(found.values()), "an account of no record"
    sources = {file: (Path(__file__).parent / file).read_text() for file in (CREDIT, LOSSES)}
    unread = [p for p, file in ACCOUNTS[section].items() if file in sources and p.rstrip("[ ") not in sources[file]]
    assert unread == [], "no comparison names these"


def test_no_section_of_the_records_is_new(golden):
    """Of `learnability_cpu` only the thresholds are ours: they are runs of another learner."""
    assert set(golden) == {"meta", "learnability_cpu", *ACCOUNTS}


def config_of(gamma, lam, lambda_value=None, token=(1.0, 1.0)):
    return AdvantageConfig(
        gamma_token=token[0],
        lambda_token=token[1],
        gamma_turn=gamma,
        lambda_turn=lam,
        lambda_value=lam if lambda_value is None else lambda_value,
    )


def ends_of(random: Random, *, cut: bool) -> torch.Tensor:
    return torch.tensor(random.inputs["bootstrap"], dtype=random.dtype) if cut else torch.zeros(4, dtype=random.dtype)


def action(random: Random, rewards: str, config: AdvantageConfig, *, cut: bool):
    rewards_N = random.get(f"rewards_{rewards}")
    return action_gae(rewards_N, random.get("values"), random.episodes, ends_of(random, cut=cut), config)


def by_turns(gae, random: Random, config: AdvantageConfig, *, cut: bool):
    arrays = random.get("rewards_turn_end"), random.get("values"), random.turns, random.episodes
    return gae(*arrays, ends_of(random, cut=cut), config)


@pairs
@both_rewards
def test_action_gae(case, gamma, lam, rewards):
    random, dtype, tolerance = case
    key = f"[{rewards}]/g{gamma}_l{lam}"
    ended, returns = action(random, rewards, config_of(gamma, lam), cut=False)
    verl = random.outputs[f"verl.gae{key}"][dtype]
    assert near(returns, random.found(verl["returns_masked"]), tolerance)
    assert near(whiten(ended, "full", 1e-12)[0], random.found(verl["adv_whitened"]), max(tolerance, EPSILON))
    areal = random.outputs["areal.gae_inline" + key][dtype]
    assert near(ended, random.found(areal["adv_masked"]), tolerance)
    cleanrl = random.outputs[f"cleanrl.gae_on_action_tokens{key}"][dtype]
    assert near(ended, random.found(cleanrl["terminated"]), tolerance)

    cut, returns = action(random, rewards, config_of(gamma, lam), cut=True)
    assert near(cut, random.found(random.outputs[f"areal.gae_inline_boot{key}"][dtype]["adv_masked"]), tolerance)
    assert near(cut, random.found(cleanrl["truncated_boot"]), tolerance)
    # Theirs rounds gamma * lambda to float32.
    sb3 = random.found(random.outputs[f"sb3.gae_on_action_tokens{key}"][dtype]["truncated_boot"])
    assert near(cut, sb3, max(tolerance, 2e-7))
    if rewards == "turn_end":
        expected = random.outputs[f"ref.a_with_boot{key}"][dtype]
        assert near(cut, random.found(expected["adv"]), tolerance)
        assert near(returns, random.found(expected["returns"]), tolerance)


@pairs
def test_boundary_gae(case, gamma, lam):
    random, dtype, tolerance = case
    expected = random.outputs[f"ref.estar_with_boot[turn_end]/g{gamma}_l{lam}"][dtype]
    found, _ = by_turns(boundary_gae, random, config_of(gamma, lam), cut=True)
    assert near(found, random.found(expected["adv"]), tolerance)
    assert near(found + random.get("values"), random.found(expected["returns"]), tolerance)
    if (gamma, lam) == (1.0, 1.0):
        turn_then_token = random.outputs[f"ref.e_with_boot[turn_end]/g{gamma}_l{lam}"][dtype]
        assert near(found, random.found(turn_then_token["adv"]), tolerance)


@pairs
def test_turn_gae(case, gamma, lam):
    random, dtype, tolerance = case
    key = f"[turn_end]/g{gamma}_l{lam}"
    cut, returns = by_turns(turn_gae, random, config_of(gamma, lam), cut=True)
    expected = random.outputs[f"ref.c_first_with_boot{key}"][dtype]
    assert near(cut, random.found(expected["adv"]), tolerance)
    start_N = turn_starts(random.turns, random.episodes)
    assert near(returns[start_N], random.found(expected["returns"])[start_N], tolerance)
    ended, _ = by_turns(turn_gae, random, config_of(gamma, lam), cut=False)
    vagen = random.outputs[f"vagen.no_concat_gae_first{key}"][dtype]["adv_unwhitened"]
    assert near(ended, random.found(vagen), tolerance)
    boundary, _ = by_turns(boundary_gae, random, config_of(gamma, lam), cut=True)
    assert near(boundary[start_N], cut[start_N], tolerance)


def naive(random: Random, rewards: str, gamma: float, lam: float, keep_BT: torch.Tensor) -> torch.Tensor:
    """The control over all rows; rewards and values are zeroed where `keep_BT` is False."""
    rewards_BT, values_BT = (
        torch.where(keep_BT, random.grid(name), 0.0).tolist() for name in (f"rewards_{rewards}", "values")
    )
    rows = zip(rewards_BT, values_BT, strict=True)
    return torch.tensor([naive_gae(row, values, 0.0, gamma, lam) for row, values in rows], dtype=F64)


@pairs
@both_rewards
def test_naive_gae_is_what_several_compute_and_agrees_with_ours_only_where_nothing_decays(case, gamma, lam, rewards):
    """Stepping through observations, with their own values (b) or with zeros (b2): the trap that we avoid."""
    random, dtype, tolerance = case
    key = f"[{rewards}]/g{gamma}_l{lam}"
    every_BT = torch.ones_like(random.mask)
    trl, slime, skyrl, openrlhf = (
        random.outputs[f"{name}{key}"][dtype]
        for name in ("trl.gae_inline", "slime.vanilla_gae", "skyrl.gae", "openrlhf.gae")
    )
    b_BT = naive(random, rewards, gamma, lam, every_BT)
    b2_BT = naive(random, rewards, gamma, lam, random.mask)
    for theirs in (trl, slime):
        assert near(b_BT, torch.tensor(theirs["adv"], dtype=F64), tolerance)
        assert near(b_BT + random.grid("values"), torch.tensor(theirs["returns"], dtype=F64), tolerance)
    assert near((b_BT + random.grid("values"))[random.mask], random.found(skyrl["returns"]), tolerance)
    white_N = whiten(b_BT[random.mask], "full", 1e-12)[0]
    assert near(white_N, random.found(skyrl["adv_whitened"]), max(tolerance, EPSILON))
    assert near(b2_BT[random.mask], random.found(openrlhf["adv"]), tolerance)
    assert near(b2_BT[random.mask] + random.get("values"), random.found(openrlhf["returns"]), tolerance)

    ours, _ = action(random, rewards, config_of(gamma, lam), cut=False)
    for control_BT in (b_BT, b2_BT):
        same = near(ours, control_BT[random.mask], max(tolerance, 1e-9))
        assert same == ((gamma, lam) == (1.0, 1.0))
        assert same or not near(ours, control_BT[random.mask], 1e-2)


def test_reinforce_pp(case, golden):
    """Upstream once began anew at each observation, so that a turn earned nothing from those after it."""
    random, dtype, tolerance = case
    record = random.outputs["verl.reinforce_pp_returns"][dtype]
    ours = reinforce_pp(random.get("rewards_turn_end"), random.episodes, 1.0)
    assert near(ours, random.found(record["new"]), tolerance)
    each_turn = turn_starts(random.turns, random.episodes).long().cumsum(0) - 1
    reset = reinforce_pp(random.get("rewards_turn_end"), each_turn, 1.0)
    assert near(reset, random.found(record["old_jan2026"]), tolerance)
    apart = golden["cross_checks"][f"verl REINFORCE++ new vs Jan-2026 multi-turn returns {dtype}"]
    assert float((ours - reset).abs().max()) == pytest.approx(apart, abs=1e-6)


def test_whitening(case, golden):
    """Theirs add 1e-8 to the variance, to the count, or to both; the biased one divides by n."""
    random, dtype, tolerance = case
    x = random.get("advantages")
    (ours, metrics), n, variance = whiten(x, "full", 1e-12), x.numel(), float(x.double().var())
    damped = ours * math.sqrt(variance / (variance + 1e-8))
    for key in ("verl.masked_whiten", "trl.masked_whiten"):
        assert near(damped, random.found(random.outputs[key][dtype]), tolerance)
    mean, theirs = random.outputs["verl.masked_mean_var"][dtype]
    assert metrics["ppo/advantage_mean"] == pytest.approx(mean, abs=max(tolerance, EPSILON))
    assert metrics["ppo/advantage_std"] ** 2 == pytest.approx(theirs, abs=max(tolerance, EPSILON))
    biased = random.found(random.outputs["openrlhf.batch_norm_adv(biased)"][dtype])
    assert near(ours * math.sqrt(n / (n - 1)), biased, max(tolerance, EPSILON))
    ratio = golden["cross_checks"][f"openrlhf(biased var) vs verl(unbiased) ratio {dtype}"]
    assert ratio == pytest.approx(math.sqrt(n / (n - 1)), abs=1e-6)
    # Theirs divides the centred values and adds the mean back; ours only divides.
    noshift = random.found(random.outputs["verl.masked_whiten_noshift"][dtype])
    assert near(damped + float(x.mean()), noshift, tolerance)
    scaled = whiten(x, "scale", 1e-12)[0]
    assert near(scaled, ours + float(x.mean()) / math.sqrt(variance), tolerance)


def test_a_reward_on_an_observation_is_lost_upstream_and_cannot_be_written_here(golden):
    """A turn without a sampled token refuses a reward (tests of the types); flat arrays have no place for one."""
    for dtype in DTYPES:
        key = f"verl: effect of reward 5.0 on an obs token {dtype} (0 = silently dropped)"
        assert golden["cross_checks"][key] == 0.0


def test_reward_lands_on_the_last_token_and_not_one_past_it(golden):
    record = golden["analytic"]["trl_reward_one_past_last_token"]
    values, rewards = torch.tensor(record["v"], dtype=F64), torch.tensor([0.0, 0.0, 1.0], dtype=F64)
    zeros = torch.zeros(3, dtype=torch.int64)
    config = config_of(record["gamma"], record["lam"], token=(record["gamma"], record["lam"]))
    found, _ = boundary_gae(rewards, values, zeros, zeros, torch.zeros(1), config)
    assert found.tolist() == pytest.approx(record["reward_on_last_token_adv"], abs=1e-12)
    shifted = naive_gae([0.0, 0.0, 0.0, 1.0], [*record["v"], 0.4], 0.0, record["gamma"], record["lam"])
    assert shifted[:3] == pytest.approx(record["trl_p1_V0.4_adv"], abs=1e-12)


WORKED = {
    "a_action_only": (boundary_gae, config_of(0.9, 0.5, token=(0.9, 0.5))),
    "estar_boundary_ltok0.5": (boundary_gae, config_of(0.9, 0.5, token=(1.0, 0.5))),
    "estar_boundary_ltok1": (boundary_gae, config_of(0.9, 0.5)),
    "a_decoupled_lampi0.5_lamv1": (boundary_gae, config_of(0.9, 0.5, 1.0, token=(0.9, 0.5))),
    "c_turn_level_first_anchor": (turn_gae, config_of(0.9, 0.5)),
}


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("name", sorted(WORKED))
def test_worked_example(golden, name, end):
    inputs, expected = golden["worked_example"]["inputs"], golden["worked_example"]["outputs"][f"{name}/{end}"]
    mask = torch.tensor(inputs["action_mask"]) == 1
    rewards, values = (torch.tensor(inputs[key], dtype=F64)[mask] for key in ("rewards", "values_state_before_token"))
    turns = torch.tensor(inputs["turn_id"])[mask]
    zeros = torch.zeros_like(turns)
    final = torch.tensor([inputs["bootstrap_value_if_truncated"] if end == "truncated" else 0.0], dtype=F64)
    gae, config = WORKED[name]
    advantages, returns = gae(rewards, values, turns, zeros, final, config)
    assert near(advantages, torch.tensor(expected["advantages"], dtype=F64)[mask], 1e-12)
    wanted = [math.nan if x is None else x for x in expected["returns"]]
    targets = torch.tensor(wanted, dtype=F64)[mask]
    if name == "c_turn_level_first_anchor":  # Theirs has targets at first tokens alone.
        assert torch.equal(~targets.isnan(), turn_starts(turns, zeros))
        returns, targets = returns[~targets.isnan()], targets[~targets.isnan()]
    if name == "estar_boundary_ltok1":  # Theirs keeps lambda_token 1 in the targets; ours has one lambda there.
        returns = advantages + values
    assert near(returns, targets, 1e-12)
    if name == "a_action_only":
        preset = action_gae(rewards, values, zeros, final, config_of(0.9, 0.5))
        assert near(preset[0], advantages, 0.0)
        assert near(preset[1], returns, 0.0)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("name", ["b_naive_all_tokens", "b2_naive_obs_values_zeroed"])
def test_worked_example_of_the_naive_controls(golden, name, end):
    inputs, expected = golden["worked_example"]["inputs"], golden["worked_example"]["outputs"][f"{name}/{end}"]
    n = int(sum(inputs["valid_mask"]))
    values = inputs["values_state_before_token"][:n]
    if name == "b2_naive_obs_values_zeroed":
        values = [value * mask for value, mask in zip(values, inputs["action_mask"][:n], strict=True)]
    final = inputs["bootstrap_value_if_truncated"] if end == "truncated" else 0.0
    found = naive_gae(inputs["rewards"][:n], values, final, inputs["gamma"], inputs["lambda"])
    assert found == pytest.approx(expected["advantages"][:n], abs=1e-12)
    assert [a + v for a, v in zip(found, values, strict=True)] == pytest.approx(expected["returns"][:n], abs=1e-12)
