"""Batch nodes against numbers worked out by hand, and what they refuse."""

from __future__ import annotations

import math

import pytest

from agentrl.errors import CheckpointError, InvariantError, RewardError
from agentrl.reward import (
    RewardTree,
    constrained,
    group_relative,
    leaf,
    minimum,
    normalised,
    product,
    shaping,
    weighted_sum,
)
from agentrl.reward.ledger import check_trajectory
from agentrl.types import EndReason


def rewards(batch) -> dict[str, list[float]]:
    return {t.id: [turn.reward for turn in t.turns] for t in batch.trajectories}


@pytest.fixture
def scaled(told):
    return RewardTree(normalised((1.0, told("solved")), (0.5, told("calm", "turn")), min_std=0.01, name="both"))


def two(attempt, tree):
    return [
        attempt(tree, "a", n_turns=2, solved=1.0, calm=[1.0, 0.0]),
        attempt(tree, "b", n_turns=1, solved=0.0, calm=[0.5]),
    ]


def test_a_batch_node_reads_as_the_weighted_sum_of_its_children_in_an_episode(attempt, scaled):
    a, b = two(attempt, scaled)
    assert [turn.reward for turn in a.turns] == [0.5, 1.0]
    assert (a.reward, b.reward, a.success, b.success) == (1.5, 0.25, False, False)
    assert a.ledger["steps"][1]["entry"]["kind"] == "normalised"
    assert a.ledger["steps"][1]["entry"]["bounds"] == [0.0, 1.5]


def test_normalised_divides_by_the_deviation_from_before_and_never_shifts(attempt, scaled):
    # Returns 1.5 and 0.25: mean 0.875, unbiased deviation sqrt(2 * 0.625^2) = 0.8838834764831844.
    first = scaled.transform(two(attempt, scaled), scaled.start_state())
    deviation = 0.8838834764831844
    assert rewards(first)["a"] == pytest.approx([0.5 / deviation, 1.0 / deviation], abs=1e-15)
    assert rewards(first)["b"] == pytest.approx([0.25 / deviation], abs=1e-15)
    assert first.metrics["reward/deviation/both"] == pytest.approx(deviation)
    assert first.metrics["reward/trained_mean"] == pytest.approx(0.875 / deviation)
    assert first.state["node"] == {"count": 2, "mean": 0.875, "m2": 0.78125}
    # The second collection is divided by the same: what it brings comes after it.
    second = scaled.transform([attempt(scaled, "c", solved=1.0, calm=[1.0])], first.state)
    assert rewards(second)["c"] == pytest.approx([1.5 / deviation], abs=1e-15)
    # 1.5, 0.25 and 1.5: mean 13/12, squares 2 * (5/12)^2 + (10/12)^2 = 150/144.
    assert second.state["node"]["mean"] == pytest.approx(13 / 12, abs=1e-15)
    assert second.state["node"]["m2"] == pytest.approx(150 / 144, abs=1e-15)
    third = scaled.transform([attempt(scaled, "d", solved=1.0, calm=[0.0])], second.state)
    assert rewards(third)["d"] == pytest.approx([1 / math.sqrt(75 / 144)])


def test_normalised_alone_and_without_spread(attempt, told):
    tree = RewardTree(normalised(told("solved"), min_std=0.25))
    alone = tree.transform([attempt(tree, "a", solved=0.5)], tree.start_state())
    assert rewards(alone) == {"a": [0.5]}
    assert alone.metrics["reward/deviation/normalised"] == 1.0
    same = tree.transform([attempt(tree, "b", solved=0.5), attempt(tree, "c", solved=0.5)], alone.state)
    assert rewards(same) == {"b": [2.0], "c": [2.0]}
    assert same.state["node"] == {"count": 3, "mean": 0.5, "m2": 0.0}


def test_cut_episodes_are_divided_too_and_enter_no_deviation(attempt, scaled):
    cut = attempt(scaled, "c", n_turns=1, end=EndReason.CUT, calm=[1.0])
    whole = scaled.transform(two(attempt, scaled), scaled.start_state())
    batch = scaled.transform([*two(attempt, scaled), cut], scaled.start_state())
    assert batch.state == whole.state
    assert rewards(batch)["c"] == pytest.approx([0.5 / 0.8838834764831844])
    assert batch.metrics["reward/trained_mean"] == whole.metrics["reward/trained_mean"]


@pytest.fixture
def priced(told):
    return RewardTree(
        constrained(
            weighted_sum((1.0, told("solved")), (0.25, told("calm", "turn"))),
            leaf(told("safe", "turn"), role="safeguard"),
            told("short"),
            budget=0.25,
            eta=0.5,
            start=0.1,
        )
    )


def four(attempt, tree):
    whole = {"n_turns": 3, "solved": 1.0, "calm": [1.0, 1.0, 1.0]}
    return [
        attempt(tree, "a", **whole, safe=[1.0, 1.0, 1.0], short=1.0),
        attempt(tree, "b", **whole, safe=[1.0, 0.5, 0.0], short=1.0),
        attempt(tree, "c", **whole, safe=[0.0, 1.0, 1.0], short=1.0),
        attempt(tree, "d", **whole, safe=[1.0, 1.0, 0.0], short=1.0),
    ]


def test_constrained_reads_as_its_objective(attempt, priced):
    a, b, *_ = four(attempt, priced)
    assert [turn.reward for turn in b.turns] == [turn.reward for turn in a.turns] == [0.25, 0.25, 1.25]
    assert a.success is b.success is True
    assert a.ledger["steps"][0]["entry"]["bounds"] == [0.0, 0.25]


def test_constrained_takes_the_price_off_the_first_turn_that_breaks_a_safeguard(attempt, priced):
    first = priced.transform(four(attempt, priced), priced.start_state())
    assert rewards(first) == {
        "a": [0.25, 0.25, 1.25],
        "b": [0.25, pytest.approx(0.15), 1.25],
        "c": [pytest.approx(0.15), 0.25, 1.25],
        "d": [0.25, 0.25, pytest.approx(1.15)],
    }
    # Three of four break `safe`: 0.1 + 0.5 * (0.75 - 0.25). None breaks `short`: max(0, 0.1 - 0.5 * 0.25).
    assert first.state["node"] == {"multipliers": {"safe": pytest.approx(0.35), "short": 0.0}}
    assert first.metrics == {
        "reward/multiplier/safe": 0.1,
        "reward/multiplier/short": 0.1,
        "reward/violation_rate/safe": 0.75,
        "reward/violation_rate/short": 0.0,
        "reward/episodes_excluded": 0.0,
        "reward/trained_mean": pytest.approx(1.75 - 0.075),
    }
    second = priced.transform(four(attempt, priced), first.state)
    assert rewards(second)["b"] == [0.25, pytest.approx(-0.1), 1.25]
    assert second.state["node"]["multipliers"]["safe"] == pytest.approx(0.6)


def test_constrained_with_a_threshold(attempt, told):
    tree = RewardTree(constrained(told("solved"), told("brief"), budget=0.0, eta=1.0, start=1.0, at_least=0.5))
    batch = tree.transform(
        [attempt(tree, "a", solved=1.0, brief=0.5), attempt(tree, "b", solved=1.0, brief=0.49)], tree.start_state()
    )
    assert rewards(batch) == {"a": [1.0], "b": [0.0]}
    assert batch.state["node"]["multipliers"] == {"brief": 1.5}


def test_a_cut_episode_pays_for_what_it_broke_and_counts_in_no_rate(attempt, priced):
    cut = attempt(priced, "e", n_turns=2, end=EndReason.CUT, calm=[1.0, 1.0], safe=[1.0, 0.0])
    batch = priced.transform([*four(attempt, priced), cut], priced.start_state())
    assert rewards(batch)["e"] == [0.25, pytest.approx(0.15)]
    assert batch.metrics["reward/violation_rate/safe"] == 0.75


def test_a_safeguard_without_a_score_loses_the_episode_or_counts_as_broken(run, attempt, told):
    lost = constrained(told("solved"), told("safe"), budget=0.0)
    tree = RewardTree(lost)
    assert attempt(tree, "a", end=EndReason.VERIFIER_ERROR, solved=1.0, safe=None).ledger is None
    tree = RewardTree(constrained(told("solved"), told("safe"), budget=0.0, start=1.0, on_unscored="floor"))
    batch = tree.transform([attempt(tree, "a", solved=0.75, safe=None)], tree.start_state())
    assert rewards(batch) == {"a": [-0.25]}
    assert batch.metrics["reward/violation_rate/safe"] == 1.0


@pytest.fixture
def compared(told):
    root = group_relative(
        (2.0, told("solved")),
        (-1.0, told("waste", "turn")),
        leaf(told("seen"), role="diagnostic"),
        min_std=0.1,
    )
    return RewardTree(root)


def test_group_relative_compares_each_child_with_its_siblings(attempt, compared):
    batch = compared.transform(
        [
            attempt(compared, "a", n_turns=2, solved=1.0, waste=[0.5, 0.25], seen=0.3),
            attempt(compared, "b", n_turns=1, solved=0.0, waste=[0.0], seen=0.6),
        ],
        compared.start_state(),
    )
    # solved: mean 0.5, unbiased deviation sqrt(0.5); waste: 0.75 and 0, mean 0.375, deviation sqrt(2 * 0.375^2).
    of_solved, of_waste = math.sqrt(0.5), math.sqrt(2) * 0.375
    last = 2 * (1 - 0.5) / of_solved - (0.25 - 0.375) / of_waste
    assert rewards(batch)["a"] == pytest.approx([-0.5 / of_waste, last], abs=1e-12)
    assert rewards(batch)["b"] == pytest.approx([-2 * 0.5 / of_solved + 0.375 / of_waste], abs=1e-12)
    assert batch.metrics == {
        "reward/deviation/solved": pytest.approx(of_solved),
        "reward/deviation/waste": pytest.approx(of_waste),
        "reward/groups_too_small": 0.0,
        "reward/episodes_excluded": 0.0,
        "reward/trained_mean": pytest.approx(0.0, abs=1e-12),
    }


def test_group_relative_without_spread_is_zero_in_sum(attempt, compared):
    same = [attempt(compared, name, n_turns=2, solved=1.0, waste=[0.5, 0.0], seen=0.0) for name in "ab"]
    batch = compared.transform(same, compared.start_state())
    # Deviations at their floor 0.1: -0.5/0.1, then 2 * 1/0.1 less 2 * 1/0.1 - 0.5/0.1.
    assert rewards(batch)["a"] == pytest.approx([-5.0, 5.0])


def test_attempts_without_siblings_and_cut_ones_are_left_out_and_counted(attempt, compared):
    values = {"waste": [0.0], "seen": 0.0}
    whole = [
        attempt(compared, "a", task="train/1", solved=1.0, **values),
        attempt(compared, "b", task="train/1", solved=0.0, **values),
        attempt(compared, "c", task="train/1", end=EndReason.CUT, waste=[1.0]),
        attempt(compared, "d", task="train/2", solved=1.0, **values),
        attempt(compared, "e", task="train/2", end=EndReason.ENV_ERROR, solved=1.0, **values),
        attempt(compared, "f", task="train/3", end=EndReason.CUT, waste=[1.0]),
        attempt(compared, "g", task="train/4", end=EndReason.ENV_ERROR, solved=1.0, **values),
    ]
    batch = compared.transform(whole, compared.start_state())
    assert batch.metrics["reward/groups_too_small"] == 2.0
    assert batch.metrics["reward/episodes_excluded"] == 3.0
    by_id = {t.id: t for t in batch.trajectories}
    assert [name for name, t in by_id.items() if t.ledger and t.ledger["trained"] is None] == ["c", "d", "f"]
    assert by_id["c"].ledger["batch"]["excluded"].startswith("it was cut or never sampled")
    assert by_id["d"].ledger["batch"]["excluded"] == "it has 1 attempts to compare, expected at least 2"
    assert by_id["d"].turns[0].reward == by_id["d"].ledger["raw"][0] == 2.0
    assert by_id["e"] is whole[4]
    alone = compared.transform(whole[:2], compared.start_state())
    assert rewards(alone)["a"] == rewards(batch)["a"]
    assert [check_trajectory(t) for t in batch.trajectories] == pytest.approx([0.0] * 7, abs=1e-12)


def test_an_unscored_child_of_a_group_counts_as_its_worst_where_that_is_asked_for(attempt, told):
    root = group_relative((1.0, told("solved")), (-1.0, told("waste", bounds=(0, 2))), on_unscored="floor")
    tree = RewardTree(root)
    batch = tree.transform(
        [attempt(tree, "a", solved=None, waste=None), attempt(tree, "b", solved=1.0, waste=0.0)], tree.start_state()
    )
    # As solved = 0 and waste = 2: (0 - 0.5) / sqrt(0.5) - (2 - 1) / sqrt(2).
    assert rewards(batch)["a"] == pytest.approx([-math.sqrt(0.5) - math.sqrt(0.5)])
    assert rewards(batch)["b"] == pytest.approx([math.sqrt(2)])
    assert [check_trajectory(t) for t in batch.trajectories] == pytest.approx([0.0, 0.0], abs=1e-12)


def test_normalised_keeps_to_how_unscored_children_are_handled(attempt, told):
    children = ((1.0, told("solved")), (3.0, told("calm")))
    tree = RewardTree(normalised(*children, on_unscored="renormalise"))
    batch = tree.transform([attempt(tree, "a", solved=0.5, calm=None)], tree.start_state())
    assert rewards(batch) == {"a": [2.0]}
    tree = RewardTree(normalised(*children, on_unscored="floor"))
    batch = tree.transform([attempt(tree, "a", solved=0.5, calm=None)], tree.start_state())
    assert rewards(batch) == {"a": [0.5]}


@pytest.mark.parametrize("tree", ["scaled", "priced", "compared"])
def test_a_batch_of_errors_changes_nothing(request, attempt, tree):
    tree = request.getfixturevalue(tree)
    values = {"solved": 1.0, "calm": [1.0], "safe": [1.0], "short": 1.0, "waste": [1.0], "seen": 1.0}
    lost = [attempt(tree, name, end=EndReason.SANDBOX_ERROR, **values) for name in "ab"]
    for trajectories in (lost, []):
        batch = tree.transform(trajectories, tree.start_state())
        assert batch.trajectories == tuple(trajectories)
        assert batch.state == tree.start_state()
        assert "reward/trained_mean" not in batch.metrics
        assert not any("rate" in name or "deviation" in name for name in batch.metrics)


def test_an_error_is_never_counted_as_zero(attempt, scaled, priced):
    lost = {"end": EndReason.ENV_ERROR, "solved": 0.0, "calm": [0.0], "safe": [0.0], "short": 0.0}
    for tree, batch in ((scaled, two(attempt, scaled)), (priced, four(attempt, priced))):
        with_error = tree.transform([*batch, attempt(tree, "z", **lost)], tree.start_state())
        without = tree.transform(batch, tree.start_state())
        assert with_error.state == without.state
        assert with_error.metrics == without.metrics


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_reward_that_is_no_number_is_refused_by_name(attempt, scaled, value):
    a, b = two(attempt, scaled)
    b.ledger["steps"][0]["entry"]["value"] = value
    with pytest.raises(InvariantError, match=f"episode b, turn 0: the reward is {value}, expected a finite number"):
        scaled.transform([a, b], scaled.start_state())


def test_a_collection_with_one_id_twice_or_without_a_ledger_is_refused(attempt, scaled):
    a, b = two(attempt, scaled)
    with pytest.raises(InvariantError, match="found 'a' more than once"):
        scaled.transform([a, b, a], scaled.start_state())
    object.__setattr__(b, "ledger", None)
    with pytest.raises(InvariantError, match="episode b ended as submitted without a ledger"):
        scaled.transform([a, b], scaled.start_state())


def test_a_state_of_another_tree_is_refused(attempt, scaled, priced, told):
    a, b = two(attempt, scaled)
    for state in (None, {}, priced.start_state(), {"tree": 3, "node": {}}):
        with pytest.raises(CheckpointError, match="belongs to another tree: this one has digest"):
            scaled.transform([a, b], state)
    plain = RewardTree(told("solved"))
    assert plain.start_state() is None
    plain.check_state(None)
    with pytest.raises(CheckpointError, match="no batch node, the state is of"):
        plain.transform([], scaled.start_state())


@pytest.mark.parametrize(
    ("tree", "node"),
    [
        ("scaled", {"count": -1, "mean": 0.0, "m2": 0.0}),
        ("scaled", {"count": 1, "mean": math.nan, "m2": 0.0}),
        ("scaled", {"count": 1, "mean": 0.0, "m2": -1.0}),
        ("scaled", {"count": 1, "mean": 0.0}),
        ("scaled", None),
        ("priced", {"multipliers": {"safe": 0.0}}),
        ("priced", {"multipliers": {"safe": 0.0, "short": -0.5}}),
        ("priced", {"multipliers": {"safe": 0.0, "short": math.inf}}),
        ("priced", {}),
        ("priced", None),
    ],
)
def test_a_state_that_cannot_be_is_refused(request, tree, node):
    tree = request.getfixturevalue(tree)
    with pytest.raises(CheckpointError, match="cannot be used: expected"):
        tree.check_state(tree.start_state() | {"node": node})


def test_a_tree_without_a_batch_node_trains_on_what_was_earned(attempt, told):
    tree = RewardTree(told("solved"))
    a, b = attempt(tree, "b", solved=1.0), attempt(tree, "a", solved=0.0)
    batch = tree.transform([a, b], tree.start_state())
    assert (batch.trajectories, batch.state, batch.metrics) == ((b, a), None, {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: weighted_sum(normalised(t("a"))), r"'normalised' \(normalised\) stands under 'weighted_sum'"),
        (lambda t: normalised(group_relative(t("a"))), r"'group_relative' .* expected it as the root"),
        (lambda t: minimum(constrained(t("a"), t("b"), budget=0.0)), "Put 'minimum' below it"),
        (lambda t: constrained(product(t("a"), normalised(t("c"))), t("b"), budget=0.0), "'normalised' .* 'product'"),
        (lambda t: normalised(t("a"), shaping(t("phi", "turn"))), "shaping is an addend of the root"),
        (lambda t: group_relative(t("a"), shaping(t("phi", "turn"))), "shaping is an addend of the root"),
        (lambda t: normalised(t("a"), min_std=0.0), "min_std is the floor of a divisor: expected it above 0"),
        (lambda t: group_relative(t("a"), min_std=math.nan), "min_std is the floor of a divisor"),
        (lambda t: group_relative(t("a"), on_unscored="renormalise"), r"one of \['propagate', 'floor'\]"),
        (lambda t: constrained(t("a"), t("b"), budget=0.0, on_unscored="renormalise"), "'propagate', 'floor'"),
        (lambda t: group_relative(minimum(t("a")), minimum(t("b"))), "several children 'minimum': give each a `name`"),
        (lambda t: normalised(leaf(t("a"), role="diagnostic")), "it holds diagnostics alone"),
        (lambda t: constrained(t("a"), budget=0.0), "needs at least one of `safeguards`"),
        (lambda t: constrained(t("a"), leaf(t("b")), budget=0.0), "'b' stands among its safeguards: .* 'objective'"),
        (lambda t: constrained(t("a"), minimum(t("b")), budget=0.0), "found a minimum"),
        (lambda t: constrained(t("a"), t("b"), budget=0.0, at_least=1.5), r"at_least must lie in \(0, 1\]"),
        (lambda t: constrained(t("a"), t("b"), budget=1.0), r"expected budget in \[0, 1\)"),
        (lambda t: constrained(t("a"), t("b"), budget=-0.1), r"expected budget in \[0, 1\)"),
        (lambda t: constrained(t("a"), t("b"), budget=0.0, eta=0.0), "eta above 0"),
        (lambda t: constrained(t("a"), t("b"), budget=0.0, start=-1.0), "start of at least 0"),
        (lambda t: constrained(leaf(t("a"), role="diagnostic"), t("b"), budget=0.0), "no objective"),
    ],
)
def test_batch_nodes_that_cannot_mean_what_they_say_are_refused(told, make, message):
    with pytest.raises(RewardError, match=message):
        RewardTree(make(told))
