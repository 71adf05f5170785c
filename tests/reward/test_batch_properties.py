"""What holds for batch nodes whatever a collection earned."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.reward import RewardTree, constrained, group_relative, leaf, normalised
from agentrl.reward.batch_nodes import Running
from agentrl.reward.ledger import check_trajectory
from agentrl.types import EndReason

WIDE = (-100.0, 100.0)
ENDS = [EndReason.SUBMITTED, EndReason.MAX_TURNS, EndReason.CUT, EndReason.ENV_ERROR]
numbers = st.floats(-50, 50).map(lambda value: round(value, 6))


@st.composite
def collections(draw, most=6):
    """Arguments of `attempt` for some episodes of a few tasks."""
    made = []
    for i in range(draw(st.integers(0, most))):
        n_turns = draw(st.integers(1, 3))
        made.append(
            {
                "id": f"{i}",
                "task": f"train/{draw(st.integers(0, 2))}",
                "n_turns": n_turns,
                "end": draw(st.sampled_from(ENDS)),
                "solved": draw(numbers),
                "calm": [draw(numbers) for _ in range(n_turns)],
                "safe": [draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in range(n_turns)],
            }
        )
    return made


def children(told):
    return told("solved", bounds=WIDE), told("calm", "turn", WIDE)


def sums(batch):
    return {t.id: t.reward for t in batch.trajectories if not t.end.is_error}


def all_checked(batch):
    assert all(check_trajectory(t) <= 1e-9 * max(1.0, abs(t.reward)) for t in batch.trajectories)


@settings(max_examples=80, deadline=None)
@given(first=collections(), second=collections())
def test_normalised_divides_every_turn_by_one_positive_number(attempt, told, first, second):
    tree = RewardTree(normalised(*children(told), name="n"))
    state = tree.start_state()
    for asked in (first, second):
        batch = tree.transform([attempt(tree, **each) for each in asked], state)
        state = json.loads(json.dumps(batch.state))
        all_checked(batch)
        for t in batch.trajectories:
            if not t.end.is_error:
                deviation = batch.metrics["reward/deviation/n"]
                assert deviation >= 0.1
                assert [turn.reward * deviation for turn in t.turns] == pytest.approx(t.ledger["raw"], abs=1e-9)
                assert all(
                    math.copysign(1, turn.reward) == math.copysign(1, raw)
                    for turn, raw in zip(t.turns, t.ledger["raw"], strict=True)
                )


@settings(max_examples=60, deadline=None)
@given(asked=collections(), factor=st.sampled_from([0.5, 3.0, 10.0]))
def test_normalised_forgets_the_scale_once_the_deviation_is_above_its_floor(attempt, told, asked, factor):
    plain = RewardTree(normalised(*children(told), min_std=1e-9))
    scaled = RewardTree(normalised(*((factor, child) for child in children(told)), min_std=1e-9))
    one = plain.transform([attempt(plain, **each) for each in asked], plain.start_state())
    other = scaled.transform([attempt(scaled, **each) for each in asked], scaled.start_state())
    if one.metrics.get("reward/deviation/normalised", 0.0) > 1e-6 and one.state["node"]["count"] > 1:
        assert sums(other) == pytest.approx(sums(one), rel=1e-9, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.lists(numbers, max_size=6), max_size=5))
def test_the_running_deviation_is_that_of_all_numbers_at_once(parts):
    running = Running()
    for part in parts:
        running = running.merged(Running.of(part))
    whole = Running.of([value for part in parts for value in part])
    assert running.count == whole.count
    assert running.mean == pytest.approx(whole.mean, abs=1e-9)
    assert running.m2 == pytest.approx(whole.m2, rel=1e-9, abs=1e-6)


@settings(max_examples=80, deadline=None)
@given(
    asked=st.lists(collections(), min_size=1, max_size=4),
    budget=st.sampled_from([0.0, 0.25, 0.5]),
    start=st.sampled_from([0.0, 0.05, 2.0]),
)
def test_a_multiplier_is_never_negative_and_rises_exactly_when_the_rate_is_above_the_budget(
    attempt, told, asked, budget, start
):
    safe = leaf(told("safe", "turn"), role="safeguard")
    tree = RewardTree(constrained(children(told)[0], safe, budget=budget, start=start, eta=0.3))
    state = tree.start_state()
    for part in asked:
        batch = tree.transform([attempt(tree, **each) for each in part], state)
        all_checked(batch)
        before, after = (each["node"]["multipliers"]["safe"] for each in (state, batch.state))
        counted = [each for each in part if each["end"].in_baseline]
        rate = sum(min(each["safe"]) < 1.0 for each in counted) / len(counted) if counted else None
        assert batch.metrics.get("reward/violation_rate/safe") == rate
        assert after >= 0.0
        assert (after > before) == (rate is not None and rate > budget)
        assert (after == before) == (rate is None or rate == budget or (before == 0.0 and rate < budget))
        for each, t in zip(part, batch.trajectories, strict=True):
            if not t.end.is_error:
                paid = sum(t.ledger["raw"]) - t.reward
                assert paid == pytest.approx(before if min(each["safe"]) < 1.0 else 0.0, abs=1e-9)
        state = json.loads(json.dumps(batch.state))


@settings(max_examples=100, deadline=None)
@given(asked=collections(8), weights=st.tuples(st.sampled_from([-2.0, 0.0, 1.0]), st.sampled_from([0.5, 3.0])))
def test_group_relative_sums_to_zero_over_every_group_and_drops_nobody_unseen(attempt, told, asked, weights):
    tree = RewardTree(group_relative(*zip(weights, children(told), strict=True)))
    whole = [attempt(tree, **each) for each in asked]
    batch = tree.transform(whole, tree.start_state())
    all_checked(batch)
    groups = {}
    for t in batch.trajectories:
        if not t.end.is_error:
            groups.setdefault(t.task.id, []).append(t)
    excluded = too_small = 0
    for attempts in groups.values():
        members = [t for t in attempts if t.end.in_baseline]
        trained = [t for t in attempts if t.ledger["trained"] is not None]
        assert trained == (members if len(members) > 1 else [])
        assert sum(t.reward for t in trained) == pytest.approx(0.0, abs=1e-6)
        excluded += len(attempts) - len(trained)
        too_small += len(members) < 2
    assert batch.metrics["reward/episodes_excluded"] == excluded
    assert batch.metrics["reward/groups_too_small"] == too_small


@settings(max_examples=60, deadline=None)
@given(asked=collections(8), shift=st.sampled_from([-20.0, 7.0]))
def test_group_relative_forgets_what_all_attempts_share(attempt, told, asked, shift):
    tree = RewardTree(group_relative(told("solved", bounds=WIDE)))
    one = tree.transform([attempt(tree, **each) for each in asked], tree.start_state())
    moved = [each | {"solved": each["solved"] + shift} for each in asked]
    other = tree.transform([attempt(tree, **each) for each in moved], tree.start_state())
    kept = {t.id for t in one.trajectories if t.ledger and t.ledger["trained"] is not None}
    assert {name: v for name, v in sums(other).items() if name in kept} == pytest.approx(
        {name: v for name, v in sums(one).items() if name in kept}, abs=1e-6
    )
