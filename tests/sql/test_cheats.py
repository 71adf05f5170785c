"""No cheat may earn more than doing nothing does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import EndReason, Sampling, ToolCall
from agentrl_sql.env import SqlEnv

GENERIC = {
    "says_nothing", "gives_up", "submits_nothing", "repeats_one_call", "random_tools", "malformed_only",
    "claims_success", "longest_message", "echoes", "follows_the_observation", "exhausts_turns", "every_tool_once",
    "peeks_at_the_master_table", "last_step_left_out", "select_1", "copied_rows", "wrong_0",
}  # fmt: skip


def earned(env, task, policy):
    env.reset(seed=1, options={"task": task})
    while env.end is None:
        env.step(policy.act(env.messages, env.tools, Sampling()).text)
    return sum(step["reward"] for step in env.ledger["steps"]) if env.ledger else None


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("fmt", ["fenced", "hermes"])
def test_cheats_stay_at_the_floor(level, fmt):
    env = SqlEnv(format=fmt, settings={"levels": (level,)})
    tasks = env.tasks("train")
    for i in range(5 if fmt == "hermes" else 0, 120, 11):
        task = tasks[i]
        cheats = env.cheats(task)
        assert cheats.keys() >= GENERIC
        floor = earned(env, task, cheats["says_nothing"])
        assert floor == 0.0
        for name, policy in cheats.items():
            reward = earned(env, task, policy)
            assert reward is not None, (name, env.last_step.error)
            assert reward <= floor, (name, task)
            assert env.success is False, (name, task)
    env.close()


def test_the_same_cheats_are_made_for_the_same_task():
    env = SqlEnv(format="fenced")
    task = env.tasks("train")[3]
    one, other = env.cheats(task), env.cheats(task)
    assert one.keys() == other.keys()
    env.reset(seed=0, options={"task": task})
    for name in one.keys() - {"follows_the_observation"}:
        said = [made[name].act(env.messages, env.tools, Sampling()) for made in (one, other)]
        assert said[0] == said[1], name
    env.close()


WORDS = """
    SELECT * COUNT(*) FROM WHERE ( ) ; , ' " -- /* */ purchase customer id name = 1 NULL UNION ALL ORDER BY LIMIT WITH
    AS sqlite_master DELETE PRAGMA ATTACH RECURSIVE VALUES JOIN ON x'00' 9e999 ``` submit run_sql replace(hex(1),1,2)
"""
queries = st.one_of(st.text(max_size=80), st.lists(st.sampled_from(WORDS.split()), max_size=16).map(" ".join))


@pytest.fixture(scope="module")
def env():
    made = SqlEnv(format="hermes")
    yield made
    made.close()


@settings(max_examples=300, deadline=None)
@given(tried=queries, submitted=queries)
def test_no_query_makes_the_environment_fail(env, tried, submitted):
    """An agent that could cause errors could choose which of its episodes count."""
    task = next(task for task in (env.tasks("train")[i] for i in range(50)) if task.data["domain"] == "shop")
    env.reset(seed=0, options={"task": task})
    calls = [ToolCall("run_sql", {"query": tried}), ToolCall("submit", {"query": submitted})]
    env.step(env.format.render_calls("", calls, env.tools))
    assert env.end is EndReason.SUBMITTED, env.last_step.error
    assert env.last_step.reward in (0.0, 0.9, 1.0)
