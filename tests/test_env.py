from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentrl
from agentrl.errors import ConfigError, PolicyError, RegistryError, RewardError, TaskError, UsageError
from agentrl.plugins import load_object
from agentrl.registry import env_class
from agentrl.reward.ledger import check_ledger
from agentrl.types import EndReason, Message, Sampling, Task, ToolCall

TOY = Path(__file__).parent / "toy_env.py"
ToyEnv, call = load_object(f"{TOY}:ToyEnv", "toy"), load_object(f"{TOY}:fence", "toy")
TASK = Task("train/000002", "Toy-v0", "Count to 3.", {"target": 3})


def made(**kwargs):
    return ToyEnv(**{"format": "fenced", **kwargs})


@pytest.fixture
def env():
    toy = made()
    toy.reset(seed=7, options={"task": TASK})
    yield toy
    toy.close()


ADD3, SUBMIT = call("add", '{"n": 3}'), call("submit")


def test_an_episode_from_reset_to_reward(env):
    assert env.messages[0].content.startswith(
        "You count.\n\nTools:\n- add(n: int = 1): Adds to the count. n: How much."
    )
    assert env.messages[0].content.endswith("You may send at most 8 messages.")
    assert env.messages[1].role == "user"
    assert env.messages[1].content.startswith("Count to 3. Lucky number: ")
    observation, reward, terminated, truncated, info = env.step(f"I add.\n{ADD3}")
    assert (observation, reward, terminated, truncated) == ("The count is 3.", 0.0, False, False)
    assert info["calls"] == [{"name": "add", "arguments": {"n": 3}}]
    assert info["results"] == [{"name": "add", "content": "The count is 3.", "error_kind": None, "truncated": 0}]
    assert info["malformed"] is None
    assert env.messages[2:] == (
        Message("assistant", f"I add.\n{ADD3}", (ToolCall("add", {"n": 3}),)),
        Message("tool", "The count is 3.", name="add"),
    )
    _, reward, terminated, truncated, info = env.step(SUBMIT)
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert (info["end"], info["success"]) == ("submitted", True)
    assert (env.end, env.success, env.calls, env.turns_used, env.malformed_count) == (
        EndReason.SUBMITTED,
        True,
        2,
        2,
        0,
    )
    assert env.last_step.new_messages == ()
    assert env.ledger["total"] == 1.0
    assert info["ledger"]["steps"] == env.ledger["steps"]
    assert env.ledger["evidence"] == {"Count": [{"turn": 1, "value": {"value": 3, "target": 3, "computed": 1}}]}
    assert check_ledger(env.ledger, [0.0, 1.0]) <= 1e-9
    assert set(env.timings) == {"parse", "tools", "reward", "reward/toy/reached"}
    assert env.torn_down == 1


def test_infos_hold_nothing_timed_and_equal_episodes_have_equal_infos():
    first, second = made(), made()
    for toy in (first, second):
        toy.outcomes = [toy.reset(seed=3), toy.step(ADD3), toy.step("prose"), toy.step(SUBMIT)]
    assert first.outcomes == second.outcomes


def test_seeds_make_worlds_and_draw_tasks():
    toy = made()
    drawn = toy.reset(seed=5)
    assert toy.reset(seed=5) == drawn
    task = toy.task
    assert toy.reset(seed=5, options={"task": task}) == drawn
    assert toy.reset(seed=5, options={"task": task.id}) == drawn
    assert toy.reset(seed=6, options={"task": task})[0] != drawn[0]
    assert len({toy.reset(seed=s)[1]["task"] for s in range(20)}) == 20
    toy.reset(seed=5)
    follow = toy.reset()
    toy.reset(seed=5)
    assert toy.reset() == follow != drawn


def test_nothing_random_is_read_from_the_process():
    toy = made()
    np.random.seed(0)
    first = toy.reset(seed=1)
    np.random.seed(1)
    assert toy.reset(seed=1) == first


@pytest.mark.parametrize(
    ("options", "kind", "problem"),
    [
        ({"split": "tran"}, TaskError, r"Toy-v0 has no split 'tran'\. Did you mean 'train'"),
        ({"task": "train/x"}, TaskError, "Toy-v0 has no task 'train/x' in train, dev"),
        ({"task": "test/000001"}, TaskError, "has no task"),
        ({"task": "train/000001", "split": "none"}, TaskError, "no split 'none'"),
        ({"task": Task("a", "Other-v0", "")}, TaskError, "belongs to the environment 'Other-v0', not to 'Toy-v0'"),
        ({"task": 3}, TaskError, "expected options"),
        ({"tsk": 3}, UsageError, "the options 'task' and 'split', found 'tsk'"),
    ],
)
def test_a_reset_that_cannot_be_is_refused(options, kind, problem):
    with pytest.raises(kind, match=problem):
        made().reset(seed=0, options=options)


@pytest.mark.parametrize(
    ("kwargs", "kind", "problem"),
    [
        (
            {"settings": {"largst": 3}},
            ConfigError,
            r"settings of Toy-v0: there is no 'largst'\. Did you mean 'largest'",
        ),
        ({"settings": {"largest": "3"}}, ConfigError, "settings of Toy-v0: largest: expected a valid integer"),
        ({"max_turns": 0}, ConfigError, "at least 1, found 0"),
        ({"render_mode": "human"}, ConfigError, "'ansi', found 'human'"),
        ({"format": "fence"}, RegistryError, "Did you mean 'fenced'"),
        ({"reward": "nowhere.toml"}, RewardError, r"nowhere\.toml"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused(kwargs, kind, problem):
    with pytest.raises(kind, match=problem):
        made(**kwargs)


def test_an_environment_needs_a_reward():
    class Bare(agentrl.ToolEnv):
        pass

    with pytest.raises(ConfigError, match="Bare has no reward"):
        Bare()


def test_reward_file_is_found_beside_the_module(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import agentrl\n"
        "@agentrl.component(name='one')\n"
        "def one(episode): return agentrl.Score(1.0)\n"
        "class Mine(agentrl.ToolEnv):\n    reward = 'reward.toml'\n"
        "    def tasks(self, split): return [agentrl.Task('a', self.name, 'Go.')]\n"
    )
    (tmp_path / "reward.toml").write_text('component = "mine.py:one"\n')
    mine = env_class(f"{tmp_path / 'mine.py'}:Mine")
    assert type("Child", (mine,), {})(max_turns=1).reward_tree.as_dict()["component"] == "mine.py:one"
    toy = mine(max_turns=1)
    assert toy.reset(seed=0)[0] == "Go."
    assert toy.step("?")[1:4] == (1.0, False, True)
    assert "at most 1 message." in toy.messages[0].content


def test_messages_that_cannot_be_read_are_nudged_and_counted(env):
    observation, *_, info = env.step("The answer is 3.")
    assert observation == "The message makes no tool call. Call one of: add, echo, trouble, submit."
    assert info["malformed"] == observation
    assert env.messages[-1] == Message("user", observation)
    assert env.step("```add\n{")[0].startswith("The message stops inside a code block")
    assert env.step(ADD3)[0] == "The count is 3."
    assert env.malformed_count == 2
    assert env.step("\ud800")[4]["malformed"].startswith("The message holds characters that are not valid Unicode")
    assert env.messages[-2].content == "?"
    env.step("prose")
    *_, truncated, info = env.step("more prose")
    assert (truncated, info["end"], env.turns_used) == (True, "too_many_malformed", 6)
    assert (env.last_step.reward, env.last_step.success) == (1.0, True)


def test_calls_that_do_not_fit_are_results_and_not_malformed(env):
    for message, kind in [
        (call("ad", "x"), "unknown_tool"),
        (call("add", '{"m": 1}'), "bad_arguments"),
        (call("add", '{"n": 9}'), "tool_error"),
    ]:
        *_, info = env.step(message)
        assert info["results"][0]["error_kind"] == kind
        assert info["malformed"] is None
    assert "Did you mean 'add'" in env.messages[3].content
    assert env.messages[-1].content == "Error: at most 5 at a time."


def test_several_calls_run_in_order_and_none_after_one_that_ends(env):
    env.step(
        call("add", '{"n": 1}') + "\n" + call("nope") + "\n" + call("add", '{"n": 2}') + "\n" + SUBMIT + "\n" + ADD3
    )
    record = env.last_step
    assert [c.name for c in record.calls] == ["add", "nope", "add", "submit", "add"]
    assert [r.name for r in record.results] == ["add", "nope", "add", "submit"]
    assert (record.end, record.reward, env.value) == (EndReason.SUBMITTED, 1.0, 3)


@pytest.mark.parametrize("fmt", ["fenced", "hermes"])
def test_a_call_that_ends_but_does_not_fit_ends_nothing(fmt):
    toy = made(format=fmt)
    toy.reset(seed=0)
    toy.step(toy.format.render_calls("", [ToolCall("submit", {"now": 1})], toy.tools))
    assert toy.last_step.results[0].error_kind == "bad_arguments"
    assert toy.end is None


def test_the_budget_of_messages_ends_the_episode():
    toy = made(max_turns=2)
    toy.reset(seed=0, options={"task": TASK})
    assert toy.step(ADD3)[2:4] == (False, False)
    observation, reward, terminated, truncated, info = toy.step(call("echo", "a"))
    assert (observation, reward, terminated, truncated, info["end"]) == ("a", 1.0, False, True, "max_turns")
    toy.reset(seed=0)
    toy.step(ADD3)
    assert toy.step(SUBMIT)[4]["end"] == "submitted"


def test_plain_text_can_be_the_answer():
    class Answering(ToyEnv):
        plain_text = "answer"

    toy = Answering(format="fenced")
    toy.reset(seed=0, options={"task": TASK})
    toy.step(ADD3)
    *_, info = toy.step("It is 3.")
    assert (info["end"], info["success"]) == ("answered", True)


@pytest.mark.parametrize(
    ("broken", "end", "problem"),
    [("evidence", "verifier_error", "evidence broke"), ("teardown", "env_error", "teardown broke")],
)
def test_what_breaks_at_the_end_is_an_error_with_its_traceback(broken, end, problem):
    toy = made(settings={"broken": broken})
    toy.reset(seed=0, options={"task": TASK})
    toy.step(ADD3)
    _, reward, terminated, truncated, info = toy.step(SUBMIT)
    assert (reward, terminated, truncated, info["end"]) == (0.0, False, True, end)
    assert f"RuntimeError: {problem}" in toy.last_step.error
    assert (toy.ledger, toy.success, toy.torn_down) == (None, None, 1)
    assert ("evidence broke" in info["unscored"]) if broken == "evidence" else ("unscored" not in info)
    toy.reset(seed=0)


def test_a_setup_that_breaks_is_torn_down_and_raised():
    toy = made(settings={"broken": "setup"})
    with pytest.raises(RuntimeError, match="setup broke"):
        toy.reset(seed=0)
    assert toy.torn_down == 1
    with pytest.raises(UsageError, match="the episode is over"):
        toy.step(ADD3)


def test_an_interrupt_tears_down_and_passes_on(env):
    with pytest.raises(KeyboardInterrupt):
        env.step(call("trouble", "interrupt"))
    assert env.torn_down == 1
    env.reset(seed=0)


def test_a_reset_in_mid_episode_tears_the_old_one_down(env):
    env.step(ADD3)
    worlds = []
    env.teardown = lambda: worlds.append(env.value)
    env.reset(seed=0)
    assert (worlds, env.value, env.turns_used, env.last_step.calls) == ([3], 0, 0, ())
    env.close()
    env.close()
    assert worlds == [3, 0]


def test_a_call_while_another_runs_is_refused():
    entered, leave = threading.Event(), threading.Event()

    class Slow(ToyEnv):
        def teardown(self):
            entered.set()
            leave.wait(5)

    toy = Slow(format="fenced")
    toy.reset(seed=0)
    thread = threading.Thread(target=toy.step, args=(SUBMIT,))
    thread.start()
    assert entered.wait(5)
    for attempt in (lambda: toy.step(SUBMIT), toy.reset, toy.close, lambda: toy.finish(EndReason.CUT)):
        with pytest.raises(UsageError, match="while another call on the same Toy-v0 runs"):
            attempt()
    leave.set()
    thread.join()
    assert toy.end is EndReason.SUBMITTED


def test_a_tool_that_steps_its_own_environment_is_an_error(env):
    env.step(call("trouble", "reenter"))
    assert env.end is EndReason.ENV_ERROR
    assert "while another call" in env.last_step.error


def test_calls_before_reset_or_with_no_message_are_refused(env):
    fresh = made()
    for attempt in (lambda: fresh.step(""), lambda: fresh.finish(EndReason.CUT), lambda: fresh.task):
        with pytest.raises(UsageError, match="there is no episode yet, call reset first"):
            attempt()
    assert (fresh.messages, fresh.end, fresh.calls, fresh.malformed_count, fresh.turns_used) == ((), None, 0, 0, 0)
    with pytest.raises(UsageError, match="a str; found NoneType"):
        env.step(None)
    assert env.step(ADD3)[0] == "The count is 3."


@given(
    st.lists(
        st.sampled_from(
            ["```add\n", '{"n": 1}', "\n```", "```submit\n```", "```trouble\n", "sleep", "\n", "\ud800", "x"]
        ),
        max_size=12,
    )
)
@settings(max_examples=200, deadline=None)
def test_no_message_breaks_a_step(pieces):
    toy = made()
    toy.reset(seed=0)
    _, reward, *_, info = toy.step("".join(pieces))
    assert reward in (0.0, 1.0)
    assert info.get("end") in (None, "submitted")
    toy.close()


def test_the_expert_earns_the_maximum_and_render_shows_the_episode():
    toy = made(render_mode="ansi")
    for i in range(5):
        toy.reset(seed=i, options={"task": f"train/{i:06d}"})
        policy = toy.expert(toy.task)
        while toy.end is None:
            toy.step(policy.act(toy.messages, toy.tools, Sampling()).text)
        assert toy.success is True
    assert toy.render().splitlines()[0] == "[system]"
    assert made().render() is None
    assert made().honest(TASK) == made().cheats(TASK) == {}


def test_a_script_is_followed_and_ends_in_an_error():
    policy = agentrl.ScriptedPolicy(["a", "b"])
    said = [Message("user", "?"), Message("assistant", "a")]
    assert policy.act(said[:1], (), Sampling()).text == "a"
    assert policy.act(said, (), Sampling()).text == "b"
    with pytest.raises(PolicyError, match="the script has 2 messages"):
        policy.act([*said, said[1]], (), Sampling())
    assert agentrl.ScriptedPolicy(lambda messages: messages[-1].content).act(said, (), Sampling()).text == "a"
