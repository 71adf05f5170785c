"""No cheat may earn more than doing nothing does."""

from __future__ import annotations

import pytest
from agentrl_sql.env import SqlEnv

from agentrl import Sampling

GENERIC = {
    "says_nothing", "gives_up", "submits_nothing", "repeats_one_call", "random_tools", "malformed_only", "claims_success",
    "longest_message", "echoes", "follows_the_observation", "exhausts_turns", "every_tool_once",
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
    for name in ("random_tools", "random_tools_without_end"):
        if name in one:
            env.reset(seed=0, options={"task": task})
            assert one[name].act(env.messages, env.tools, Sampling()) == other[name].act(
                env.messages, env.tools, Sampling()
            )
    env.close()
