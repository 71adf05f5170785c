"""SqlEnv: its experts, what the agent sees, Gymnasium, and verdicts that blame the right one."""

from __future__ import annotations

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from agentrl import EndReason, Sampling, ScriptedPolicy, Task, ToolCall, make_env
from agentrl.errors import ConfigError, TaskError
from agentrl_sql.engine import leave_engine, shared_engine
from agentrl_sql.env import SqlEnv

ALL = {"levels": (1, 2, 3)}


@pytest.fixture(scope="module")
def env():
    made = SqlEnv(format="fenced", settings=ALL)
    yield made
    made.close()


def play(env, task, policy, seed=0):
    env.reset(seed=seed, options={"task": task})
    while env.end is None:
        env.step(policy.act(env.messages, env.tools, Sampling()).text)
    return env


def said(env, task, *calls):
    """What the environment answers to calls, one message each."""
    env.reset(seed=0, options={"task": task})
    return [env.step(env.format.render_calls("", [call], env.tools))[0] for call in calls]


def run_sql(sql):
    return ToolCall("run_sql", {"query": sql})


def submit(sql):
    return ToolCall("submit", {"query": sql})


def task_of_level(env, level, **wanted):
    tasks = env.tasks("train")
    found = (task for task in (tasks[i] for i in range(500)) if task.data["level"] == level)
    return next(task for task in found if all(task.data[key] == value for key, value in wanted.items()))


def changed(task, **data):
    return Task(task.id, task.env, task.instruction, {**task.data, **data}, task.split)


# -- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("split", "n"), [("train", 700), ("dev", 100), ("heldout", 100), ("heldout_domains", 100)])
def test_the_expert_earns_the_maximum_on_a_thousand_tasks(env, split, n):
    tasks = env.tasks(split)
    for i in range(n):
        play(env, tasks[i], env.expert(tasks[i]))
        assert (env.last_step.reward, env.success, env.end) == (1.0, True, EndReason.SUBMITTED), tasks[i]


def test_other_right_answers_earn_the_maximum(env):
    tasks = env.tasks("train")
    for i in range(0, 600, 15):
        for name, policy in env.honest(tasks[i]).items():
            play(env, tasks[i], policy)
            assert (env.last_step.reward, env.success) == (1.0, True), (name, tasks[i])


def has_plausible_mistake(task):
    """Whether a wrong query asks the right rows for another aggregate or column."""
    rows = task.data["gold_sql"].partition(" FROM ")[2]
    return any(wrong.partition(" FROM ")[2] == rows for wrong in task.data["wrong_sql"])


@pytest.mark.parametrize(("rate", "n", "least", "most"), [(0.0, 40, 1, 1), (0.3, 300, 0.6, 0.8), (1.0, 40, 0, 0)])
def test_the_sloppy_expert_is_wrong_at_its_rate_and_always_on_the_same_tasks(rate, n, least, most):
    env = SqlEnv(format="hermes", settings={"sloppy_rate": rate})
    tasks = [task for task in env.tasks("train")[:n] if has_plausible_mistake(task)]
    assert len(tasks) > n / 3
    right = [play(env, task, env.sloppy_expert(task)).last_step.reward for task in tasks]
    assert set(right) <= {0.0, 1.0}
    assert least <= sum(right) / len(right) <= most
    again = [play(env, task, env.sloppy_expert(task), seed=7).last_step.reward for task in tasks[::10]]
    assert again == right[::10]
    env.close()


# -- what the agent sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "shown"), [(1, "relevant"), (2, "full"), (3, "none")])
def test_the_opening_shows_what_the_level_says(env, level, shown):
    task = task_of_level(env, level)
    chosen = SqlEnv(format="fenced", settings={**ALL, "show_schema": shown})
    opening, _ = env.reset(seed=0, options={"task": task})
    assert chosen.reset(seed=0, options={"task": task})[0] == opening
    assert opening.splitlines()[-1] == task.instruction
    tables = opening.splitlines()[:-1]
    if shown == "relevant":
        assert {line.partition("(")[0] for line in tables} == set(task.data["tables"])
    elif shown == "full":
        assert len(tables) >= len(task.data["tables"])
        assert any("_id -> " in line for line in tables)
    else:
        assert tables == []
    chosen.close()


def test_the_prompt_is_short_and_holds_no_answer(env):
    task = task_of_level(env, 1)
    env.reset(seed=0, options={"task": task})
    system, user = (message.content for message in env.messages)
    assert len(system) < 600
    assert len(user) < 300
    assert task.data["gold_sql"] not in system + user


def test_tools_show_the_schema(env):
    task = changed(task_of_level(env, 2), domain="shop")
    described = (ToolCall("describe_table", {"table": name}) for name in ("Purchase ", "purchas"))
    tables, columns, problem = said(env, task, ToolCall("list_tables", {}), *described)
    assert tables == "customer, product, purchase"
    assert columns.splitlines()[:3] == [
        "id INTEGER",
        "customer_id INTEGER -> customer.id",
        "product_id INTEGER -> product.id",
    ]
    assert problem == "Error: no such table: purchas. Did you mean 'purchase'?"


def test_results_are_compact(env):
    task = changed(task_of_level(env, 1), domain="shop", db_seed=5)
    answers = said(
        env,
        task,
        run_sql("SELECT id, name, NULL AS z, 0.1 + 0.2 AS x FROM customer ORDER BY id LIMIT 2"),
        run_sql("SELECT id FROM customer WHERE id < 0"),
        run_sql("SELECT c.id FROM customer c, customer d ORDER BY c.id"),
        run_sql("SELECT a.id FROM customer a, customer b, customer c"),
        run_sql("SELECT x'00ff', CAST(x'ff' AS TEXT), 9e999, substr(quote(hex('" + "a" * 200 + "')), 2)"),
        run_sql("SELECT name FROM custmer"),
        run_sql("SELECT nam FROM customer"),
    )
    assert answers[0] == "id | name | z | x\n1 | Leo | NULL | 0.3\n2 | Tom | NULL | 0.3"
    assert answers[1] == "id\n(no rows)"
    assert answers[2] == "\n".join(["id", *["1"] * 10, "... (169 rows)"])
    assert answers[3].endswith("... (more than 1000 rows)")
    assert answers[4].splitlines()[1] == f"x'00ff' | ? | inf | {'61' * 48}6..."
    assert answers[5] == "Error: no such table: custmer. Did you mean 'customer'?"
    assert answers[6] == "Error: no such column: nam. Did you mean 'name'?"


def test_rows_shown_is_a_setting():
    env = SqlEnv(settings={"rows_shown": 3})
    (answer,) = said(env, env.tasks("train")[0], run_sql("WITH RECURSIVE r(n) AS (VALUES (1) UNION ALL SELECT n+1 FROM r LIMIT 9) SELECT n FROM r"))  # fmt: skip  # noqa: E501
    assert answer == "n\n1\n2\n3\n... (9 rows)"
    env.close()


# -- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_gold_that_does_not_hold_is_an_error_and_never_a_zero(env):
    for gold in ("SELECT nothing FROM nowhere", "SELECT 1 FROM customer WHERE 1 = 0", "SELECT 1"):
        task = changed(task_of_level(env, 1), domain="shop", gold_sql=gold)
        play(env, task, ScriptedPolicy([env.format.render_calls("", [submit("SELECT 1")], env.tools)]))
        assert (env.end, env.success, env.ledger) == (EndReason.VERIFIER_ERROR, None, None)
        assert "the gold query is invalid" in env.last_step.error


def test_a_query_that_kills_its_worker_is_the_agents_fault(env):
    """A single step of SQLite can be long enough to need killing; the verdict is a zero, not an error."""
    long = f"replace('{'a' * 2000}', 'a', 'aaaaaaaaaa')"
    bomb = (
        f"WITH RECURSIVE s(a, b) AS (SELECT {long}, substr({long}, 1, 10000) || 'b'),"
        " r(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM r LIMIT 100000)"
        " SELECT SUM(instr(a, b || n)) FROM r, s, customer"
    )
    task = changed(task_of_level(env, 1), domain="shop", gold_sql="SELECT SUM(age) FROM customer", ordered=False)
    env.reset(seed=0, options={"task": task})
    env.step(env.format.render_calls("", [submit(bomb)], env.tools))
    assert (env.end, env.last_step.reward, env.success) == (EndReason.SUBMITTED, 0.0, False)
    entry = next(e for e in leaves(env.last_step.ledger) if e["node"] == "sql/correct")
    assert entry["evidence"]["reason"] == "too_expensive"


def leaves(entry):
    return [entry] if "children" not in entry else [leaf for child in entry["children"] for leaf in leaves(child)]


def test_forbidden_acts_cost_a_tenth_and_prose_costs_nothing(env):
    task = task_of_level(env, 1)
    gold = task.data["gold_sql"]
    for first, reward in (
        ("DELETE FROM x", 0.9),
        ("SELECT * FROM sqlite_master", 0.9),
        ("hello", 1.0),
        ("SELECT 1; SELECT 2", 1.0),
    ):
        said(env, task, run_sql(first), submit(gold))
        assert env.last_step.reward == pytest.approx(reward, abs=1e-12), first
        assert env.success


# -- Gymnasium --------------------------------------------------------------------------------------------------------


def test_gymnasium_checks_it():
    env = gymnasium.make("agentrl/Sql-v0")
    check_env(env.unwrapped, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("vector", [SyncVectorEnv, lambda makers: AsyncVectorEnv(makers, shared_memory=False)])
def test_it_runs_in_vectors(vector):
    envs = vector([lambda: gymnasium.make("agentrl/Sql-v0", format="fenced")] * 3)
    first, _ = envs.reset(seed=5)
    again, _ = envs.reset(seed=5)
    assert list(first) == list(again)
    observations, *_ = envs.step(["```run_sql\nSELECT 1 AS one\n```"] * 3)
    assert list(observations) == ["one\n1"] * 3
    envs.close()


def test_equal_resets_are_equal_byte_for_byte(env):
    other = make_env("Sql-v0", format="fenced", settings=ALL)
    for seed in range(20):
        assert env.reset(seed=seed) == other.reset(seed=seed)
    other.close()


def test_a_task_is_found_by_its_id(env):
    task = env.tasks("heldout")[123]
    env.reset(seed=0, options={"task": task.id})
    assert env.task == task
    with pytest.raises(TaskError, match="expected a task id such as"):
        env.reset(seed=0, options={"task": "nonsense"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"levels": (4,)}, "expected levels of 1, 2 and 3"),
        ({"domains": ("shoop",)}, "Did you mean 'shop'"),
        ({"kinds": ("no_such_kind",)}, "no kind 'no_such_kind'"),
        ({"show_schema": "some"}, "show_schema"),
        ({"row_shown": 3}, "Did you mean 'rows_shown'"),
        ({"sloppy_rate": 2}, "sloppy_rate"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        SqlEnv(settings=settings).tasks("train")


def test_the_last_environment_to_close_ends_the_engine():
    users = SqlEnv(), SqlEnv()
    engine = shared_engine(users[0])
    assert shared_engine(users[1]) is engine
    leave_engine(users[0])
    assert shared_engine(users[1]) is engine
