"""Tables, keys and rows: what a generated database is made of."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from agentrl import TaskError, did_you_mean

Cell = str | int | float | None
Row = tuple[Cell, ...]

Role = Literal["key", "ref", "label", "word", "amount", "measure", "ordinal", "day"]
"""What a column's values are: `key` the primary key, `ref` a foreign key, `label` a name that no two rows share, `word`
one of a few words, `amount` a number that may be added up, `measure` one that may only be averaged, `ordinal` one that
may only be compared (a year, a floor), `day` an ISO date."""

NUMERIC: tuple[Role, ...] = ("amount", "measure", "ordinal")


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        name: Lower-case words joined by underscores.
        type: `INTEGER`, `REAL` or `TEXT`.
        role: What its values are.
        nullable: Whether NULL may stand in it.
    """

    name: str
    type: Literal["INTEGER", "REAL", "TEXT"]
    role: Role
    nullable: bool = False

    @property
    def words(self) -> str:
        """The name as a question says it."""
        return self.name.replace("_", " ")

    @property
    def verb(self) -> str:
        """`is`, or `are` where the name is a plural, as that of a count (`pages`) is."""
        return "are" if self.role in NUMERIC and self.name.endswith("s") else "is"


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """`column` holds the primary key of a row of `table`."""

    column: str
    table: str


@dataclass(frozen=True)
class Table:
    """A table; its primary key is `id`.

    Attributes:
        name: Singular, lower case.
        plural: The noun for several of its rows.
        columns: In the order of the declaration.
        foreign_keys: At most one to each other table, so that a question need not say which is meant.
        primary_key: Name of the primary key's column.
    """

    name: str
    plural: str
    columns: tuple[Column, ...]
    foreign_keys: tuple[ForeignKey, ...] = ()
    primary_key: str = "id"

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {column.name: i for i, column in enumerate(self.columns)}

    @property
    def noun(self) -> str:
        """The noun for one row."""
        return self.name.replace("_", " ")

    def position(self, column: str) -> int:
        """Where a column stands in a row.

        Raises:
            TaskError: If the table has no such column.
        """
        try:
            return self._positions[column]
        except KeyError:
            known = did_you_mean(column, self._positions)
            raise TaskError(f"table {self.name!r} has no column {column!r}.{known}") from None

    def column(self, name: str) -> Column:
        """The column of this name; raises TaskError where there is none."""
        return self.columns[self.position(name)]

    def with_role(self, *roles: Role) -> tuple[Column, ...]:
        """The columns of these roles, in order."""
        return tuple(column for column in self.columns if column.role in roles)

    @property
    def label(self) -> Column:
        """What a row is called by: its label, or its primary key where it has none."""
        labels = self.with_role("label")
        return labels[0] if labels else self.column(self.primary_key)

    def ddl(self) -> str:
        """The CREATE TABLE statement, one column a line."""
        targets = {key.column: key.table for key in self.foreign_keys}
        lines = []
        for column in self.columns:
            parts = [column.name, column.type]
            if column.role == "key":
                parts.append("PRIMARY KEY")
            elif not column.nullable:
                parts.append("NOT NULL")
            if column.role == "label":
                parts.append("UNIQUE")
            if column.name in targets:
                parts.append(f"REFERENCES {targets[column.name]} (id)")
            lines.append("  " + " ".join(parts))
        return f"CREATE TABLE {self.name} (\n" + ",\n".join(lines) + "\n);"

    def summary(self) -> str:
        """One line: `product(id INTEGER, name TEXT, ...)`."""
        return f"{self.name}({', '.join(f'{column.name} {column.type}' for column in self.columns)})"


@dataclass(frozen=True)
class Schema:
    """The tables of a domain, each after those that its foreign keys name."""

    domain: str
    tables: tuple[Table, ...]

    @cached_property
    def _by_name(self) -> dict[str, Table]:
        return {table.name: table for table in self.tables}

    def table(self, name: str) -> Table:
        """The table of this name.

        Raises:
            TaskError: If there is none.
        """
        try:
            return self._by_name[name]
        except KeyError:
            known = did_you_mean(name, self._by_name)
            raise TaskError(f"domain {self.domain!r} has no table {name!r}.{known}") from None

    @cached_property
    def links(self) -> tuple[tuple[Table, ForeignKey, Table], ...]:
        """Every foreign key as (child, key, parent)."""
        return tuple((child, key, self.table(key.table)) for child in self.tables for key in child.foreign_keys)

    def ddl(self) -> str:
        """The CREATE TABLE statements of all tables."""
        return "\n".join(table.ddl() for table in self.tables)

    def summary(self, tables: Iterable[str] | None = None) -> str:
        """One line a table.

        Args:
            tables: Names of the tables to show, in this order; None shows all.
        """
        shown = self.tables if tables is None else [self.table(name) for name in tables]
        return "\n".join(table.summary() for table in shown)


@dataclass(frozen=True)
class Database:
    """A schema with rows. Frozen, and shared by all tasks that ask about it.

    Attributes:
        schema: The tables.
        seed: What the rows were drawn from.
        rows: For each table its rows, in the order of their primary keys.
    """

    schema: Schema
    seed: int
    rows: Mapping[str, tuple[Row, ...]]

    def values(self, table: str, column: str) -> list[Cell]:
        """All values of a column, row by row, NULL left out."""
        at = self.schema.table(table).position(column)
        return [row[at] for row in self.rows[table] if row[at] is not None]

    def script(self) -> str:
        """SQL text that makes the tables and fills them."""
        lines = [self.schema.ddl()]
        for table in self.schema.tables:
            rows = ",\n  ".join(f"({', '.join(literal(cell) for cell in row)})" for row in self.rows[table.name])
            lines.append(f"INSERT INTO {table.name} VALUES\n  {rows};")
        return "\n".join(lines) + "\n"

    def build(self, connection: sqlite3.Connection) -> None:
        """Makes the tables in an empty database, fills them and commits."""
        connection.executescript(self.schema.ddl())
        for table in self.schema.tables:
            marks = ", ".join("?" * len(table.columns))
            connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", self.rows[table.name])  # noqa: S608
        connection.commit()


def literal(cell: Cell) -> str:
    """A value as SQL writes it; whole floats lose their `.0`, as a person would write them."""
    if cell is None:
        return "NULL"
    if isinstance(cell, str):
        return "'" + cell.replace("'", "''") + "'"
    return f"{cell:g}" if isinstance(cell, float) else str(cell)
