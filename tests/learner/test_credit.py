"""From rollouts to targets: what each estimator gives by hand, ends, groups, masks, and what must change nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from agentrl.config import AdvantageConfig, PpoConfig
from agentrl.errors import InvariantError
from agentrl.learner.batch import Rollout, read_rollout
from agentrl.learner.credit import Scored, Targets, make_targets, mean_return
from agentrl.types import EndReason, Task

F64 = torch.float64
WITH_CRITIC, CRITIC_FREE = ("boundary", "action", "turn"), ("grpo", "rloo", "reinforce_pp")
PLAIN = {"gamma_turn": 1.0, "lambda_turn": 1.0, "whiten": "none"}


def discount(estimator: str) -> float:
    """0.9, or 1 for those that compare whole returns and refuse a discount."""
    return 1.0 if estimator in {"grpo", "rloo"} else 0.9


def ppo(estimator="boundary", min_group_std=None, **advantage):
    return PpoConfig(
        advantage=AdvantageConfig(estimator=estimator, **{**PLAIN, **advantage}), min_group_std=min_group_std
    )


def rollout_of(trajectories) -> Rollout:
    return read_rollout(trajectories, context=10**6, vocab_size=24)


def scored_of(rollout, values=None, finals=None) -> Scored:
    blank = Scored.blank(rollout)
    value_N = blank.value_N if values is None else torch.tensor(values, dtype=F64)
    return replace(blank, value_N=value_N, final_B=blank.final_B if finals is None else torch.tensor(finals, dtype=F64))


@pytest.fixture
def attempts(kit):
    """Makes attempts: (task, rewards of the turns' 2-token messages, and perhaps the end)."""

    def make(*made):
        trajectories = []
        for i, (task, rewards, *end) in enumerate(made):
            turns = [(3, 2, reward) for reward in rewards]
            reason = end[0] if end else EndReason.SUBMITTED
            trailing = 2 if reason is EndReason.CUT else 0
            trajectory = kit.trajectory(turns, seed=i, end=reason, trailing=trailing)
            trajectories.append(replace(trajectory, task=Task(task, "toy", "")))
        return trajectories

    return make


def test_each_estimator_by_hand(attempts):
    """Two attempts at one task, of returns 3 (turns of 1 and 2) and 1; values 1 at first tokens, 5 at second ones."""
    rollout = rollout_of(attempts(("a", [1.0, 2.0]), ("a", [1.0])))
    scored = scored_of(rollout, [1.0, 5.0] * 3)
    expected = {
        "boundary": ([2.0, -2.0, 1.0, -3.0, 0.0, -4.0], [3.0, 3.0, 2.0, 2.0, 1.0, 1.0]),
        "action": ([2.0, -2.0, 1.0, -3.0, 0.0, -4.0], [3.0, 3.0, 2.0, 2.0, 1.0, 1.0]),
        "turn": ([2.0, 2.0, 1.0, 1.0, 0.0, 0.0], [3.0, 3.0, 2.0, 2.0, 1.0, 1.0]),
        "grpo": ([math.sqrt(0.5)] * 4 + [-math.sqrt(0.5)] * 2, [3.0] * 4 + [1.0] * 2),
        "rloo": ([2.0] * 4 + [-2.0] * 2, [3.0] * 4 + [1.0] * 2),
        "reinforce_pp": ([3.0, 3.0, 2.0, 2.0, 1.0, 1.0], [3.0, 3.0, 2.0, 2.0, 1.0, 1.0]),
    }
    starts, every, none = [True, False] * 3, [True] * 6, [False] * 6
    for estimator, (advantages, returns) in expected.items():
        targets, metrics = make_targets(rollout, scored, 0.0, ppo(estimator))
        assert targets.advantage_N.tolist() == pytest.approx(advantages), estimator
        assert targets.return_N.tolist() == pytest.approx(returns), estimator
        assert targets.weight_N.tolist() == [1.0] * 6
        assert targets.keep_N.tolist() == every
        wanted = none if estimator in CRITIC_FREE else starts if estimator == "turn" else every
        assert targets.value_keep_N.tolist() == wanted, estimator
        assert ("critic/explained_variance" in metrics) == (estimator in WITH_CRITIC)
        assert metrics["ppo/advantage_mean"] == pytest.approx(sum(advantages) / 6)
    dr_grpo, _ = make_targets(rollout, scored, 0.0, ppo("grpo", group_scale=False))
    assert dr_grpo.advantage_N.tolist() == [1.0] * 4 + [-1.0] * 2


def test_discounts_and_lambdas_reach_each_estimator(attempts):
    """One episode of turns that earn 1 and 2, values 0, gamma .5: per token for `action` and `reinforce_pp`."""
    rollout = rollout_of(attempts(("a", [1.0, 2.0])))
    for estimator, returns, advantages in (
        ("boundary", [2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]),
        ("turn", [2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]),
        ("action", [0.75, 1.5, 1.0, 2.0], [0.0, 1.0, 0.0, 2.0]),
        ("reinforce_pp", [0.75, 1.5, 1.0, 2.0], [0.75, 1.5, 1.0, 2.0]),
    ):
        config = ppo(estimator, gamma_turn=0.5, lambda_turn=0.0)
        targets, _ = make_targets(rollout, scored_of(rollout), 0.0, config)
        assert targets.return_N.tolist() == pytest.approx(returns), estimator
        assert targets.advantage_N.tolist() == pytest.approx(advantages), estimator


@pytest.mark.parametrize("estimator", WITH_CRITIC)
@pytest.mark.parametrize("end", [reason for reason in EndReason if reason.in_loss])
def test_the_final_value_stands_for_the_rest_at_ends_that_ask_for_it_and_at_no_other(attempts, estimator, end):
    rollout = rollout_of(attempts(("a", [1.0], end)))
    targets, _ = make_targets(rollout, scored_of(rollout, finals=[10.0]), 0.0, ppo(estimator))
    assert targets.return_N.tolist() == [11.0 if end is EndReason.CUT else 1.0] * 2


@pytest.mark.parametrize("estimator", CRITIC_FREE)
def test_estimators_without_a_critic_refuse_episodes_that_were_cut(attempts, estimator):
    rollout = rollout_of(attempts(("a", [1.0]), ("a", [0.0], EndReason.CUT)))
    with pytest.raises(InvariantError, match=r"1 of 2 episodes were cut \(e1\)"):
        make_targets(rollout, scored_of(rollout), 0.0, ppo(estimator))


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_group_under_two_leaves_the_policys_loss_and_is_counted(attempts, estimator):
    """The third attempt at b is alone after its twin ended in an error."""
    made = attempts(("a", [0.0]), ("a", [1.0]), ("b", [5.0]), ("b", [1.0], EndReason.ENV_ERROR), ("c", [1.0]))
    rollout = rollout_of(made)
    targets, metrics = make_targets(rollout, scored_of(rollout), 0.0, ppo(estimator, whiten="full"))
    assert targets.keep_N.tolist() == [True] * 4 + [False] * 4
    assert targets.advantage_N[4:].tolist() == [0.0] * 4
    assert targets.advantage_N[:4].sum() == pytest.approx(0.0)
    assert float(targets.advantage_N[:4].std()) == pytest.approx(1.0)
    assert metrics["ppo/groups_too_small"] == 2.0


def test_attempts_are_compared_within_their_task_wherever_they_lie(attempts):
    """Task a earns 0 and 2, task b 10 and 14, collected in turns."""
    rollout = rollout_of(attempts(("a", [0.0]), ("b", [10.0]), ("a", [2.0]), ("b", [14.0])))
    targets, _ = make_targets(rollout, scored_of(rollout), 0.0, ppo("rloo"))
    assert targets.advantage_N.tolist() == [-2.0, -2.0, -4.0, -4.0, 2.0, 2.0, 4.0, 4.0]
    targets, _ = make_targets(rollout, scored_of(rollout), 0.0, ppo("grpo", group_scale=False))
    assert targets.advantage_N.tolist() == [-1.0, -1.0, -2.0, -2.0, 1.0, 1.0, 2.0, 2.0]


def test_other_estimators_need_no_groups(attempts):
    rollout = rollout_of(attempts(("a", [0.0]), ("b", [1.0])))
    for estimator in (*WITH_CRITIC, "reinforce_pp"):
        targets, metrics = make_targets(rollout, scored_of(rollout), 0.0, ppo(estimator, min_group_std=0.5))
        assert targets.keep_N.all()
        assert metrics["ppo/groups_filtered"] == 0.0
        assert "ppo/groups_too_small" not in metrics


@pytest.mark.parametrize("estimator", [*WITH_CRITIC, *CRITIC_FREE])
def test_groups_without_spread_leave_the_policys_loss_and_the_whitening_but_not_the_critics(attempts, estimator):
    """Group a deviates by .14, b by nothing (.1 + .1 + .1 is not .3 in floating point), c by .71."""
    made = attempts(
        ("a", [0.0]), ("a", [0.2]), ("b", [0.1]), ("b", [0.1]), ("b", [0.1]), ("c", [1.0]), ("c", [0.0])
    )  # fmt: skip
    rollout = rollout_of(made)
    for least, kept in ((None, "abc"), (0.0, "ac"), (0.15, "c"), (1.0, "")):
        config = ppo(estimator, min_group_std=least, whiten="full")
        targets, metrics = make_targets(rollout, scored_of(rollout), 0.0, config)
        expected = [name in kept for name in "aabbbcc" for _ in range(2)]
        assert targets.keep_N.tolist() == expected
        assert targets.advantage_N[~targets.keep_N].tolist() == [0.0] * expected.count(False)
        if kept:
            assert float(targets.advantage_N[targets.keep_N].mean()) == pytest.approx(0.0, abs=1e-12)
            assert float(targets.advantage_N.abs().max()) > 0.5
        assert metrics.get("ppo/groups_filtered", 0.0) == 3 - len(kept)
        if estimator in WITH_CRITIC:
            assert targets.value_keep_N.any()
            assert torch.equal(
                targets.return_N, make_targets(rollout, scored_of(rollout), 0.0, ppo(estimator))[0].return_N
            )


def test_a_cut_attempt_is_in_no_groups_deviation_and_leaves_with_its_group(attempts):
    made = attempts(("a", [1.0]), ("a", [1.0]), ("a", [9.0], EndReason.CUT), ("b", [0.0]), ("b", [3.0], EndReason.CUT))
    rollout = rollout_of(made)
    targets, metrics = make_targets(rollout, scored_of(rollout), 0.0, ppo(min_group_std=0.0))
    assert targets.keep_N.tolist() == [False] * 6 + [True] * 4
    assert metrics["ppo/groups_filtered"] == 1.0


def test_a_penalty_is_in_the_returns_that_are_compared_but_not_in_what_makes_a_spread(attempts):
    """Two attempts earn 1; penalties of .1 and .3 a token make their returns .8 and .4."""
    rollout = rollout_of(attempts(("a", [1.0]), ("a", [1.0])))
    penalty_N = torch.tensor([0.1, 0.1, 0.3, 0.3], dtype=F64)
    targets, _ = make_targets(rollout, scored_of(rollout), penalty_N, ppo("rloo"))
    assert targets.return_N.tolist() == pytest.approx([0.8, 0.8, 0.4, 0.4])
    assert targets.advantage_N.tolist() == pytest.approx([0.4, 0.4, -0.4, -0.4])
    filtered, metrics = make_targets(rollout, scored_of(rollout), penalty_N, ppo("rloo", min_group_std=0.0))
    assert not filtered.keep_N.any()
    assert metrics["ppo/groups_filtered"] == 1.0
    each, _ = make_targets(rollout, scored_of(rollout), penalty_N, ppo("reinforce_pp"))
    assert each.advantage_N.tolist() == pytest.approx([0.8, 0.9, 0.4, 0.7])


def test_reinforce_pp_is_whitened_over_the_batch_where_nothing_else_is_said(attempts):
    rollout = rollout_of(attempts(("a", [1.0, 2.0]), ("b", [-3.0])))
    config = PpoConfig(advantage=AdvantageConfig(estimator="reinforce_pp"))
    targets, metrics = make_targets(rollout, scored_of(rollout), 0.0, config)
    returns = torch.tensor([3.0, 3.0, 2.0, 2.0, -3.0, -3.0], dtype=F64)
    assert targets.advantage_N.tolist() == pytest.approx(((returns - returns.mean()) / returns.std()).tolist())
    assert targets.return_N.tolist() == returns.tolist()
    assert metrics["ppo/advantage_std"] == pytest.approx(float(returns.std()))
    grouped, _ = make_targets(rollout, scored_of(rollout), 0.0, PpoConfig(advantage=AdvantageConfig(estimator="rloo")))
    assert not grouped.advantage_N.any()


@pytest.mark.parametrize("estimator", [*WITH_CRITIC, *CRITIC_FREE])
def test_the_order_of_episodes_changes_nothing(kit, estimator):
    made = [replace(t, task=Task(f"t/{i // 2}", "toy", "")) for i, t in enumerate(kit.batch())]
    made = [t for t in made if estimator in WITH_CRITIC or t.end is not EndReason.CUT]
    found = []
    for order in (range(len(made)), [3, 0, 2, 4, 1] if len(made) == 5 else [3, 0, 5, 2, 4, 1]):
        rollout = rollout_of([made[i] for i in order])
        values = torch.cat([torch.sin(torch.arange(made[i].n_sampled) + 9.0 * i).double() for i in order])
        scored = scored_of(rollout, values.tolist(), [float(i) for i in order])
        config = ppo(estimator, whiten="full", gamma_turn=discount(estimator), lambda_turn=0.8, min_group_std=0.1)
        targets, metrics = make_targets(rollout, scored, 0.01, config)
        parts = targets.advantage_N.split(rollout.start_B.diff().tolist())
        found.append(({row.episode: part.tolist() for row, part in zip(rollout.rows, parts, strict=True)}, metrics))
    for episode, advantages in found[0][0].items():
        assert found[1][0][episode] == pytest.approx(advantages, abs=1e-12)
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("estimator", [*WITH_CRITIC, *CRITIC_FREE])
def test_the_length_of_observations_changes_nothing(kit, estimator):
    """The same messages and values, with 1 and with 60 tokens between them."""
    found = []
    for n in (1, 60):
        made = [
            kit.trajectory([(2, 3, 0.5), (n, 1, 0.0), (2 * n, 4, 1.0)], seed=1),
            kit.trajectory([(5, 2, 0.0), (n, 2, 0.25)], seed=2),
        ]
        rollout = rollout_of([replace(t, task=Task("a", "toy", "")) for t in made])
        values = [math.sin(3.0 * j) for j in range(rollout.n_actions)]
        config = ppo(estimator, gamma_turn=discount(estimator), lambda_turn=0.5)
        targets, _ = make_targets(rollout, scored_of(rollout, values), 0.0, config)
        found.append(targets)
    assert torch.equal(found[0].advantage_N, found[1].advantage_N)
    assert torch.equal(found[0].return_N, found[1].return_N)


def test_an_episode_in_error_is_as_if_it_had_not_been(kit):
    """Its reward is not a number, and it is among the attempts of a group."""
    good = [replace(t, task=Task("a", "toy", "")) for t in kit.batch() if t.end is not EndReason.CUT]
    bad = replace(good[0], id="bad", turns=tuple(replace(turn, reward=math.nan) for turn in good[0].turns))
    for estimator in (*WITH_CRITIC, *CRITIC_FREE):
        found = []
        for made in (good, [good[0], replace(bad, end=EndReason.VERIFIER_ERROR), *good[1:]]):
            rollout = rollout_of(made)
            found.append(make_targets(rollout, scored_of(rollout), 0.0, ppo(estimator, whiten="full"))[0])
        assert torch.equal(found[0].advantage_N, found[1].advantage_N)
        assert found[0].advantage_N.isfinite().all()


@pytest.mark.parametrize("estimator", [*WITH_CRITIC, *CRITIC_FREE])
def test_nothing_to_learn_from_and_a_single_token_and_equal_rewards(kit, estimator):
    config = ppo(estimator, whiten="full")
    empty = rollout_of([])
    targets, metrics = make_targets(empty, Scored.blank(empty), 0.0, config)
    assert targets.advantage_N.numel() == targets.return_N.numel() == targets.keep_N.numel() == 0
    assert metrics["ppo/advantage_std"] == 0.0
    single = rollout_of([kit.trajectory([(3, 1, 0.7)], seed=1)])
    targets, metrics = make_targets(single, scored_of(single), 0.0, config)
    assert targets.advantage_N.tolist() == [0.0 if estimator in {"grpo", "rloo"} else 0.7]
    assert metrics["ppo/advantage_std"] == 0.0
    same = rollout_of([kit.trajectory([(3, 1, 0.7)], seed=i) for i in range(3)])
    targets, metrics = make_targets(same, scored_of(same), 0.0, config)
    assert targets.advantage_N.tolist() == [0.0] * 3  # Exactly, though (.7 + .7 + .7) / 3 is not .7.
    if estimator in WITH_CRITIC:
        assert math.isnan(metrics["critic/explained_variance"])
        assert metrics["critic/calibration_error"] == pytest.approx(0.7)


def test_the_critics_figures(attempts):
    """Values at turn starts are right by .5; those of second tokens by 0, and `turn` does not look at them."""
    rollout = rollout_of(attempts(*[("a", [1.0, 2.0]), ("b", [0.0, 1.0])] * 8))
    returns = [3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0] * 8
    values = [r + 0.5 if j % 2 == 0 else 0.0 for j, r in enumerate(returns)]
    for estimator in WITH_CRITIC:
        _, metrics = make_targets(rollout, scored_of(rollout, values), 0.0, ppo(estimator))
        assert metrics["critic/explained_variance_turn_start"] == pytest.approx(1.0)
        assert metrics["critic/calibration_error"] == pytest.approx(0.5)
        assert metrics["critic/return_mean"] == pytest.approx(1.75)
        overall = metrics["critic/explained_variance"]
        assert (overall == pytest.approx(1.0)) == (estimator == "turn")
        assert metrics["critic/value_mean"] == pytest.approx(2.25 if estimator == "turn" else 1.125)
        assert {"critic/explained_variance_turn_0", "critic/explained_variance_turn_1"} <= set(metrics)
        assert "critic/explained_variance_turn_2" not in metrics
        assert "ppo/lambda_turn" not in metrics


def test_calibration_is_against_outcomes_and_not_against_the_critics_own_bootstraps(attempts):
    """With lambda 0 the first turn's target is the second's value, .9; the outcome is 0. Cut episodes have none."""
    made = [("a", [0.0, 0.0])] * 8 + [("b", [0.0], EndReason.CUT)] * 8
    rollout = rollout_of(attempts(*made))
    scored = scored_of(rollout, [0.9] * rollout.n_actions, [5.0] * 16)
    for estimator in WITH_CRITIC:
        targets, metrics = make_targets(rollout, scored, 0.0, ppo(estimator, lambda_value=0.0))
        assert float(targets.return_N[0]) == pytest.approx(0.9)
        assert metrics["critic/calibration_error"] == pytest.approx(0.9)


def test_the_length_adaptive_lambda_is_reported(attempts):
    """alpha 1: episodes of 2 and 4 turns have lambdas .5 and .75; counted in tokens, 4 and 8 of them, .75 and .875."""
    rollout = rollout_of(attempts(("a", [0.0, 0.0]), ("b", [0.0] * 4)))
    for estimator, mean in (("boundary", 0.625), ("turn", 0.625), ("action", 0.8125)):
        _, metrics = make_targets(rollout, scored_of(rollout), 0.0, ppo(estimator, lambda_alpha=1.0))
        assert metrics["ppo/lambda_turn"] == pytest.approx(mean)


def test_the_mean_return_is_over_the_critics_tokens_whatever_its_lambda(attempts):
    """Returns 3 3 2 2 (turns of 1 and 2) and, cut, 4 4 4 4 with nothing for the rest."""
    rollout = rollout_of(attempts(("a", [1.0, 2.0]), ("b", [0.0, 4.0], EndReason.CUT)))
    for lam in (0.0, 1.0):
        assert mean_return(rollout, AdvantageConfig(lambda_value=lam)) == pytest.approx(26 / 8)
        assert mean_return(rollout, AdvantageConfig(estimator="action", lambda_value=lam)) == pytest.approx(26 / 8)
    lopsided = rollout_of([replace(t, id="x") for t in attempts(("a", [1.0, 2.0]))])
    assert mean_return(lopsided, AdvantageConfig(estimator="turn")) == pytest.approx(2.5)


def test_the_mean_return_of_turns_counts_each_turn_once(kit):
    """A turn of 9 tokens with 3 to come and one of 1 token with 1 to come: 2, and not 2.8."""
    rollout = rollout_of([kit.trajectory([(3, 9, 2.0), (2, 1, 1.0)], seed=1)])
    assert mean_return(rollout, AdvantageConfig(estimator="turn")) == pytest.approx(2.0)
    assert mean_return(rollout, AdvantageConfig()) == pytest.approx(2.8)


def test_targets_of_a_micro_batch():
    names = ("old_logprob_N", "old_value_N", "advantage_N", "return_N", "weight_N")
    floats = {name: torch.arange(4, dtype=F64) + 10 * i for i, name in enumerate(names)}
    masks = {
        name: torch.tensor([i == j for j in range(4)]) for i, name in enumerate(("known_N", "keep_N", "value_keep_N"))
    }
    taken = Targets(**floats, **masks).take(torch.tensor([2, 0]), torch.device("cpu"), torch.float32)
    for i, name in enumerate(names):
        assert getattr(taken, name).tolist() == [10.0 * i + 2, 10.0 * i]
        assert getattr(taken, name).dtype == torch.float32
    assert (taken.known_N.tolist(), taken.keep_N.tolist()) == ([False, True], [False, False])
    assert taken.value_keep_N.tolist() == [True, False]
    assert taken.keep_N.dtype == torch.bool
