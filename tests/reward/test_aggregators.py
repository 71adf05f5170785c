"""Every kind of node against numbers worked out by hand."""

from __future__ import annotations

import pytest

from agentrl.errors import RewardError
from agentrl.reward import clip, gate, leaf, lexicographic, minimum, product, weighted_sum
from agentrl.reward.recompute import recompute
from agentrl.types import Unscored

LOST = Unscored("the world is gone")


def test_weighted_sum_adds_weighted_values(run, fixed):
    root = weighted_sum((1.0, fixed("a", 0.5)), (-0.5, fixed("b", 0.4)), (2.0, fixed("c", -3.0, bounds=(-4, 0))))
    (score,) = run(root)
    assert score.value == pytest.approx(0.5 - 0.2 - 6.0, abs=1e-12)
    assert [child["contribution"] for child in score.ledger["children"]] == pytest.approx([0.5, -0.2, -6.0])
    assert score.ledger["bounds"] == pytest.approx([0 - 0.5 - 8.0, 1.0])


def test_a_child_alone_weighs_one_and_a_diagnostic_nothing(run, fixed):
    root = weighted_sum(fixed("a", 0.5), leaf(fixed("seen", 0.9), role="diagnostic"))
    (score,) = run(root)
    assert score.value == 0.5
    assert score.ledger["children"][1]["value"] == 0.9
    assert score.ledger["children"][1]["weight"] == 0.0


def test_an_unscored_diagnostic_costs_nothing(run, fixed):
    (score,) = run(weighted_sum(fixed("a", 0.5), leaf(fixed("seen", LOST), role="diagnostic")))
    assert score.value == 0.5
    assert score.ledger["children"][1]["unscored"] == "the world is gone"


def test_weighted_sum_propagates_an_unscored_child(run, fixed):
    (score,) = run(weighted_sum((1.0, fixed("a", 0.5)), (1.0, fixed("b", LOST))))
    assert score.value is None
    assert score.unscored == "b: the world is gone"


def test_weighted_sum_renormalises(run, fixed):
    # Absolute weights 1 + 3 + 4 = 8, of which 1 + 3 are left: what is left counts twice.
    root = weighted_sum(
        (1.0, fixed("a", 0.5)), (-3.0, fixed("b", 0.25)), (4.0, fixed("c", LOST)), on_unscored="renormalise"
    )
    (score,) = run(root)
    assert score.value == pytest.approx(2 * 0.5 - 6 * 0.25)


def test_weighted_sum_floors_at_the_worst_end_of_each_weight(run, fixed):
    root = weighted_sum(
        (1.0, fixed("a", 0.5)),
        (2.0, fixed("b", LOST, bounds=(-1, 1))),
        (-3.0, fixed("c", LOST, bounds=(0, 2))),
        on_unscored="floor",
    )
    (score,) = run(root)
    assert score.value == pytest.approx(0.5 - 2.0 - 6.0)


@pytest.mark.parametrize(
    ("asked", "at_least", "value"), [(1.0, None, 0.7), (0.99, None, -1.0), (0.5, 0.5, 0.7), (0.4, 0.5, -1.0)]
)
def test_gate(run, fixed, asked, at_least, value):
    (score,) = run(gate(fixed("asked", asked), fixed("child", 0.7), at_least=at_least, floor=-1.0))
    assert score.value == value
    assert score.ledger["gate"]["open"] is (value == 0.7)
    assert score.ledger["bounds"] == [-1.0, 1.0]


def test_gate_says_why(run, fixed):
    (score,) = run(gate(fixed("sql/executes", 0.0), fixed("child", 0.7)))
    assert score.ledger["gate"]["why"] == "sql/executes = 0 is below 1"
    assert score.ledger["children"][1]["value"] == 0.7
    assert score.ledger["children"][1]["open"] is False


@pytest.mark.parametrize(("asked", "child", "value"), [(LOST, 0.7, -2.0), (1.0, LOST, -2.0), (0.0, LOST, -2.0)])
def test_gate_on_floor_is_closed_by_what_is_unscored(run, fixed, asked, child, value):
    (score,) = run(gate(fixed("asked", asked), fixed("child", child), floor=-2.0, on_unscored="floor"))
    assert score.value == value


def test_gate_on_floor_is_closed_by_a_condition_that_can_only_be_one_value(run, fixed):
    asked = weighted_sum((0.0, leaf(fixed("asked", LOST), role="safeguard")))
    (score,) = run(gate(asked, fixed("child", 0.7), floor=-2.0, on_unscored="floor"))
    assert score.value == recompute(score.ledger) == -2.0


@pytest.mark.parametrize(("asked", "child"), [(LOST, 0.7), (1.0, LOST)])
def test_gate_propagates(run, fixed, asked, child):
    (score,) = run(gate(fixed("asked", asked), fixed("child", child), floor=-2.0))
    assert score.value is None


def test_what_is_unscored_behind_a_closed_gate_does_not_matter(run, fixed):
    (score,) = run(gate(leaf(fixed("asked", 0.0), role="safeguard"), fixed("child", LOST), floor=-2.0))
    assert (score.value, score.success) == (-2.0, False)
    assert score.ledger["children"][1]["unscored"] == "the world is gone"


@pytest.mark.parametrize(
    ("tiers", "value"),
    [
        ((1.0, 0.0, 1.0), (1 + 0.5) / 3),
        ((0.5, 2.0, 1.0), 0.5 / 3),
        ((1.0, 2.0, 0.25), (1 + 1 + 0.25) / 3),
        ((0.0, 2.0, 1.0), 0.0),
        ((1.0, 2.0, 1.0), 1.0),
    ],
)
def test_lexicographic_counts_a_tier_only_below_full_ones(run, fixed, tiers, value):
    root = lexicographic(fixed("a", tiers[0]), fixed("b", tiers[1], bounds=(-2, 2)), fixed("c", tiers[2]))
    (score,) = run(root)
    assert score.value == pytest.approx(value)


def test_lexicographic_with_an_unscored_tier(run, fixed):
    tiers = (fixed("a", 1.0), fixed("b", LOST), fixed("c", 0.5))
    assert run(lexicographic(*tiers))[0].value is None
    assert run(lexicographic(*tiers, on_unscored="renormalise"))[0].value == pytest.approx((1 + 0.5) / 2)
    assert run(lexicographic(*tiers, on_unscored="floor"))[0].value == pytest.approx(1 / 3)


def test_product(run, fixed):
    tiers = (fixed("a", 0.5), fixed("b", -2.0, bounds=(-3, 1)), fixed("c", LOST, bounds=(0.1, 1)))
    (score,) = run(product(*tiers[:2]))
    assert score.value == -1.0
    assert score.ledger["bounds"] == [-3.0, 1.0]
    assert run(product(*tiers))[0].value is None
    assert run(product(*tiers, on_unscored="renormalise"))[0].value == -1.0
    assert run(product(*tiers, on_unscored="floor"))[0].value == pytest.approx(-0.1)


def test_minimum(run, fixed):
    children = (fixed("a", 0.5), fixed("b", 0.2), fixed("c", LOST, bounds=(-1, 1)))
    assert run(minimum(*children[:2]))[0].value == 0.2
    assert run(minimum(*children))[0].value is None
    assert run(minimum(*children, on_unscored="renormalise"))[0].value == 0.2
    assert run(minimum(*children, on_unscored="floor"))[0].value == -1.0


@pytest.mark.parametrize(("value", "held"), [(-3.0, -1.0), (0.2, 0.2), (4.0, 0.5)])
def test_clip(run, fixed, value, held):
    (score,) = run(clip(fixed("a", value, bounds=(-5, 5)), -1, 0.5))
    assert score.value == held
    assert score.ledger["bounds"] == [-1.0, 0.5]


def test_clip_on_floor_is_its_low_end(run, fixed):
    assert run(clip(fixed("a", LOST), 0.25, 0.5, on_unscored="floor"))[0].value == 0.25
    # Where the child cannot get that low, the worst that it can be.
    (score,) = run(clip(fixed("a", LOST, bounds=(-0.5, -0.25)), -1.0, 1.0, on_unscored="floor"))
    assert score.value == recompute(score.ledger) == -0.5


def test_nothing_left_is_unscored_however_it_is_handled(run, fixed):
    for make in (weighted_sum, product, minimum, lexicographic):
        (score,) = run(make(fixed("a", LOST), fixed("b", LOST), on_unscored="renormalise"))
        assert score.value is None
        assert score.unscored == "a: the world is gone; b: the world is gone"


def test_nested_reasons_keep_the_leaf_that_they_come_from(run, fixed):
    (score,) = run(weighted_sum((1.0, product(fixed("deep", LOST), fixed("b", 1.0)))))
    assert score.unscored == "deep: the world is gone"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: weighted_sum((float("nan"), f("a", 1.0))), "the weight of 'a' must be finite"),
        (lambda f: weighted_sum((-1e-7, f("a", 1.0))), "expected 0 or at least 1e-06 in size"),
        (lambda f: weighted_sum((0.5, leaf(f("a", 1.0), role="diagnostic"))), "leave its weight out"),
        (lambda f: weighted_sum(), "no children"),
        (lambda f: weighted_sum(leaf(f("a", 1.0), role="diagnostic")), "diagnostics alone"),
        (lambda f: gate(f("a", 1.0), f("b", 1.0), at_least=1.5), r"at_least must lie in \(0, 1\]"),
        (lambda f: gate(f("a", 1.0), f("b", 1.0), at_least=0.0), "would always be open or never"),
        (lambda f: gate(f("a", 1.0), f("b", 1.0), floor=float("inf")), "floor must be finite"),
        (lambda f: gate(f("a", 1.0), f("b", 1.0), on_unscored="renormalise"), "on_unscored of gate must be one of"),
        (lambda f: clip(f("a", 1.0), 1.0, 0.0), "low below high"),
        (lambda f: leaf(f("a", 1.0), role="judge"), "role must be one of"),
        (lambda f: leaf(f("a", 1.0), severity="catastrophic"), "only a safeguard can be"),
        (lambda f: leaf("not a component"), "expected a component"),
    ],
)
def test_what_cannot_be_meant_is_refused(fixed, make, message):
    with pytest.raises(RewardError, match=message):
        make(fixed)
