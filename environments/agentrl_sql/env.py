"""SqlEnv: an agent looks at a database with tools and answers a question with a query."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from agentrl import MessagePolicy, Task, ToolEnv, ToolError, did_you_mean, evidence, tool
from agentrl_rewards.sql import ResultSets
from agentrl_sql import policies
from agentrl_sql.compare import RULES_VERSION
from agentrl_sql.domains import DOMAINS
from agentrl_sql.engine import DEADLINE_S, DatabaseKey, Engine, QueryResult, leave_engine, shared_engine
from agentrl_sql.guard import Cell
from agentrl_sql.schema import Schema, Table
from agentrl_sql.tasks import ENV, SPLITS, SqlTasks, task_of

_MAX_CELL_CHARS = 100
_REFUSALS = ("not_read_only", "forbidden")
_MISSING = re.compile(r"no such (table|column): (?:\w+\.)?(\w+)")


class SqlSettings(BaseModel):
    """What can be set of the SQL environment."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    levels: tuple[int, ...] = (1,)
    """Levels of questions: 1 one table, 2 joins and groups, 3 nested or in several steps."""
    domains: tuple[str, ...] | None = None
    """Domains to ask about; None for all of the split."""
    kinds: tuple[str, ...] | None = None
    """Kinds of questions, of those of the levels; None for all."""
    show_schema: Literal["auto", "relevant", "full", "none"] = "auto"
    """What the opening message shows: the tables that the answer needs, all tables, or nothing. `auto` shows the
    relevant ones at level 1, all at level 2, and nothing at level 3, where the schema must be explored with tools."""
    rows_shown: int = Field(10, ge=1, le=100)
    """Most rows of a result that the agent sees."""
    sloppy_rate: float = Field(0.3, ge=0, le=1)
    """Share of tasks in which `sloppy_expert` asks for a wrong aggregate or column, of those where one is at hand."""


class SqlEnv(ToolEnv):
    """Questions about generated databases, answered by a query that is executed.

    The answer is run on the database that the agent saw and on two hidden ones of the same schema, and must give the
    gold's result on all three: copied numbers do not, and few wrong queries do.
    """

    name = ENV
    system_prompt = "Answer the question about the SQLite database: submit one SELECT query whose result is the answer."
    settings_model: ClassVar[type[BaseModel]] = SqlSettings
    settings: SqlSettings
    splits = SPLITS
    reward = "reward.toml"
    max_turns = 8

    _databases: tuple[DatabaseKey, ...] = ()
    _submitted: str | None = None
    _n_queries: int = 0
    _refused: tuple[str, ...] = ()

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, as the settings restrict them."""
        return SqlTasks(split, self.settings.levels, self.settings.domains, self.settings.kinds)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """As `ToolEnv.reset`; a task is found by its id without a search, whatever the settings."""
        if options and isinstance(options.get("task"), str):
            options = {**options, "task": task_of(options["task"])}
        return super().reset(seed=seed, options=options)

    def setup(self, task: Task, rng: np.random.Generator) -> str:
        """Names the databases and asks the question."""
        del rng
        data = task.data
        self._databases = tuple(DatabaseKey(data["domain"], seed) for seed in (data["db_seed"], *data["hidden_seeds"]))
        self._submitted, self._n_queries, self._refused = None, 0, ()
        shown = self._shown_tables(task)
        schema = "\n".join(_signature(table, shown) for table in shown)
        return f"{schema}\n{task.instruction}" if schema else task.instruction

    def close(self) -> None:
        """Tears down, and lets go of the engine that the environments of this process share."""
        super().close()
        leave_engine(self)

    # -- tools --------------------------------------------------------------------------------------------------------

    @tool(deadline_s=DEADLINE_S)
    def run_sql(self, query: str) -> str:
        """Runs a SELECT query and shows its first rows."""
        self._n_queries += 1
        result = self._engine.query(self._databases[0], query, self.settings.rows_shown)
        if result.failure is None:
            return _as_text(result)
        if result.failure.reason in _REFUSALS:
            self._refused += (result.failure.text,)
        raise ToolError(f"{result.failure.text}.{self._hint(result.failure.text)}")

    @tool(ends=True)
    def submit(self, query: str) -> None:
        """Submits the query that answers the question, and ends."""
        self._n_queries += 1
        self._submitted = query

    @tool(mutates=False)
    def list_tables(self) -> str:
        """Names the tables."""
        return ", ".join(table.name for table in self._schema.tables)

    @tool(mutates=False)
    def describe_table(self, table: str) -> str:
        """Shows the columns of a table."""
        known = {each.name: each for each in self._schema.tables}
        found = known.get(table.strip().lower())
        if found is None:
            raise ToolError(f"no such table: {table[:_MAX_CELL_CHARS]}.{did_you_mean(table.strip(), known)}")
        return _description(found)

    # -- evidence -----------------------------------------------------------------------------------------------------

    @evidence(deadline_s=2 * DEADLINE_S)
    def result_sets(self) -> ResultSets:
        """Runs the submitted query and the gold on all databases, and compares."""
        if self._submitted is None:
            return ResultSets(None, (), len(self._databases), self._n_queries, self._refused, RULES_VERSION)
        data = self.task.data
        found = self._engine.judge(self._databases, data["gold_sql"], self._submitted, ordered=data["ordered"])
        refused = tuple(reason for _, reason in found.verdicts if reason in _REFUSALS)
        return ResultSets(
            self._submitted,
            found.verdicts,
            len(self._databases),
            self._n_queries,
            self._refused + refused,
            found.rules,
        )

    # -- policies -----------------------------------------------------------------------------------------------------

    def expert(self, task: Task) -> MessagePolicy:
        """Explores where the schema is not shown, tries the gold, submits it."""
        return policies.expert(self, task)

    def sloppy_expert(self, task: Task) -> MessagePolicy:
        """As the expert, but in a share of tasks, `sloppy_rate`, it asks for a wrong aggregate or column."""
        return policies.sloppy_expert(self, task)

    def honest(self, task: Task) -> dict[str, MessagePolicy]:
        """The right answer, written and arrived at in other ways."""
        return policies.honest(self, task)

    def cheats(self, task: Task) -> dict[str, MessagePolicy]:
        """Ways to be paid for nothing, none of which may work."""
        return policies.cheats(self, task)

    def shows_schema(self, task: Task) -> bool:
        """Whether the opening message of a task shows tables."""
        return bool(self._shown_tables(task))

    # -- how it works -------------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine:
        return shared_engine(self)

    @property
    def _schema(self) -> Schema:
        return DOMAINS[self._databases[0].domain].schema

    def _shown_tables(self, task: Task) -> list[Table]:
        show: str = self.settings.show_schema
        if show == "auto":
            show = {1: "relevant", 2: "full"}.get(task.data["level"], "none")
        tables = DOMAINS[task.data["domain"]].schema.tables
        if show == "relevant":
            return [table for table in tables if table.name in task.data["tables"]]
        return list(tables) if show == "full" else []

    def _hint(self, problem: str) -> str:
        """The nearest name, where the problem is a wrong one."""
        missing = _MISSING.search(problem)
        if missing is None:
            return ""
        tables = self._schema.tables
        if missing[1] == "table":
            return did_you_mean(missing[2], [table.name for table in tables])
        hint = did_you_mean(missing[2], [column.name for table in tables for column in table.columns])
        return hint if hint.startswith(" Did") else ""


def _signature(table: Table, shown: Sequence[Table]) -> str:
    names = {each.name for each in shown}
    targets = {key.column: f" -> {key.table}.id" for key in table.foreign_keys if key.table in names}
    return f"{table.name}({', '.join(column.name + targets.get(column.name, '') for column in table.columns)})"


def _description(table: Table) -> str:
    targets = {key.column: f" -> {key.table}.id" for key in table.foreign_keys}
    return "\n".join(f"{column.name} {column.type}{targets.get(column.name, '')}" for column in table.columns)


def _as_text(result: QueryResult) -> str:
    lines = [" | ".join(result.columns), *(" | ".join(map(_cell, row)) for row in result.rows)]
    if not result.n_rows:
        lines.append("(no rows)")
    elif result.n_rows > len(result.rows):
        lines.append(f"... ({'more than ' if result.truncated else ''}{result.n_rows} rows)")
    return "\n".join(lines)


def _cell(value: Cell) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, float):
        value = round(value, 4)
    text = f"x'{value.hex()}'" if isinstance(value, bytes) else str(value).encode("utf-8", "replace").decode()
    return text if len(text) <= _MAX_CELL_CHARS else f"{text[: _MAX_CELL_CHARS - 3]}..."
