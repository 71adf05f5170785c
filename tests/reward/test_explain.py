"""What a person reads: every turn, token, node and reason; and nothing that the terminal obeys."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from agentrl.reward import RewardTree, component, gate, leaf, shaping, weighted_sum
from agentrl.reward.explain import inert, render_ledger
from agentrl.types import EndReason, Score, Task, ToolResult, Trajectory, Turn, Unscored

HOSTILE = "[bold red]FREE[/] \x1b[2J\x1b]0;owned\x07\x9b31m \u202egnp\u202c [link=http://x]y[/link]"


def shown(renderable) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def trajectory(ledger, rewards, end=EndReason.SUBMITTED, text="I look.", **more):
    turns = [
        Turn((1, 2, 3), (4, 5), (0.0, 0.0), 0, "stop", text, results=(ToolResult("look", text),), reward=reward)
        for reward in rewards
    ]
    task = Task("train/000007", "Test-v0", "Find the door.")
    return Trajectory("000001/train-000007/0", task, 0, (), tuple(turns), end, ledger, n_sampled=2 * len(turns), **more)


@pytest.fixture
def explained(run, fixed):
    root = weighted_sum(
        (1.0, gate(leaf(fixed("t/runs", 0.0), role="safeguard"), fixed("t/right", 0.75), floor=-0.5)),
        (0.1, leaf(fixed("t/calm", 1.0, "turn"), role="safeguard")),
        shaping(fixed("t/progress", {-1: 0.25, 0: 0.5, 1: 0.5}, "turn")),
        leaf(fixed("t/seen", Unscored("the camera is off")), role="diagnostic"),
    )
    tree = RewardTree(root)
    rewards = [score.value for score in run(tree, n_turns=2)]
    return shown(render_ledger(trajectory(tree.final(EndReason.SUBMITTED), rewards, success=False)))


def test_heading_and_turns(explained):
    assert "000001/train-000007/0  (task train/000007)" in explained
    assert "ended as submitted after 2 turns; no success; reward -0.55" in explained
    assert "turn 0   reward +0.35   (on token 4, the last that was sampled in it)" in explained
    assert "turn 1   reward -0.9   (on token 9, the last that was sampled in it)" in explained
    assert "look -> I look." in explained


def test_values_weights_gates_and_why(explained):
    assert "gate  -0.5  of [-0.5, 1]  x 1 adds -0.5  closed: t/runs = 0 is below 1" in explained
    assert "t/right  0.75  of [0, 1]  objective  not counted" in explained
    assert "t/calm  1  of [0, 1]  recoverable safeguard  x 0.1 adds +0.1" in explained
    assert "= 1 x (1 x 0.5 - 0.25), the change of the potential" in explained


def test_unscored_is_said_in_words(explained):
    assert "t/seen  not scored: the camera is off" in explained
    assert "sum of the step rewards  -0.55" in explained
    assert "\n  t/seen  not scored" in explained


def test_evidence_is_shown(run):
    @component(name="t/rows")
    def rows(episode):
        return Score(1.0, {"found": 3, "expected": HOSTILE})

    tree = RewardTree(rows)
    (score,) = run(tree)
    text = shown(render_ledger(trajectory(tree.final(EndReason.SUBMITTED), [score.value])))
    assert '{"found": 3, "expected": "[bold red]FREE[/]' in text


def test_an_error_is_said_not_to_be_zero():
    text = shown(render_ledger(trajectory(None, [0.0], EndReason.SANDBOX_ERROR, error="no space left \x1b[31m")))
    assert "it has no reward, and none of 0 either" in text
    assert "no space left" in text


def test_a_turn_at_which_nothing_was_due(run, fixed):
    tree = RewardTree(fixed("t/right", 1.0))
    rewards = [score.value for score in run(tree, n_turns=2)]
    assert "nothing was due here" in shown(render_ledger(trajectory(tree.final(EndReason.SUBMITTED), rewards)))


def test_a_ledger_alone_can_be_shown(run, fixed):
    tree = RewardTree(weighted_sum((2.0, fixed("t/right", 0.5))))
    run(tree)
    text = shown(render_ledger({"ledger": tree.final(EndReason.SUBMITTED)}))
    assert "t/right  0.5  of [0, 1]  objective  x 2 adds +1" in text


def test_hostile_text_is_inert(run, fixed):
    tree = RewardTree(fixed(f"t/{HOSTILE}", Unscored(HOSTILE)))
    run(tree)
    hostile = trajectory(tree.final(EndReason.VERIFIER_ERROR), [0.0], EndReason.VERIFIER_ERROR, text=HOSTILE)
    text = shown(render_ledger(hostile))
    assert text.count("[bold red]FREE[/]") >= 4
    assert not set(text) & set("\x1b\x07\x9b\u202e\u202c")


def test_inert_keeps_text_and_cuts_it():
    assert inert("a\tb\nc é 漢") == "a\tb\nc é 漢"
    assert inert("\x1b[1;31mred\x1b[0m\r\x00 \ud800") == "red "
    assert inert("\x1b]8;;http://x\x07link") == "8;;http://xlink"
    assert inert("x" * 50, limit=20) == "x" * 20 + " ... (30 more)"
