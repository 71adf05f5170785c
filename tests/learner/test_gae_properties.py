"""What credit assignment with a critic must satisfy whatever the episodes, for each of its three estimators.

The numbers P1 to P11 are those of the list of properties that such recursions are usually tested with.
"""

from __future__ import annotations

import math

import pytest
import torch
from gae_parts import ESTIMATORS, Episode, by_loop, by_sums, config_of, episodes, estimate, flat, steps_of, unit
from golden_records import naive_gae
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.learner.advantages import turn_starts

each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
often = settings(max_examples=20, deadline=None)


@each_estimator
@given(made=episodes(), gammas=st.tuples(unit, unit), lams=st.tuples(unit, unit, unit))
@settings(max_examples=50, deadline=None)
def test_the_scan_equals_the_plain_loop(estimator, made, gammas, lams):
    config = config_of(estimator, gammas, lams[:2], lams[2])
    advantages, returns = estimate(config, made)
    expected, targets = by_loop(config, made)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)
    assert returns.tolist() == pytest.approx(targets, abs=1e-12)


@each_estimator
@given(made=episodes(), alpha=st.floats(0.02, 3.0))
@often
def test_a_length_adaptive_lambda_is_each_episodes_own(estimator, made, alpha):
    config = config_of(estimator, (1.0, 0.9), (0.8, 0.3), 1.0, alpha)
    expected, targets = by_loop(config, made)
    advantages, returns = estimate(config, made)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)
    assert returns.tolist() == pytest.approx(targets, abs=1e-12)


@each_estimator
@given(made=episodes())
@often
def test_p1_without_decay_the_advantage_is_the_rest_minus_the_value(estimator, made):
    config = config_of(estimator)
    advantages, _ = estimate(config, made)
    expected = []
    for episode in made:
        for step in steps_of(config, episode):
            rest = sum(episode.rewards[step.tokens[0] :]) + episode.bootstrap - step.value
            expected += [rest] * len(step.tokens)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-11)


@each_estimator
@given(made=episodes(), gammas=st.tuples(unit, unit))
@often
def test_p2_lambda_one_gives_discounted_returns_in_advantage_and_target(estimator, made, gammas):
    config = config_of(estimator, gammas)
    advantages, returns = estimate(config, made)
    expected = by_sums(config, made)
    assert returns.tolist() == pytest.approx(expected, abs=1e-11)
    values = [step.value for e in made for step in steps_of(config, e) for _ in step.tokens]
    assert advantages.tolist() == pytest.approx([r - v for r, v in zip(expected, values, strict=True)], abs=1e-11)


@each_estimator
@given(made=episodes(), gammas=st.tuples(unit, unit))
@often
def test_p3_p4_lambda_zero_is_the_td_error_and_gamma_zero_the_reward(estimator, made, gammas):
    config = config_of(estimator, gammas, (0.0, 0.0))
    td, _ = estimate(config, made)
    expected = []
    for episode in made:
        steps = steps_of(config, episode)
        following = [*(s.value for s in steps[1:]), episode.bootstrap]
        for step, value in zip(steps, following, strict=True):
            expected += [step.reward + step.gamma * value - step.value] * len(step.tokens)
    assert td.tolist() == pytest.approx(expected, abs=1e-12)
    config = config_of(estimator, (0.0, 0.0), (0.7, 0.3))
    short, _ = estimate(config, made)
    expected = [s.reward - s.value for e in made for s in steps_of(config, e) for _ in s.tokens]
    assert short.tolist() == pytest.approx(expected, abs=1e-12)


@each_estimator
@given(made=episodes(), gammas=st.tuples(unit, unit), lams=st.tuples(unit, unit))
@often
def test_p5_values_that_are_exact_on_the_path_leave_no_advantage(estimator, made, gammas, lams):
    returns = iter(by_sums(config_of(estimator, gammas), made))
    exact = [episode._replace(values=[next(returns) for _ in episode.values]) for episode in made]
    advantages, _ = estimate(config_of(estimator, gammas, lams), exact)
    assert advantages.abs().max() < 1e-11


@each_estimator
@given(made=episodes(), gammas=st.tuples(unit, unit), lams=st.tuples(unit, unit))
@often
def test_p6_potential_shaping_changes_nothing(estimator, made, gammas, lams):
    """r + gamma Phi' - Phi, paid at the last token of a step, with V - Phi and bootstrap - Phi."""
    config = config_of(estimator, gammas, lams)
    plain, _ = estimate(config, made)
    shaped = []
    for episode in made:
        steps = steps_of(config, episode)
        phi = [math.sin(3.0 * i + episode.bootstrap) for i in range(len(steps) + 1)]
        rewards, values = list(episode.rewards), list(episode.values)
        for i, step in enumerate(steps):
            rewards[step.tokens[-1]] += step.gamma * phi[i + 1] - phi[i]
            values[step.tokens[0]] -= phi[i]
        shaped.append(Episode(rewards, values, episode.turns, episode.bootstrap - phi[-1]))
    changed, _ = estimate(config, shaped)
    assert (changed - plain).abs().max() < 1e-11


@each_estimator
@given(made=episodes(), factor=st.floats(-3, 3))
@often
def test_p7_linear_in_rewards_values_and_bootstrap(estimator, made, factor):
    config = config_of(estimator, (0.9, 0.8), (0.7, 0.6))
    scaled = [
        Episode([factor * r for r in e.rewards], [factor * v for v in e.values], e.turns, factor * e.bootstrap)
        for e in made
    ]
    for plain, changed in zip(estimate(config, made), estimate(config, scaled), strict=True):
        assert (changed - factor * plain).abs().max() < 1e-11


def grid_row(episode, n_observation):
    """A row of tokens as a model reads it: observations of wild values after each turn but the last, and the mask."""
    rewards, values, is_action = [], [], []
    for j, (reward, value) in enumerate(zip(episode.rewards, episode.values, strict=True)):
        rewards.append(reward)
        values.append(value)
        is_action.append(True)
        if j + 1 < len(episode.turns) and episode.turns[j + 1] != episode.turns[j]:
            wild = [100.0 * math.sin(7.0 * j + i + 1.0) for i in range(n_observation)]
            rewards += [0.0] * n_observation
            values += wild
            is_action += [False] * n_observation
    return rewards, values, is_action


@each_estimator
@given(made=episodes(), n_observation=st.integers(1, 30))
@often
def test_p8_observations_of_any_length_and_value_change_nothing(estimator, made, n_observation):
    config = config_of(estimator, (1.0, 0.9), (0.9, 0.5))
    plain, _ = estimate(config, made)
    compacted = []
    for episode in made:
        rewards, values, is_action = grid_row(episode, n_observation)
        kept = [j for j, wanted in enumerate(is_action) if wanted]
        compacted.append(episode._replace(rewards=[rewards[j] for j in kept], values=[values[j] for j in kept]))
    changed, _ = estimate(config, compacted)
    assert torch.equal(changed, plain)


def test_p8_and_p11_the_naive_recursion_fails_both():
    """The controls: b steps through observations with their values, b2 with zeros. NaN there reaches all before."""
    episode = Episode([0.0, 0.1, 0.0, 1.0], [0.5, 0.4, 0.8, 0.7], [0, 0, 1, 1], 0.0)
    ours, _ = estimate(config_of("action", (0.9, 0.9), (0.5, 0.5)), [episode])
    found = {}
    for n_observation in (0, 2, 9):
        rewards, values, is_action = grid_row(episode, n_observation)
        zeroed = [v if kept else 0.0 for v, kept in zip(values, is_action, strict=True)]
        for name, row in (("b", values), ("b2", zeroed)):
            control = naive_gae(rewards, row, 0.0, 0.9, 0.5)
            found[name, n_observation] = [a for a, kept in zip(control, is_action, strict=True) if kept]
    for name in ("b", "b2"):
        assert found[name, 0] == pytest.approx(ours.tolist(), abs=1e-12)
        assert abs(found[name, 2][1] - float(ours[1])) > 0.05
        assert abs(found[name, 9][1] - found[name, 2][1]) > 0.01
    rewards, values, is_action = grid_row(episode, 2)
    poisoned = [v if kept else math.nan for v, kept in zip(values, is_action, strict=True)]
    assert all(math.isnan(a) for a in naive_gae(rewards, poisoned, 0.0, 0.9, 0.5)[:2])


@pytest.mark.parametrize(
    ("values", "bootstrap", "advantages"),
    [
        ([0.3, 0.2], 0.0, [-0.1138325984375, 0.05814978125, -0.181889375, -0.035, 0.3]),
        ([0.3, 0.2], 0.9, [-0.10710654828125, 0.073096559375, -0.1486743125, 0.3295, 1.11]),
        ([0.0, 0.0], 0.0, [-0.1493713484375, -0.02082521875, -0.357389375, -0.035, 0.3]),
        ([0.0, 0.0], 0.9, [-0.14264529828125, -0.005878440625, -0.3241743125, 0.3295, 1.11]),
    ],
    ids=["b/term", "b/trunc", "b2/term", "b2/trunc"],
)
def test_worked_example_of_the_naive_controls(values, bootstrap, advantages):
    """Tokens a0 a1 a2 | o3 o4 | a5 a6, gamma .9 and lambda .5, as in the worked example of ours."""
    row = [0.5, 0.4, 0.6, *values, 0.8, 0.7]
    found = naive_gae([0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 1.0], row, bootstrap, 0.9, 0.5)
    assert found[:3] + found[5:] == pytest.approx(advantages, abs=1e-12)


@given(made=episodes(), gamma=unit, lam=unit)
@often
def test_p9_boundary_gae_with_equal_pairs_is_action_gae_whatever_the_turns(made, gamma, lam):
    with_turns, _ = estimate(config_of("boundary", (gamma, gamma), (lam, lam)), made)
    without, _ = estimate(config_of("action", (gamma, gamma), (lam, lam)), made)
    assert torch.equal(with_turns, without)


@given(made=episodes(), gamma=unit, lam=unit)
@often
def test_p9_without_decay_inside_turns_boundary_gae_is_turn_gae_with_a_baseline_for_each_token(made, gamma, lam):
    """A_t = A_k + V_first - V_t - what the turn has earned before t."""
    boundary, targets = estimate(config_of("boundary", (1.0, gamma), (1.0, lam), 1.0), made)
    turn, turn_targets = estimate(config_of("turn", (1.0, gamma), (1.0, lam), 1.0), made)
    expected = []
    for episode in made:
        for step in steps_of(config_of("turn"), episode):
            earned = 0.0
            for j in step.tokens:
                expected.append(step.value - episode.values[j] - earned)
                earned += episode.rewards[j]
    assert (boundary - turn).tolist() == pytest.approx(expected, abs=1e-11)
    start_N = turn_starts(*flat(made)[2:4])
    assert boundary[start_N].tolist() == pytest.approx(turn[start_N].tolist(), abs=1e-11)
    assert targets[start_N].tolist() == pytest.approx(turn_targets[start_N].tolist(), abs=1e-11)


@each_estimator
@given(made=episodes(), gammas=st.tuples(unit, unit), lams=st.tuples(unit, unit), data=st.data())
@often
def test_p10_an_episode_cut_where_its_value_is_known_loses_the_decayed_tail_alone(estimator, made, gammas, lams, data):
    """A_full[i] = A_cut[i] + (product of gamma lambda from i to the cut) A_full[cut] when the bootstrap is V_cut."""
    config = config_of(estimator, gammas, lams)
    for episode in made:
        steps = steps_of(config, episode)
        cut = data.draw(st.integers(0, len(steps) - 1))
        if cut == 0 or (
            estimator == "boundary" and episode.turns[steps[cut].tokens[0]] == episode.turns[steps[cut].tokens[0] - 1]
        ):
            continue  # A cut in mid-turn ends the turn, and so changes the pair of its last step.
        at = steps[cut].tokens[0]
        short = Episode(episode.rewards[:at], episode.values[:at], episode.turns[:at], episode.values[at])
        full, (found, _) = estimate(config, [episode])[0].tolist(), estimate(config, [short])
        for i in range(cut):
            decay = math.prod(step.gamma * step.lam for step in steps[i:cut])
            assert full[steps[i].tokens[0]] == pytest.approx(
                float(found[steps[i].tokens[0]]) + decay * full[at], abs=1e-11
            )


@each_estimator
@given(made=episodes(), where=st.integers(0, 5))
@often
def test_p11_what_is_not_a_number_stays_in_its_episode(estimator, made, where):
    config = config_of(estimator, (0.9, 0.8), (0.7, 0.6))
    where %= len(made)
    n = len(made[where].rewards)
    poisoned = list(made)
    poisoned[where] = Episode([math.nan] * n, [math.inf] * n, made[where].turns, math.nan)
    others = flat(made)[3] != where
    for plain, changed in zip(estimate(config, made), estimate(config, poisoned), strict=True):
        assert torch.equal(changed[others], plain[others])
        assert not bool(changed[~others].isfinite().any())


@each_estimator
@given(made=episodes(), order=st.randoms(use_true_random=False))
@often
def test_the_order_of_episodes_changes_nothing(estimator, made, order):
    config = config_of(estimator, (0.9, 0.8), (0.7, 0.6), 1.0, 0.5)
    places = list(range(len(made)))
    order.shuffle(places)
    alone = [[part.tolist() for part in estimate(config, [episode])] for episode in made]
    for part, found in enumerate(estimate(config, [made[place] for place in places])):
        assert found.tolist() == pytest.approx([x for place in places for x in alone[place][part]], abs=1e-12)
