"""The SQL components, on evidence made by hand and episodes as an environment keeps them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl import Task, ToolCall
from agentrl.episode import LiveEpisode
from agentrl.errors import EvidenceError
from agentrl.reward import RewardTree, TurnView, clip, evidence, gate, leaf, product
from agentrl.reward.evidence import evidence_of, from_json, to_json
from agentrl_rewards.sql import ResultSets, correct, executes, needless_calls, reads_allowed

MATCH, VACUOUS = ("match", "ok"), ("match_vacuous", "both_empty")
RIGHT = ResultSets("SELECT 1", (MATCH, VACUOUS, MATCH), 3, 2, (), 1)
NOTHING = ResultSets(None, (), 3, 0, (), 1)
WRONG = ResultSets("SELECT 1", (MATCH, ("mismatch", "values")), 3, 1, (), 1)
BROKEN = ResultSets("SELEC 1", (("error", "exec_error"),), 3, 1, (), 1)
THIEF = replace(RIGHT, refused=("the table sqlite_master may not be read",))


class World:
    def __init__(self, found: ResultSets | None) -> None:
        self.found = found

    @evidence
    def result_sets(self) -> ResultSets:
        if self.found is None:
            raise EvidenceError("the gold query is invalid (exec_error).")
        return self.found


def episode(found: ResultSets | None, *turns: TurnView) -> LiveEpisode:
    made = LiveEpisode(World(found), Task("t/0", "Toy", "?"), 4, evidence_of(World))
    made.turns += turns
    return made


@pytest.mark.parametrize(
    ("found", "values"),
    [(RIGHT, (1, 1, 1)), (NOTHING, (0, 0, None)), (WRONG, (0, 1, 1)), (BROKEN, (0, 0, 1)), (THIEF, (1, 1, 0))],
)
def test_values(found, values):
    tree = {"correct": correct, "executes": executes, "reads_allowed": reads_allowed}
    for (name, component), value in zip(tree.items(), values, strict=True):
        if value is None:
            with pytest.raises(Exception, match="there were no queries to check"):
                component(episode(found))
        else:
            assert component(episode(found)).value == value, name


@pytest.mark.parametrize(
    ("verdicts", "right"),
    [
        ((MATCH,) * 3, True),
        ((VACUOUS, VACUOUS, MATCH), True),
        ((VACUOUS,) * 3, False),
        ((MATCH, MATCH), False),
        ((MATCH, MATCH, ("mismatch", "values")), False),
        ((), False),
    ],
)
def test_right_means_right_on_every_database(verdicts, right):
    assert replace(RIGHT, verdicts=verdicts).right is right


def test_the_evidence_says_why():
    assert correct(episode(WRONG)).evidence == {
        "verdict": "mismatch",
        "reason": "values",
        "databases": "2 of 3",
        "rules": 1,
    }
    assert correct(episode(NOTHING)).evidence == {"verdict": "nothing submitted"}
    assert reads_allowed(episode(THIEF)).evidence == {"refused": ["the table sqlite_master may not be read"]}


def test_evidence_survives_json():
    assert from_json(ResultSets, to_json(THIEF)) == THIEF


def test_evidence_that_fails_is_never_a_zero():
    tree = RewardTree(gate(executes, correct))
    broken = episode(None, TurnView("x"))
    tree.begin(broken)
    score = tree.step(broken, ended=True)
    assert score.value is None
    assert "the gold query is invalid" in score.unscored


@pytest.mark.parametrize(("found", "reward"), [(RIGHT, 1.0), (THIEF, 0.9), (WRONG, 0.0), (BROKEN, 0.0), (NOTHING, 0.0)])
def test_a_gate_and_a_safeguard_at_work(found, reward):
    """The tree that SqlEnv uses, written in Python."""
    safe = clip(leaf(reads_allowed, role="safeguard"), 0.9, 1.0)
    tree = RewardTree(gate(leaf(executes, role="safeguard"), product(correct, safe)))
    made = episode(found, TurnView("x"))
    tree.begin(made)
    score = tree.step(made, ended=True)
    assert score.value == pytest.approx(reward, abs=1e-12)
    assert score.success is (found in (RIGHT, THIEF))


def test_needless_calls_are_those_made_before():
    look = ToolCall("run_sql", {"query": "SELECT 1"})
    other = ToolCall("run_sql", {"query": "SELECT 2"})
    made = episode(
        RIGHT, TurnView("", (look, other)), TurnView("", (look,)), TurnView("", (ToolCall("list_tables", {}),))
    )
    assert needless_calls(made).value == 0.75
    with pytest.raises(Exception, match="no tool calls"):
        needless_calls(episode(NOTHING, TurnView("hello")))
