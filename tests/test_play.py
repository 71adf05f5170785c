from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.errors import PolicyError
from agentrl.play import HumanPolicy, play
from agentrl.plugins import load_object
from agentrl.types import EndReason, Message, Sampling

ToyEnv = load_object(f"{Path(__file__).parent / 'toy_env.py'}:ToyEnv", "toy")


def played(typed, fmt="fenced", **kwargs):
    console = Console(file=io.StringIO(), width=100)
    env = ToyEnv(format=fmt, **kwargs)
    record = play(env, "train/000002", console, stream=io.StringIO(typed))
    return env, record, console.file.getvalue()


@pytest.mark.parametrize("fmt", ["fenced", "hermes"])
def test_a_person_solves_a_task(fmt):
    env, record, shown = played('/call echo hello there\n/call add {"n": 3}\n/call submit\n', fmt=fmt)
    assert (record.end, record.reward, env.success) == (EndReason.SUBMITTED, 1.0, True)
    assert env.torn_down == 1
    for part in (
        "Toy-v0: task train/000002, seed 0, at most 8 messages",
        "add(n: int = 1)  Adds to the count.",
        "n: How much.",
        "[system]\nYou count.",
        "[user]\nCount to 3. Lucky number: ",
        "[echo]\nhello there",
        "[add]\nThe count is 3.",
        "The episode ended: submitted.",
        "toy/reached",
    ):
        assert part in shown
    assert shown.index("The episode ended") < shown.index("toy/reached")


def test_a_message_of_several_lines_ends_with_an_empty_one():
    env, record, shown = played("\n\nI add.\n```add\n{}\n```\n\njust prose\n\n/call submit\n")
    assert [message.content for message in env.messages if message.role == "assistant"] == [
        "I add.\n```add\n{}\n```",
        "just prose",
        "```submit\n```",
    ]
    assert "[user]\nThe message makes no tool call." in shown
    assert record.end is EndReason.SUBMITTED


def test_what_cannot_be_called_is_said_and_asked_again():
    typed = ["ad", "add 3", "add {} {}", "echo", ""]
    env, _, shown = played("".join(f"/call {call}\n" for call in typed) + "/tools\n/help\n/what\n/call submit\n")
    assert env.turns_used == 2
    assert "There is no tool 'ad'. Did you mean 'add'?" in shown
    assert "Expected one JSON object. Write: /call add(n: int = 1), with the arguments as a JSON object." in shown
    assert shown.count("Ends the counting.") == 3
    assert shown.count("/quit") == 3


@pytest.mark.parametrize("typed", ["", "/quit\n", "/call add\n", "half a message"])
def test_leaving_gives_up(typed):
    env, record, shown = played(typed)
    assert record.end is EndReason.GAVE_UP
    assert env.torn_down == 1
    assert "The episode ended: gave_up." in shown


def test_an_error_is_shown_to_the_person():
    _, record, shown = played("/call trouble bug\n")
    assert record.end is EndReason.ENV_ERROR
    assert "secret-of-the-environment" in shown


def test_the_terminal_obeys_nothing_that_an_environment_says():
    _, _, shown = played("/call echo \x1b[2J[bold]x\u202e\n/quit\n")
    assert "\x1b" not in shown
    assert "\u202e" not in shown.partition("[echo]")[2]
    assert "[bold]x" in shown


def test_the_policy_shows_only_what_is_new():
    console = Console(file=io.StringIO(), width=100)
    env = ToyEnv(format="fenced")
    policy = HumanPolicy(env.format, console, io.StringIO("one\n\ntwo\n\nthree\n\n"))
    talk = [Message("system", "S-text"), Message("user", "U-text")]
    assert policy.act(talk, env.tools, Sampling()).text == "one"
    talk += [Message("assistant", "one"), Message("tool", "T-text", name="echo")]
    assert policy.act(talk, env.tools, Sampling()).text == "two"
    shown = console.file.getvalue()
    assert [shown.count(text) for text in ("S-text", "U-text", "T-text")] == [1, 1, 1]
    policy.act(talk[:2], env.tools, Sampling())
    assert console.file.getvalue().count("S-text") == 2
    with pytest.raises(PolicyError, match="the input ended"):
        policy.act(talk[:2], env.tools, Sampling())
