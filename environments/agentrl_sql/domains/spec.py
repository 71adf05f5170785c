"""How a domain is declared: its tables, and for each column where the values come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl_sql.schema import Column, ForeignKey, Role, Schema, Table


@dataclass(frozen=True, slots=True)
class Field:
    """A column and its values.

    Attributes:
        column: As it is declared.
        words: What a `label` or a `word` is drawn from.
        low: Least number, or first year of a `day`.
        high: Greatest number, or last year of a `day`.
        step: Numbers are `low` plus a multiple of it; a multiple of 1/4, so that sums are exact in any order.
        target: The table that a `ref` refers to.
    """

    column: Column
    words: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    step: float = 1
    target: str = ""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table, how its values are drawn, and the least and greatest number of rows."""

    table: Table
    fields: tuple[Field, ...]
    rows: tuple[int, int]


@dataclass(frozen=True)
class Domain:
    """A small world: related tables about one subject."""

    name: str
    schema: Schema
    tables: tuple[TableSpec, ...]


def label(name: str, words: tuple[str, ...]) -> Field:
    """A name that no two rows share; give at least as many words as the table may have rows."""
    return Field(Column(name, "TEXT", "label"), words=words)


def word(name: str, *words: str, nullable: bool = False) -> Field:
    """One of a few words, some more frequent than others."""
    return Field(Column(name, "TEXT", "word", nullable), words=words)


def amount(name: str, low: int, high: int, step: int = 1, *, nullable: bool = False) -> Field:
    """A whole number that may be added up."""
    return _number(name, "amount", (low, high, step), nullable)


def measure(name: str, low: int, high: int, step: int = 1, *, nullable: bool = False) -> Field:
    """A whole number whose average means something and whose sum does not."""
    return _number(name, "measure", (low, high, step), nullable)


def ordinal(name: str, low: int, high: int, step: int = 1, *, nullable: bool = False) -> Field:
    """A whole number that may only be compared: a year, a floor."""
    return _number(name, "ordinal", (low, high, step), nullable)


def real(name: str, low: float, high: float, *, role: Role = "amount", nullable: bool = False) -> Field:
    """A number with halves."""
    return Field(Column(name, "REAL", role, nullable), low=low, high=high, step=0.5)


def day(name: str, first_year: int, last_year: int, *, nullable: bool = False) -> Field:
    """An ISO date."""
    return Field(Column(name, "TEXT", "day", nullable), low=first_year, high=last_year)


def ref(table: str, *, nullable: bool = False) -> Field:
    """A foreign key, called after the table that it refers to."""
    return Field(Column(f"{table}_id", "INTEGER", "ref", nullable), target=table)


def table(name: str, plural: str, rows: tuple[int, int], *fields: Field) -> TableSpec:
    """A table; the primary key `id` is added in front.

    Args:
        name: Singular.
        plural: The noun for several rows.
        rows: Least and greatest number of rows.
        fields: The columns after `id`.
    """
    every = (Field(Column("id", "INTEGER", "key")), *fields)
    keys = tuple(ForeignKey(field.column.name, field.target) for field in fields if field.target)
    return TableSpec(Table(name, plural, tuple(field.column for field in every), keys), every, rows)


def domain(name: str, *tables: TableSpec) -> Domain:
    """A domain; a table stands after those that it refers to."""
    return Domain(name, Schema(name, tuple(spec.table for spec in tables)), tables)


def by_name(*domains: Domain) -> Mapping[str, Domain]:
    """Domains under their names."""
    return {one.name: one for one in domains}


def _number(name: str, role: Role, grid: tuple[int, int, int], nullable: bool) -> Field:
    low, high, step = grid
    return Field(Column(name, "INTEGER", role, nullable), low=low, high=high, step=step)
