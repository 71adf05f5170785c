"""Potential-based shaping: the numbers, the ends, and that it pays nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import RewardError
from agentrl.reward import RewardTree, gate, shaping, weighted_sum
from agentrl.reward.ledger import check_ledger
from agentrl.types import EndReason, Unscored


def tree_of(fixed, phi, gamma=1.0, scale=1.0, outcome=0.0):
    potential = fixed("progress", phi, "turn")
    return RewardTree(weighted_sum((1.0, fixed("solved", outcome)), shaping(potential, gamma_turn=gamma, scale=scale)))


def test_each_turn_is_paid_for_the_progress_it_made(run, fixed):
    # Phi: 0.2 after setup, then 0.5, 0.4; the end takes the last one back.
    tree = tree_of(fixed, {-1: 0.2, 0: 0.5, 1: 0.4, 2: 0.9}, gamma=0.9, scale=2.0, outcome=1.0)
    values = [score.value for score in run(tree, n_turns=3)]
    assert values == pytest.approx([2 * (0.9 * 0.5 - 0.2), 2 * (0.9 * 0.4 - 0.5), 1.0 + 2 * (0 - 0.4)])


def test_the_potential_is_kept_where_the_critic_stands_for_the_future(run, fixed):
    tree = tree_of(fixed, {-1: 0.2, 0: 0.5}, gamma=0.9)
    (score,) = run(tree, end=EndReason.CUT)
    assert score.value == pytest.approx(0.9 * 0.5 - 0.2)


@pytest.mark.parametrize(("end", "phi_end"), [(EndReason.CONTEXT_FULL, 0.0), (EndReason.CUT, 0.5)])
def test_an_end_without_a_turn_corrects_the_last_turns_row(fixed, at, end, phi_end):
    tree = tree_of(fixed, {-1: 0.2, 0: 0.5}, gamma=0.9)
    tree.begin(at(-1))
    first = tree.step(at(0), ended=False).value
    last = tree.step(at(0, end), ended=True, bootstraps=end.bootstraps).value
    assert first + last == pytest.approx(0.9 * phi_end - 0.2)
    assert check_ledger(tree.final(end), [first + last]) <= 1e-12


def test_an_episode_without_turns_is_paid_nothing(fixed, at):
    tree = tree_of(fixed, {-1: 0.7})
    tree.begin(at(-1))
    assert tree.step(at(-1, EndReason.CONTEXT_FULL), ended=True).value == 0.0


@settings(max_examples=60, deadline=None)
@given(
    phis=st.lists(st.floats(0, 1), min_size=2, max_size=7),
    gamma=st.floats(0, 1),
    scale=st.floats(-3, 3),
    late=st.booleans(),
    end=st.sampled_from([EndReason.SUBMITTED, EndReason.MAX_TURNS, EndReason.CUT]),
)
def test_shaping_telescopes_whatever_the_agent_does(fixed, at, phis, gamma, scale, late, end):
    tree = tree_of(fixed, {k - 1: phi for k, phi in enumerate(phis)}, gamma=gamma, scale=scale)
    n = len(phis) - 1
    tree.begin(at(-1))
    rows = [tree.step(at(k), ended=False).value for k in range(n - 1 + late)]
    last = tree.step(at(n - 1, end), ended=True, bootstraps=end.bootstraps).value
    rows = [*rows[:-1], rows[-1] + last] if late else [*rows, last]
    discounted = sum(gamma**k * row for k, row in enumerate(rows))
    phi_end = phis[-1] if end is EndReason.CUT else 0.0
    assert discounted == pytest.approx(scale * (gamma**n * phi_end - phis[0]), abs=1e-12)
    assert check_ledger(tree.final(end), rows) <= 1e-12


def test_an_unscored_potential_makes_the_step_unscored_even_in_a_sum_that_renormalises(fixed, at):
    lost = Unscored("no view")
    root = weighted_sum(
        (1.0, fixed("solved", 1.0)), shaping(fixed("progress", {-1: 0.1, 0: lost}, "turn")), on_unscored="renormalise"
    )
    tree = RewardTree(root)
    tree.begin(at(-1))
    score = tree.step(at(0), ended=False)
    assert score.value is None
    assert score.unscored == "shaping: its potential progress: no view"


def test_an_unscored_potential_after_setup_is_reported_at_the_first_step(fixed, at):
    tree = tree_of(fixed, Unscored("no view"))
    tree.begin(at(-1))
    assert tree.step(at(0), ended=False).unscored == "shaping: its potential progress, after setup: no view"


def test_shaping_is_left_out_of_success(run, fixed):
    tree = tree_of(fixed, {-1: 0.2, 0: 0.1}, outcome=1.0)
    assert run(tree)[-1].success is True
    assert tree.final(EndReason.SUBMITTED)["components"] == pytest.approx({"solved": 1.0, "shaping": -0.2})


def test_the_tree_shows_its_discounts_to_the_learner(fixed):
    assert [node.gamma_turn for node in tree_of(fixed, 0.0, gamma=0.75).shapings] == [0.75]


def test_a_tree_with_shaping_must_be_begun(fixed, at):
    with pytest.raises(RewardError, match=r"call begin\(episode\) after setup"):
        tree_of(fixed, 0.0).step(at(0), ended=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: RewardTree(shaping(f("p", 0.0, "turn"))), "no objective"),
        (lambda f: RewardTree(gate(f("a", 1.0, "turn"), shaping(f("p", 0.0, "turn")))), "an addend of the root"),
        (
            lambda f: RewardTree(weighted_sum(f("a", 1.0), weighted_sum(shaping(f("p", 0.0, "turn"))))),
            "an addend of the root",
        ),
        (lambda f: RewardTree(weighted_sum(f("a", 1.0), (0.5, shaping(f("p", 0.0, "turn"))))), "set its `scale`"),
        (lambda f: shaping(f("p", 0.0, "end")), "decorate it with when='turn'"),
        (lambda f: shaping(f("p", 0.0, "turn"), gamma_turn=1.5), r"gamma_turn must be in \[0, 1\]"),
        (lambda f: shaping(f("p", 0.0, "turn"), scale=float("nan")), "scale must be finite"),
    ],
)
def test_shaping_that_would_change_what_is_optimal_is_refused(fixed, make, message):
    with pytest.raises(RewardError, match=message):
        make(fixed)
