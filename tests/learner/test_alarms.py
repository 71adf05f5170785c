"""Alarms: when each rings, when it does not, that it rings once in words, and that a resume remembers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from agentrl.learner.alarms import EARLY, REMEDIES, STREAK, Alarms
from agentrl.types import EndReason, Task

CALM = {"ppo/entropy": 1.0, "ppo/clip_fraction": 0.1, "critic/explained_variance": 0.5}


def group(kit, rewards, task="t/0", end=EndReason.SUBMITTED):
    return [
        replace(kit.trajectory([(2, 2, reward)], seed=i, end=end), task=Task(task, "toy", ""))
        for i, reward in enumerate(rewards)
    ]


def settled(kit, rewards=(0.0, 1.0)):
    """Alarms that have seen the early updates: entropy 1, rewards half and half."""
    alarms = Alarms()
    for _ in range(EARLY):
        assert set(alarms.observe(CALM, group(kit, rewards)).values()) == {0.0}
    return alarms


def often(alarms, metrics, trajectories, times=STREAK):
    """What the last of so many equal updates gives."""
    for _ in range(times):
        found = alarms.observe(metrics, trajectories)
    return found


def ringing(found):
    return {name.removeprefix("alarm/") for name, value in found.items() if value}


def test_every_alarm_is_a_metric_always_and_has_a_remedy_of_one_line(kit):
    found = Alarms().observe({}, [])
    assert found == {f"alarm/{name}": 0.0 for name in REMEDIES}
    assert all("\n" not in line and line.endswith(".") for line in REMEDIES.values())


@pytest.mark.parametrize(
    ("entropy", "expected"),
    [(1.9, set()), (2.1, {"entropy_high"}), (0.31, set()), (0.29, {"entropy_low"}), (math.nan, set())],
)
def test_entropy_against_its_early_mean(kit, entropy, expected):
    alarms, now = settled(kit), CALM | {"ppo/entropy": entropy}
    assert ringing(often(alarms, now, group(kit, (0.0, 1.0)), STREAK - 1)) == set()
    assert ringing(alarms.observe(now, group(kit, (0.0, 1.0)))) == expected


def test_the_early_mean_does_not_follow(kit):
    """Entropy that creeps up by a tenth each update is compared with the first five, and not with the last."""
    alarms, entropy = Alarms(), 1.0
    rang = []
    for _ in range(20):
        rang.append(ringing(alarms.observe(CALM | {"ppo/entropy": entropy}, group(kit, (0.0, 1.0)))))
        entropy *= 1.1
    early = sum(1.1**i for i in range(EARLY)) / EARLY
    assert rang.index({"entropy_high"}) == next(i for i in range(20) if 1.1**i > 2 * early) + STREAK - 1


def test_more_than_a_tenth_truncated(kit):
    done, cut = group(kit, [0.0] * 9), group(kit, [0.0], end=EndReason.MAX_TOKENS)
    assert ringing(Alarms().observe(CALM, done + cut)) == set()
    assert ringing(Alarms().observe(CALM, done[:8] + cut)) == {"truncation"}
    # Neither the trainer's own cuts nor errors are the agent's budget.
    other = group(kit, [0.0], end=EndReason.CUT) + group(kit, [0.0], end=EndReason.ENV_ERROR)
    assert ringing(Alarms().observe(CALM, done[:3] + other)) == set()


def test_spread_of_rewards_that_falls_without_success(kit):
    alarms = settled(kit)
    assert ringing(alarms.observe(CALM, group(kit, (0.0, 1.0)))) == set()
    assert ringing(often(alarms, CALM, group(kit, (0.4, 0.5)))) == {"reward_spread"}
    # One quiet batch says little.
    alarms.observe(CALM, group(kit, (0.0, 1.0)))
    assert ringing(alarms.observe(CALM, group(kit, (0.4, 0.5)))) == set()
    # Nothing was ever earned: nothing can be learned.
    assert ringing(often(settled(kit, (0.0, 0.0)), CALM, group(kit, (0.0, 0.0)))) == {"reward_spread"}
    # The tasks are solved: nothing to worry about.
    assert ringing(often(alarms, CALM, group(kit, (1.0, 1.0)))) == set()
    # One attempt at each task has no spread at all.
    alone = group(kit, (0.0,)) + group(kit, (0.0,), task="t/1")
    assert ringing(often(alarms, CALM, alone)) == set()


def test_explained_variance_below_zero_three_times_in_a_row(kit):
    alarms, bad = Alarms(), CALM | {"critic/explained_variance": -0.1}
    rang = [ringing(alarms.observe(metrics, [])) for metrics in (bad, bad, CALM, bad, bad, bad, bad, CALM)]
    assert rang == [set()] * 5 + [{"explained_variance"}] * 2 + [set()]


def test_a_clip_fraction_above_one_half(kit):
    assert ringing(Alarms().observe(CALM | {"ppo/clip_fraction": 0.51}, [])) == {"clip_fraction"}


def test_what_rings_is_said_once_and_again_after_it_was_silent(kit):
    alarms, bad = Alarms(), CALM | {"ppo/clip_fraction": 0.6}
    said = []
    for metrics in (bad, bad, CALM, bad):
        alarms.observe(metrics, [])
        said.append(alarms.lines)
    line = f"alarm/clip_fraction: {REMEDIES['clip_fraction']}"
    assert said == [(line,), (), (), (line,)]


def test_a_restored_state_goes_on(kit):
    first = settled(kit)
    bad = CALM | {"critic/explained_variance": -0.1, "ppo/entropy": 3.0}
    first.observe(bad, [])
    second = Alarms()
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        assert first.observe(bad, []) == second.observe(bad, [])
        assert first.lines == second.lines
