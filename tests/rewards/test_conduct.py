"""The conduct components, with numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Task
from agentrl.episode import LiveEpisode
from agentrl.reward import RewardTree, TurnView
from agentrl_rewards.conduct import Length, length, malformed, turns


def episode(*taken: TurnView, max_turns: int = 5) -> LiveEpisode:
    made = LiveEpisode(object(), Task("t/0", "Toy", "?"), max_turns, {})
    made.turns += taken
    return made


GOOD, BAD = TurnView("x" * 100), TurnView("y" * 300, malformed="no call")


def test_malformed_is_the_share_that_could_be_read():
    assert malformed(episode(GOOD, GOOD)).value == 1.0
    assert malformed(episode(GOOD, BAD, BAD, GOOD)).value == 0.5
    assert malformed(episode(BAD)).value == 0.0


@pytest.mark.parametrize(("n", "value"), [(1, 1.0), (2, 0.75), (3, 0.5), (5, 0.0)])
def test_turns_fall_evenly_from_the_first_to_the_last(n, value):
    assert turns(episode(*[GOOD] * n)).value == value


def test_an_episode_of_one_turn_at_most_is_as_short_as_it_can_be():
    assert turns(episode(GOOD, max_turns=1)).value == 1.0


def test_length_is_the_average_of_the_messages():
    judge = Length(free_chars=100, worst_chars=300)
    assert judge(episode(GOOD)).value == 1.0
    assert judge(episode(BAD)).value == 0.0
    assert judge(episode(GOOD, BAD)).value == 0.5
    assert judge(episode(TurnView("z" * 10_000))).value == 0.0


@pytest.mark.parametrize("component", [malformed, turns, Length()])
def test_nothing_done_is_nothing_well_done(component):
    with pytest.raises(Exception, match="there were no messages to check"):
        component(episode())


@given(st.lists(st.tuples(st.text(max_size=50), st.booleans()), min_size=1, max_size=5))
def test_scores_stay_inside_their_bounds(said):
    made = episode(*[TurnView(text, malformed="bad" if bad else None) for text, bad in said])
    for component in (malformed, turns, Length(free_chars=3, worst_chars=20)):
        assert 0.0 <= component(made).value <= 1.0


def test_options_of_length_come_from_the_tree():
    children = [
        {"component": "agentrl_rewards.conduct:length", "options": {"free_chars": 100, "worst_chars": 300}},
        {"component": "agentrl_rewards.conduct:malformed", "role": "diagnostic"},
    ]
    tree = RewardTree.load({"kind": "weighted_sum", "children": children})
    made = episode(GOOD, BAD)
    tree.begin(made)
    assert tree.step(made, ended=True).value == 0.5
    assert length is Length
