"""The sum check: every number of a ledger that is changed is found."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest

from agentrl.errors import InvariantError
from agentrl.reward import RewardTree, clip, gate, leaf, lexicographic, minimum, product, shaping, weighted_sum
from agentrl.reward.ledger import check_ledger, check_trajectory
from agentrl.reward.recompute import recompute
from agentrl.types import EndReason, Task, Trajectory, Turn, Unscored


@pytest.fixture
def episode(run, fixed):
    root = weighted_sum(
        (1.0, gate(fixed("runs", 1.0), lexicographic(fixed("right", 1.0), fixed("short", 0.5)), floor=-1.0)),
        (0.5, product(fixed("a", 0.5), clip(fixed("b", 0.9), 0.0, 0.8))),
        (0.25, minimum(fixed("c", 0.3), fixed("d", 0.6))),
        (0.1, fixed("calm", {0: 1.0, 1: 0.5}, "turn")),
        shaping(fixed("progress", {-1: 0.1, 0: 0.4, 1: 0.8}, "turn"), gamma_turn=0.9),
        leaf(fixed("seen", 0.7), role="diagnostic"),
    )
    tree = RewardTree(root)
    rewards = [score.value for score in run(tree, n_turns=2)]
    return tree.final(EndReason.SUBMITTED), rewards


def test_a_true_ledger_passes(episode):
    ledger, rewards = episode
    # 0.1 * 1 + 0.9 * 0.4 - 0.1, and 0.75 + 0.5 * 0.5 * 0.8 + 0.25 * 0.3 + 0.1 * 0.5 - 0.4
    assert rewards == pytest.approx([0.36, 0.75 + 0.2 + 0.075 + 0.05 - 0.4])
    assert check_ledger(ledger, rewards) <= 1e-12
    assert [recompute(step["entry"]) for step in ledger["steps"]] == pytest.approx(rewards, abs=1e-12)


def places(value, path=()):
    """Every number and flag that a ledger's sums depend on."""
    if isinstance(value, dict):
        for key, inner in value.items():
            # What an open gate, an inactive bound, a diagnostic or an end leaves unused changes no sum.
            unused = {"at_least", "floor", "low"}
            unused |= {"weight"} if value.get("role") == "diagnostic" else set()
            unused |= {"gamma_turn"} if value.get("after") == 0.0 else set()
            if key not in {"bounds", "turn", "success", *unused}:
                yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*path, i))
    elif isinstance(value, bool | float):
        yield path


def changed(ledger, path, change: Callable):
    ledger = copy.deepcopy(ledger)
    place = ledger
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = not place[path[-1]] if isinstance(place[path[-1]], bool) else change(place[path[-1]])
    return ledger


def passes(ledger, rewards):
    try:
        check_ledger(ledger, rewards)
    except InvariantError:
        return False
    return True


@pytest.mark.parametrize("change", [lambda x: x + 3e-6, lambda x: x - 0.5, lambda x: math.nan])
def test_every_number_that_is_changed_is_found(episode, change):
    ledger, rewards = episode
    found = list(places(ledger))
    assert len(found) > 60
    assert [path for path in found if passes(changed(ledger, path, change), rewards)] == []


@pytest.mark.parametrize("k", [0, 1])
def test_a_trained_reward_that_is_another_one_is_found(episode, k):
    ledger, rewards = episode
    rewards[k] += 1e-8
    with pytest.raises(InvariantError, match=f"reward of turn {k}: it states .*gap 1e-08, allowed 1e-09"):
        check_ledger(ledger, rewards)


def test_a_gap_within_rounding_is_reported_and_passes(episode):
    ledger, rewards = episode
    rewards[0] += 1e-10
    assert check_ledger(ledger, rewards) == pytest.approx(1e-10, rel=1e-3)


def test_a_lost_step_and_a_step_too_many_are_found(episode):
    ledger, rewards = episode
    with pytest.raises(InvariantError, match="reward of turn 1"):
        check_ledger(ledger | {"steps": ledger["steps"][:1]}, rewards)
    with pytest.raises(InvariantError, match="turn 1: the episode has 1 turns"):
        check_ledger(ledger, rewards[:1])


def test_an_unscored_step_is_found(run, fixed):
    tree = RewardTree(fixed("a", Unscored("gone")))
    run(tree)
    with pytest.raises(InvariantError, match="the root is unscored: gone"):
        check_ledger(tree.final(EndReason.SUBMITTED), [0.0])


def trajectory(rewards, ledger, end=EndReason.SUBMITTED):
    turns = tuple(Turn((1,), (2, 3), (-0.1, -0.2), 0, "stop", "hello", reward=reward) for reward in rewards)
    task = Task("train/000001", "Test-v0", "do it")
    return Trajectory("0/1/0", task, 0, (), turns, end, ledger, n_sampled=2 * len(turns))


def test_a_trajectory_carries_what_its_ledger_says(episode):
    ledger, rewards = episode
    assert check_trajectory(trajectory(rewards, ledger)) <= 1e-12
    with pytest.raises(InvariantError, match="episode 0/1/0: the ledger does not add up at reward of turn 0"):
        check_trajectory(trajectory([rewards[0] + 0.1, rewards[1]], ledger))


def test_a_trajectory_that_is_trained_on_has_a_ledger():
    with pytest.raises(InvariantError, match="ended as submitted without a ledger"):
        check_trajectory(trajectory([1.0], None))
    assert check_trajectory(trajectory([0.0], None, EndReason.VERIFIER_ERROR)) == 0.0


def test_an_episode_without_turns_trains_nothing_and_passes(fixed, at):
    tree = RewardTree(fixed("a", 0.5))
    tree.begin(at(-1))
    assert tree.step(at(-1, EndReason.CONTEXT_FULL), ended=True).value == 0.5
    assert check_trajectory(trajectory([], tree.final(EndReason.CONTEXT_FULL), EndReason.CONTEXT_FULL)) == 0.0
