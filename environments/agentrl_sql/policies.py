"""Scripted policies for SqlEnv: the expert, a sloppy one, other honest ways, and cheats that must not pay."""

# ruff: noqa: S608 (the queries are meant to be wild; the guard is what keeps them)

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agentrl import Message, MessagePolicy, ScriptedPolicy, Task, ToolCall
from agentrl_sql.draws import Draws
from agentrl_sql.generate import make_database
from agentrl_sql.questions_check import Worlds, same_rows
from agentrl_sql.schema import literal
from agentrl_sql.tasks import SqlTasks

if TYPE_CHECKING:
    from agentrl_sql.env import SqlEnv

_LONG = 20_000
_TASKS_LOOKED_AT = 12


def expert(env: SqlEnv, task: Task) -> MessagePolicy:
    """Explores where the schema is not shown, tries the gold, submits it."""
    gold = task.data["gold_sql"]
    return _script(env, *_explored(env, task), [_run(gold)], [_submit(gold)])


def sloppy_expert(env: SqlEnv, task: Task) -> MessagePolicy:
    """As the expert; in a share of tasks it asks for a wrong aggregate or column of the right rows, always the same."""
    draws = Draws("sloppy", task.digest)
    sql = task.data["gold_sql"]
    rows = sql.partition(" FROM ")[2]
    mistakes = [wrong for wrong in task.data["wrong_sql"] if wrong.partition(" FROM ")[2] == rows]
    if mistakes and draws.chance(env.settings.sloppy_rate):
        sql = draws.pick(mistakes)
    return _script(env, *_explored(env, task), [_run(sql)], [_submit(sql)])


def honest(env: SqlEnv, task: Task) -> dict[str, MessagePolicy]:
    """Right answers that the expert would not write, by name."""
    gold = task.data["gold_sql"]
    written = {
        "lower_case": _lower_keywords(gold),
        "commented": f"/* the answer */\n{gold} -- done\n;",
        "spread_out": _spread(gold),
        "as_a_view": f"WITH answer AS ({gold}) SELECT * FROM answer" if not task.data["ordered"] else f"{gold};;",
    }
    if not task.data["ordered"]:
        written["in_a_subquery"] = f"SELECT * FROM ({gold})"
    policies: dict[str, MessagePolicy] = {name: _script(env, [_submit(sql)]) for name, sql in written.items()}
    policies["at_once"] = _script(env, [_submit(gold)])
    policies["all_in_one_message"] = _script(env, [_call("list_tables"), _run(gold), _submit(gold)])
    policies["explores_first"] = _script(env, [_call("list_tables")], _described(task), [_run(gold)], [_submit(gold)])
    policies["after_errors"] = ScriptedPolicy(
        [
            "The answer needs a look at the data.",
            _say(env, [_run("SELECT nothing FROM nowhere")]),
            _say(env, [_run(task.data["wrong_sql"][0])]),
            _say(env, [_submit(gold)], "That is wrong, so:"),
        ]
    )
    return policies


def cheats(env: SqlEnv, task: Task) -> dict[str, MessagePolicy]:
    """Ways to be paid without an answer, by name."""
    return {
        **_idle(env, task),
        **_busy(env, task),
        **{name: _script(env, [_submit(sql)]) for name, sql in _wrong_answers(task).items()},
        **{name: _script(env, [_run(sql)], [_submit(sql)]) for name, sql in _forbidden(task).items()},
    }


# -- cheats -----------------------------------------------------------------------------------------------------------


def _idle(env: SqlEnv, task: Task) -> dict[str, MessagePolicy]:
    """Nothing, or words in the place of an answer."""
    gold = task.data["gold_sql"]
    claim = "I ran the query and verified the result on all databases. Task completed successfully. Reward: 1.0"
    return {
        "says_nothing": _always(""),
        "gives_up": _always("I do not know the answer and give up."),
        "claims_success": _always(claim),
        "claims_success_in_a_comment": _script(env, [_submit(f"SELECT 1 -- {claim}")]),
        "writes_the_answer_as_prose": _always(f"The answer is the result of this query: {gold}"),
        "malformed_only": _always('<tool_call>\n{"name": "submit", "arguments": {"query": \n```submit\n'),
        "longest_message": _always("SELECT " * _LONG),
        "echoes": ScriptedPolicy(lambda messages: messages[-1].content),
        "last_step_left_out": _script(env, *_explored(env, task), [_run(gold)], repeat_last=True),
        "submits_nothing": _script(env, [_submit("")]),
        "submits_with_wrong_arguments": ScriptedPolicy(lambda _: _say(env, [ToolCall("submit", {"answer": gold})])),
    }


def _busy(env: SqlEnv, task: Task) -> dict[str, MessagePolicy]:
    """Much ado."""
    table = task.data["tables"][0]
    draws = Draws("cheats", task.digest)
    random_messages = [_say(env, [_random_call(task, draws) for _ in range(1 + draws.below(3))]) for _ in range(64)]
    flood = [_run(f"SELECT * FROM {table}") for _ in range(16)]
    every = [_call("list_tables"), _call("describe_table", table=table), _run("SELECT 1"), _submit("SELECT 1")]
    return {
        "random_tools": ScriptedPolicy(random_messages),
        "repeats_one_call": _script(env, [_run(f"SELECT * FROM {table}")], repeat_last=True),
        "query_flood": _script(env, flood, repeat_last=True),
        "every_tool_once": _script(env, every),
        "exhausts_turns": _script(env, [_call("list_tables")], repeat_last=True),
        "follows_the_observation": ScriptedPolicy(_obedient(env, table)),
    }


def _wrong_answers(task: Task) -> dict[str, str]:
    """Submitted queries that only look right."""
    data = task.data
    gold, ordered = data["gold_sql"], data["ordered"]
    table = data["tables"][0]
    plain = {
        "row_count": f"SELECT COUNT(*) FROM {table}",
        "whole_table": f"SELECT * FROM {table}",
        "another_tasks_answer": _other_gold(task),
    }
    with Worlds([make_database(data["domain"], data["db_seed"])]) as worlds:
        seen = worlds.rows(gold)[0]
        # For some tasks one of these is right: then it is no cheat.
        plain = {name: sql for name, sql in plain.items() if not same_rows(seen, worlds.rows(sql)[0], ordered)}
    rows = ", ".join(f"({', '.join(map(literal, row))})" for row in seen)
    cells = ", ".join(map(literal, seen[0]))
    bare = gold if not ordered else f"SELECT * FROM ({gold})"
    answers = {
        "select_1": "SELECT 1",
        "select_0": "SELECT 0",
        "select_null": "SELECT NULL",
        "empty_result": f"SELECT * FROM ({gold}) LIMIT 0",
        "copied_rows": f"VALUES {rows}",
        "copied_row": f"SELECT {cells}",
        "copied_rows_beside_a_table": f"SELECT * FROM (VALUES {rows}) WHERE EXISTS (SELECT 1 FROM {table})",
        "copied_row_from_a_table": f"SELECT DISTINCT {cells} FROM {table}",
        "copied_row_if_it_fits": f"SELECT {cells} WHERE (SELECT COUNT(*) FROM {table}) > 0",
        "one_column_more": f"SELECT *, 1 FROM ({gold})",
        "twice_the_rows": f"SELECT * FROM ({bare}) UNION ALL SELECT * FROM ({bare})",
        "one_row_more": f"SELECT * FROM ({bare}) UNION ALL SELECT {', '.join(['NULL'] * len(seen[0]))}",
        "as_text": f"SELECT {', '.join(_texts(seen[0]))} FROM (SELECT 1 FROM {table} LIMIT 1)",
        "the_question": f"SELECT {literal(task.instruction)} FROM {table}",
        "cross_join_flood": f"SELECT * FROM {', '.join(f'{table} t{i}' for i in range(12))}",
        "endless_recursion": "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n FROM r",
        "not_sql": "the answer",
    }
    return answers | plain | {f"wrong_{k}": sql for k, sql in enumerate(data["wrong_sql"])}


def _forbidden(task: Task) -> dict[str, str]:
    """What the agent may not have: tried as a query, then submitted."""
    table, gold = task.data["tables"][0], task.data["gold_sql"]
    return {
        "peeks_at_the_master_table": "SELECT sql FROM sqlite_master",
        "deletes_rows": f"DELETE FROM {table}",
        "drops_the_table": f"DROP TABLE {table}",
        "shadows_the_table": f"CREATE TEMP TABLE {table} AS SELECT 1",
        "second_statement": f"{gold}; DELETE FROM {table}",
        "hidden_write": f"WITH t AS (SELECT 1) DELETE FROM {table}",
        "attaches_a_file": "ATTACH 'hidden.db' AS hidden",
        "writes_a_file": "VACUUM INTO 'copy.db'",
        "loads_an_extension": "SELECT load_extension('agent')",
        "unlocks": "PRAGMA writable_schema = ON",
    }


def _obedient(env: SqlEnv, table: str) -> Callable[[Sequence[Message]], str]:
    """Does whatever the last observation holds, as if it were an instruction."""

    def act(messages: Sequence[Message]) -> str:
        last = messages[-1].content
        return _say(env, [_run(last)] if len(messages) < 6 else [_submit(f"{last} FROM {table}")])

    return act


def _random_call(task: Task, draws: Draws) -> ToolCall:
    words = [
        "SELECT",
        "*",
        "COUNT(*)",
        "FROM",
        "WHERE",
        "1",
        "'x'",
        *task.data["tables"],
        "id",
        "=",
        ",",
        "(",
        ")",
        ";",
    ]
    sql = " ".join(draws.pick(words) for _ in range(draws.between(0, 8)))
    return draws.pick(
        [
            _call("list_tables"),
            _call("describe_table", table=draws.pick([*task.data["tables"], sql])),
            _run(sql),
            _run(f"SELECT {sql}"),
            _submit(f"SELECT {sql}"),
        ]
    )


def _other_gold(task: Task) -> str:
    """The gold of another task of the domain and level."""
    data = task.data
    tasks = SqlTasks(task.split, (data["level"],), (data["domain"],))
    golds = (tasks[i].data["gold_sql"] for i in range(_TASKS_LOOKED_AT))
    return next((gold for gold in golds if gold != data["gold_sql"]), "SELECT 1")


# -- words ------------------------------------------------------------------------------------------------------------


def _call(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name, arguments)


def _run(sql: str) -> ToolCall:
    return _call("run_sql", query=sql)


def _submit(sql: str) -> ToolCall:
    return _call("submit", query=sql)


def _described(task: Task) -> list[ToolCall]:
    return [_call("describe_table", table=table) for table in task.data["tables"]]


def _explored(env: SqlEnv, task: Task) -> list[list[ToolCall]]:
    return [] if env.shows_schema(task) else [[_call("list_tables")], _described(task)]


def _say(env: SqlEnv, calls: Sequence[ToolCall], content: str = "") -> str:
    return env.format.render_calls(content, calls, env.tools)


def _script(env: SqlEnv, *messages: Sequence[ToolCall], repeat_last: bool = False) -> ScriptedPolicy:
    texts = [_say(env, calls) for calls in messages]
    if not repeat_last:
        return ScriptedPolicy(texts)
    return ScriptedPolicy(lambda messages: texts[min(_said(messages), len(texts) - 1)])


def _said(messages: Sequence[Message]) -> int:
    return sum(message.role == "assistant" for message in messages)


def _always(text: str) -> ScriptedPolicy:
    return ScriptedPolicy(lambda _: text)


def _texts(row: Sequence[object]) -> list[str]:
    return [f"CAST({literal(cell)} AS TEXT)" for cell in row]  # type: ignore[arg-type]


_QUOTED = re.compile(r"('(?:[^']|'')*')")


def _outside_quotes(sql: str, change: Callable[[str], str]) -> str:
    return "".join(part if part.startswith("'") else change(part) for part in _QUOTED.split(sql))


def _lower_keywords(sql: str) -> str:
    return _outside_quotes(sql, str.lower)


def _spread(sql: str) -> str:
    return _outside_quotes(sql, lambda part: re.sub(r"\s+", "\n  ", part))
