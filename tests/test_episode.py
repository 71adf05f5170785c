from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import agentrl
from agentrl.errors import UsageError
from agentrl.plugins import load_object
from agentrl.reward.ledger import check_ledger
from agentrl.types import EndReason, Message, Task, ToolResult

TOY = Path(__file__).parent / "toy_env.py"
ToyEnv, call = load_object(f"{TOY}:ToyEnv", "toy"), load_object(f"{TOY}:fence", "toy")
TASK = Task("train/000002", "Toy-v0", "Count to 3.", {"target": 3})
ADD3, SUBMIT = call("add", '{"n": 3}'), call("submit")


@pytest.fixture
def env():
    toy = ToyEnv(format="fenced")
    toy.reset(seed=7, options={"task": TASK})
    yield toy
    toy.close()


def test_an_exception_in_a_tool_is_an_error_and_never_shown(env):
    env.step(ADD3)
    observation, reward, terminated, truncated, info = env.step(call("echo", "a") + "\n" + call("trouble", "bug"))
    assert (reward, terminated, truncated, info["end"]) == (0.0, False, True, "env_error")
    assert "success" not in info
    assert info["ledger"] is None
    assert "secret" not in observation
    assert all("secret" not in message.content for message in env.messages)
    assert "ValueError: secret-of-the-environment" in env.last_step.error
    assert (env.ledger, env.torn_down, env.computed) == (None, 1, 0)


@pytest.mark.parametrize(("kind", "end"), [("give_up", EndReason.GAVE_UP), ("sandbox", EndReason.SANDBOX_ERROR)])
def test_a_tool_may_end_the_episode_with_a_reason(env, kind, end):
    env.step(call("trouble", kind) + "\n" + ADD3)
    record = env.last_step
    assert (record.end, env.end, env.value, len(record.results)) == (end, end, 0, 1)
    assert (record.error is not None) == end.is_error
    env.reset(seed=0)
    assert env.step(ADD3)[2:4] == (False, False)


def test_work_that_was_killed_at_its_deadline_is_a_result(env):
    env.step(call("trouble", "timeout"))
    assert env.last_step.results[0].error_kind == "deadline"
    assert env.end is None


def test_a_tool_that_overruns_its_deadline_is_an_error(env, monkeypatch):
    env.step(call("trouble", "sleep"))
    assert env.end is None
    monkeypatch.setattr("agentrl._step.OVERRUN_S", 0.02)
    env.step(call("trouble", "sleep"))
    assert env.end is EndReason.ENV_ERROR
    assert "its deadline is 0.01 s" in env.last_step.error


@pytest.mark.parametrize("reason", list(EndReason))
def test_finish_scores_or_not_as_the_reason_says(env, reason):
    env.step(ADD3)
    observation, reward, terminated, truncated, info = env.finish(reason)
    assert observation == ""
    assert (terminated, truncated) == (reason.is_terminated, not reason.is_terminated)
    assert reward == (0.0 if reason.is_error or reason.bootstraps else 1.0)
    assert (info["end"], env.end, env.torn_down) == (reason.value, reason, 1)
    assert (env.ledger is None) == reason.is_error
    assert env.success == (None if reason.is_error or reason.bootstraps else True)
    with pytest.raises(UsageError, match=f"the episode is over \\({reason}\\), call reset first"):
        env.step(ADD3)


def test_finish_counts_a_message_that_was_cut(env):
    env.step(ADD3)
    env.finish(EndReason.MAX_TOKENS, "```submit\n```")
    assert env.turns_used == 2
    assert env.messages[-1] == Message("assistant", "```submit\n```")
    assert env.ledger["steps"][0]["turn"] == 1


def test_finish_before_the_first_message(env):
    assert env.finish(EndReason.CONTEXT_FULL)[1] == 0.0
    assert env.ledger["end"] == "context_full"


@dataclass(frozen=True)
class World:
    value: int


@agentrl.component(name="each", when="turn", bounds=(0, 100))
def each(episode):
    assert episode.turns[episode.turn].text
    return agentrl.Score(float(episode.evidence(World).value + episode.evidence(World).value) / 2)


@agentrl.component(name="small", when="turn")
def small(episode):
    return agentrl.Score(float(episode.evidence(World).value < 4))


class TurnEnv(ToyEnv):
    reward = agentrl.weighted_sum(
        (1.0, each),
        (0.0, agentrl.leaf(small, role="safeguard", severity="catastrophic")),
    )

    @agentrl.evidence
    def world(self) -> World:
        self.computed += 1
        if self.value == 3:
            raise agentrl.errors.EvidenceError("the disk is full")
        return World(self.value)


def test_evidence_is_computed_once_for_each_version_of_the_world():
    toy = TurnEnv(format="fenced")
    toy.reset(seed=0, options={"task": TASK})
    add2 = call("add", '{"n": 2}')
    seen = []
    for message in (
        call("echo", "a"),
        call("echo", "b"),
        add2,
        call("add", '{"m": 1}'),
        call("nope"),
        call("echo", "c"),
    ):
        toy.step(message)
        seen.append((toy.last_step.reward, toy.computed))
    assert seen == [(0.0, 1), (0.0, 1), (2.0, 2), (2.0, 2), (2.0, 2), (2.0, 2)]


def test_a_turn_that_cannot_be_scored_ends_as_a_verifier_error():
    toy = TurnEnv(format="fenced")
    toy.reset(seed=0)
    _, reward, terminated, truncated, info = toy.step(ADD3)
    assert (reward, terminated, truncated, info["end"]) == (0.0, False, True, "verifier_error")
    assert "the disk is full" in info["unscored"]
    assert toy.torn_down == 1


def test_a_catastrophe_ends_the_episode_as_forbidden():
    toy = TurnEnv(format="fenced")
    toy.reset(seed=0)
    toy.step(call("add", '{"n": 2}'))
    *_, info = toy.step(call("add", '{"n": 2}'))
    assert (info["end"], info["success"], toy.last_step.reward) == ("forbidden", False, 4.0)
    assert [step["turn"] for step in toy.ledger["steps"]] == [0, 1]
    assert check_ledger(toy.ledger, [2.0, 4.0]) <= 1e-9


def test_output_is_cut_to_the_budget_of_its_tool(env):
    env.step(call("echo", "ä" * 100))
    assert env.last_step.results == (
        ToolResult("echo", env.last_step.results[0].content, None, pytest.approx(0, abs=1), 160),
    )
