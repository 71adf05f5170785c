"""What is due when, roles, success, and what a tree as a whole refuses."""

from __future__ import annotations

import time
import timeit

import pytest

from agentrl.errors import RewardError
from agentrl.reward import RewardTree, clip, gate, leaf, lexicographic, minimum, product, weighted_sum
from agentrl.types import EndReason, Unscored

LOST = Unscored("gone")


def test_components_are_due_at_their_times(run, fixed):
    root = weighted_sum((1.0, fixed("solved", 0.5)), (0.1, fixed("calm", {0: 1.0, 1: 0.0, 2: 1.0}, "turn")))
    tree = RewardTree(root)
    scores = run(tree, n_turns=3)
    assert [score.value for score in scores] == pytest.approx([0.1, 0.0, 0.6])
    assert [len(score.ledger["children"]) for score in scores] == [1, 1, 2]
    assert tree.final(EndReason.SUBMITTED)["components"] == {"calm": 2.0, "solved": 0.5}


def test_a_turn_at_which_nothing_is_due_earns_zero_and_has_no_entry(run, fixed):
    first, last = run(fixed("solved", 1.0), n_turns=2)
    assert (first.value, first.ledger, first.success) == (0.0, None, None)
    assert (last.value, last.success) == (1.0, True)


def test_an_end_without_a_turn_scores_the_end_alone(fixed, at):
    tree = RewardTree(weighted_sum((1.0, fixed("solved", 0.5)), (0.1, fixed("calm", 1.0, "turn"))))
    tree.begin(at(-1))
    assert tree.step(at(0), ended=False).value == pytest.approx(0.1)
    assert tree.step(at(0, EndReason.CONTEXT_FULL), ended=True).value == pytest.approx(0.5)
    ledger = tree.final(EndReason.CONTEXT_FULL)
    assert [(step["turn"], step["reward"]) for step in ledger["steps"]] == [(0, 0.1), (0, 0.5)]
    assert ledger["total"] == pytest.approx(0.6)


def test_where_the_critic_stands_for_the_future_the_end_is_not_due(run, fixed):
    tree = RewardTree(weighted_sum((1.0, fixed("solved", 0.5)), (0.1, fixed("calm", 1.0, "turn"))))
    scores = run(tree, n_turns=2, end=EndReason.CUT)
    assert [score.value for score in scores] == pytest.approx([0.1, 0.1])
    assert scores[-1].success is None
    assert tree.final(EndReason.CUT)["success"] is None


def test_a_condition_of_each_turn_still_holds_at_an_end_without_a_turn(fixed, at):
    tree = RewardTree(gate(fixed("calm", {0: 1.0}, "turn"), fixed("solved", 0.7)))
    tree.begin(at(-1))
    assert tree.step(at(0), ended=False).ledger is None
    assert tree.step(at(0, EndReason.TIME_LIMIT), ended=True).value == 0.7


def test_one_tree_scores_one_episode_after_another(run, fixed):
    tree = RewardTree(weighted_sum((1.0, fixed("solved", 1.0)), (0.5, fixed("calm", 1.0, "turn"))))
    assert [s.value for s in run(tree, n_turns=2)] == [s.value for s in run(tree, n_turns=2)] == [0.5, 1.5]
    assert len(tree.final(EndReason.SUBMITTED)["steps"]) == 2


@pytest.mark.parametrize(
    ("solved", "tidy", "safe", "success"),
    [
        (1.0, 0.0, 1.0, True),
        (0.999, 1.0, 1.0, False),
        (1.0, 1.0, 0.5, False),
        (LOST, 1.0, 1.0, None),
        (1.0, 1.0, LOST, None),
        (LOST, 1.0, 0.0, False),
    ],
)
def test_success_is_every_objective_at_its_top_and_no_catastrophe(run, fixed, solved, tidy, safe, success):
    root = weighted_sum(
        (1.0, fixed("solved", solved)),
        (0.1, leaf(fixed("tidy", tidy), role="safeguard")),
        (0.0, leaf(fixed("safe", safe), role="safeguard", severity="catastrophic")),
    )
    assert run(root)[-1].success is success


@pytest.mark.parametrize(("asked", "success"), [(1.0, True), (0.0, False)])
def test_an_objective_behind_a_closed_gate_is_not_met(run, fixed, asked, success):
    root = gate(leaf(fixed("asked", asked), role="safeguard"), fixed("solved", 1.0))
    assert run(root)[-1].success is success


def test_an_unscored_objective_behind_a_closed_gate_is_not_met_either(run, fixed):
    root = gate(leaf(fixed("asked", 0.0), role="safeguard"), fixed("solved", LOST), on_unscored="floor")
    (score,) = run(root)
    assert (score.value, score.success) == (0.0, False)


def test_an_objective_of_each_turn_counts_as_it_was_last(run, fixed):
    root = weighted_sum(fixed("near", {0: 1.0, 1: 0.5, 2: 1.0}, "turn"))
    assert run(root, n_turns=2)[-1].success is False
    assert run(root, n_turns=3)[-1].success is True


def test_a_catastrophe_is_reported_when_it_fires_and_never_forgotten(run, fixed):
    guard = leaf(fixed("safe", {0: 1.0, 1: 0.0, 2: 1.0}, "turn"), role="safeguard", severity="catastrophic")
    scores = run(weighted_sum((1.0, fixed("solved", 1.0)), (0.1, guard)), n_turns=3)
    assert [score.catastrophe for score in scores] == [None, "safe = 0, below 1", None]
    assert scores[-1].success is False


def test_a_recoverable_safeguard_reports_nothing(run, fixed):
    (score,) = run(weighted_sum((1.0, fixed("solved", 1.0)), (0.1, leaf(fixed("safe", 0.0), role="safeguard"))))
    assert score.catastrophe is None
    assert score.success is True


def test_an_error_has_a_ledger_without_success_and_without_zero(run, fixed):
    tree = RewardTree(weighted_sum((1.0, fixed("solved", LOST))))
    (score,) = run(tree)
    assert (score.value, score.unscored, score.success) == (None, "solved: gone", None)
    ledger = tree.final(EndReason.VERIFIER_ERROR)
    assert (ledger["total"], ledger["success"], ledger["components"]) == (None, None, {"solved": None})
    assert ledger["steps"][0]["reward"] is None


def test_durations_are_beside_the_ledger(run, fixed):
    (score,) = run(weighted_sum(fixed("a", 1.0), fixed("b", 1.0)))
    assert set(score.durations) == {"a", "b"}
    assert all(seconds >= 0 for seconds in score.durations.values())
    assert "duration" not in str(score.ledger)


@pytest.mark.parametrize("make", [product, minimum, lexicographic])
def test_times_do_not_mix_where_one_child_decides_over_another(fixed, make):
    root = make(fixed("calm", 1.0, "turn"), fixed("solved", 1.0, "end"))
    with pytest.raises(RewardError, match="holds 'calm', due at each turn, beside 'solved', known only at the end"):
        RewardTree(root)
    with pytest.raises(RewardError, match="known only at the end"):
        RewardTree(weighted_sum(clip(weighted_sum(fixed("calm", 1.0, "turn"), fixed("solved", 1.0)), 0.0, 1.0)))


def test_a_turn_component_under_a_condition_of_the_end_is_refused(fixed):
    root = weighted_sum((1.0, gate(fixed("solved", 1.0), fixed("calm", 1.0, "turn"))))
    with pytest.raises(RewardError, match="condition 'solved' is known only at the end, and 'calm' below it is due"):
        RewardTree(root)


def test_times_mix_under_a_condition_of_each_turn(run, fixed):
    inner = weighted_sum((1.0, fixed("solved", 1.0)), (0.1, fixed("tidy", 1.0, "turn")))
    root = gate(fixed("calm", {0: 1.0, 1: 0.0, 2: 1.0}, "turn"), inner, floor=-1.0)
    assert [score.value for score in run(root, n_turns=3)] == pytest.approx([0.1, -1.0, 1.1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: weighted_sum(leaf(f("a", 1.0), role="safeguard")), "no objective"),
        (lambda f: leaf(f("a", 1.0), role="diagnostic"), "no objective"),
        (lambda f: product(f("a", 1.0), leaf(f("b", 1.0), role="diagnostic")), "'b' is a diagnostic under 'product'"),
        (lambda f: weighted_sum(f("a", 1.0), f("a", 0.5)), "'a' stands in the reward tree 2 times"),
    ],
)
def test_trees_that_cannot_be_accounted_for_are_refused(fixed, make, message):
    with pytest.raises(RewardError, match=message):
        RewardTree(make(fixed))


def test_a_name_of_its_own_lets_a_component_stand_twice(run, fixed):
    a = fixed("a", 0.5)
    (score,) = run(weighted_sum((1.0, a), (1.0, leaf(a, name="a_again"))))
    assert [child["node"] for child in score.ledger["children"]] == ["a", "a_again"]


def test_a_tree_of_six_leaves_takes_less_than_a_fifth_of_a_millisecond(fixed, at):
    calm = fixed("calm", 0.5, "turn")
    safe = leaf(fixed("safe", 1.0), role="safeguard", severity="catastrophic")
    root = weighted_sum(
        (1.0, gate(fixed("runs", 1.0), product(fixed("a", 0.5), fixed("b", 0.5)))),
        (0.1, calm),
        (0.1, safe),
        leaf(fixed("seen", 0.3), role="diagnostic"),
    )
    tree, before, after = RewardTree(root), at(-1), at(0, EndReason.SUBMITTED)

    def episode() -> None:
        tree.begin(before)
        tree.step(after, ended=True)

    assert min(timeit.repeat(episode, timer=time.process_time, number=100, repeat=10)) / 100 < 0.2e-3
