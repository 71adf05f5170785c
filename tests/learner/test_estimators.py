"""Credit assignment without a critic: groups, GRPO, RLOO and REINFORCE++ by hand, and what must hold of them."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import InvariantError
from agentrl.learner.critic_free import Groups, episode_returns, grpo, refuse_cut, reinforce_pp, rloo

F64 = torch.float64
often = settings(max_examples=30, deadline=None)

returns_and_groups = st.lists(st.tuples(st.floats(-2, 2), st.integers(0, 3)), min_size=1, max_size=12)


def of(returns, groups, counts=None):
    counts_B = None if counts is None else torch.tensor(counts)
    return Groups.of(torch.tensor(returns, dtype=F64), torch.tensor(groups, dtype=torch.int64), counts_B)


def split(made):
    return [r for r, _ in made], [g for _, g in made]


def test_a_groups_statistics_by_hand():
    """Group 0 holds 1, 0, 2 (mean 1, deviation 1), group 1 holds 5 alone, group 2 holds 1 and 4 (1.5 each way)."""
    found = of([1.0, 5.0, 0.0, 1.0, 2.0, 4.0], [0, 1, 0, 2, 0, 2])
    assert found.size_B.tolist() == [3, 1, 3, 2, 3, 2]
    assert found.centred_B.tolist() == [0.0, 0.0, -1.0, -1.5, 1.0, 1.5]
    assert found.std_B.tolist() == pytest.approx([1.0, 0.0, 1.0, 1.5 * math.sqrt(2), 1.0, 1.5 * math.sqrt(2)])


def test_an_episode_that_was_cut_is_in_no_baseline_and_no_deviation():
    found = of([1.0, 0.0, 50.0, 7.0], [0, 0, 0, 1], [True, True, False, False])
    assert found.size_B.tolist() == [2, 2, 2, 0]
    assert found.centred_B.tolist() == [0.5, -0.5, 49.5, 7.0]
    assert found.std_B.tolist() == pytest.approx([math.sqrt(0.5)] * 3 + [0.0])


def test_equal_returns_are_centred_to_zero_exactly():
    """(.1 + .1 + .1) / 3 is not .1 in floating point; advantages and deviations must be 0 all the same."""
    found = of([0.1] * 3 + [0.7] * 7, [0] * 3 + [1] * 7)
    assert found.centred_B.tolist() == [0.0] * 10
    assert found.std_B.tolist() == [0.0] * 10
    assert grpo(found, 0.1).tolist() == rloo(found).tolist() == [0.0] * 10


def test_grpo_by_hand():
    """Deviation 1 in the first group; sqrt(.0002) in the second, which the floor of .1 stands in for."""
    found = of([0.0, 1.0, 2.0, 0.5, 0.52], [0, 0, 0, 1, 1])
    assert grpo(found, 0.1).tolist() == pytest.approx([-1.0, 0.0, 1.0, -0.1, 0.1])
    assert grpo(found, None).tolist() == pytest.approx([-1.0, 0.0, 1.0, -0.01, 0.01])
    assert grpo(of([0.0, 4.0], [0, 0]), 0.1).tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_rloo_by_hand():
    """Each return less the mean of the others: 0 - 1.5, 1 - 1, 2 - .5; and of two, less the other."""
    found = of([0.0, 1.0, 2.0, 3.0, 5.0], [0, 0, 0, 1, 1])
    assert rloo(found).tolist() == pytest.approx([-1.5, 0.0, 1.5, -2.0, 2.0])


def test_a_single_attempt_has_nothing_to_compare_with():
    found = of([3.0, 1.0, 2.0], [1, 0, 0])
    for advantages in (grpo(found, 0.1), grpo(found, None), rloo(found)):
        assert float(advantages[0]) == 0.0
        assert float(advantages[1]) != 0.0
    assert of([], []).size_B.tolist() == []


@given(returns_and_groups)
@often
def test_groups_equal_the_plain_statistics(made):
    returns, groups = split(made)
    found = of(returns, groups)
    for i, (own, group) in enumerate(made):
        members = [r for r, g in made if g == group]
        others = [r for j, (r, g) in enumerate(made) if g == group and j != i]
        assert int(found.size_B[i]) == len(members)
        assert float(found.centred_B[i]) == pytest.approx(own - statistics.fmean(members), abs=1e-12)
        deviation = statistics.stdev(members) if others else 0.0
        assert float(found.std_B[i]) == pytest.approx(deviation, abs=1e-9)
        expected = own - statistics.fmean(others) if others else 0.0
        assert float(rloo(found)[i]) == pytest.approx(expected, abs=1e-12)
        scaled = (own - statistics.fmean(members)) / max(deviation, 0.1) if others else 0.0
        assert float(grpo(found, 0.1)[i]) == pytest.approx(scaled, abs=1e-9)


@given(returns_and_groups, st.floats(-3, 3), st.floats(0.5, 4), st.randoms(use_true_random=False))
@often
def test_shift_scale_and_order_of_the_attempts(made, shift, scale, order):
    """A shift of all returns of a task changes nothing; RLOO and Dr. GRPO scale with the returns; order is nothing."""
    returns, groups = split(made)
    found, moved = of(returns, groups), of([scale * r + shift * (g + 1) for r, g in made], groups)
    for estimator in (rloo, lambda g: grpo(g, None)):
        assert estimator(moved).tolist() == pytest.approx((scale * estimator(found)).tolist(), abs=1e-9)
    places = list(range(len(made)))
    order.shuffle(places)
    shuffled = of([returns[i] for i in places], [groups[i] for i in places])
    for estimator in (rloo, lambda g: grpo(g, 0.1)):
        assert estimator(shuffled).tolist() == pytest.approx(estimator(found)[places].tolist(), abs=1e-9)


def test_what_is_not_a_number_stays_in_its_group():
    found = of([1.0, math.nan, 2.0, 4.0], [0, 0, 1, 1])
    assert rloo(found).tolist()[2:] == [-2.0, 2.0]
    assert grpo(found, None).tolist()[2:] == [-1.0, 1.0]
    assert all(math.isnan(x) for x in rloo(found).tolist()[:2])


def test_reinforce_pp_by_hand():
    """Turns do not reset it: .5 reaches the first tokens of an episode of three turns. Episodes do."""
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 2.0, 0.0, 8.0], dtype=F64)
    ids = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    assert reinforce_pp(rewards, ids, 1.0).tolist() == [3.0, 3.0, 3.0, 2.0, 2.0, 8.0, 8.0]
    assert reinforce_pp(rewards, ids, 0.5).tolist() == [0.375, 0.75, 1.5, 1.0, 2.0, 4.0, 8.0]
    assert reinforce_pp(rewards, ids, 0.0).tolist() == rewards.tolist()
    assert reinforce_pp(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 1.0).tolist() == []


@given(st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=9), min_size=1, max_size=4), st.floats(0, 1))
@often
def test_reinforce_pp_equals_the_plain_sums(made, gamma):
    rewards = torch.tensor([r for episode in made for r in episode], dtype=F64)
    ids = torch.tensor([b for b, episode in enumerate(made) for _ in episode])
    expected = [
        math.fsum(gamma ** (k - j) * episode[k] for k in range(j, len(episode)))
        for episode in made
        for j in range(len(episode))
    ]
    assert reinforce_pp(rewards, ids, gamma).tolist() == pytest.approx(expected, abs=1e-12)
    poisoned = torch.where(ids == 0, math.nan, rewards)
    assert torch.equal(reinforce_pp(poisoned, ids, gamma)[ids > 0], reinforce_pp(rewards, ids, gamma)[ids > 0])


def test_an_episodes_return_is_the_sum_of_its_rewards():
    rewards, ids = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 2, 2])
    assert episode_returns(rewards, ids, 4).tolist() == [3.0, 0.0, 12.0, 0.0]


def test_episodes_that_were_cut_are_refused_by_name():
    refuse_cut(torch.tensor([False, False]), ("a", "b"), "grpo")
    with pytest.raises(InvariantError, match=r"2 of 3 episodes were cut \(a, c\), and estimator 'rloo' has no critic"):
        refuse_cut(torch.tensor([True, False, True]), ("a", "b", "c"), "rloo")
    with pytest.raises(InvariantError, match=r"5 of 5 episodes were cut \(a, b, c, \.\.\.\)"):
        refuse_cut(torch.ones(5, dtype=torch.bool), tuple("abcde"), "reinforce_pp")
