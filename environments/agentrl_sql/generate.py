"""Draws a database of a domain from a seed, in about a millisecond."""

from __future__ import annotations

from functools import lru_cache

from agentrl import TaskError, did_you_mean
from agentrl_sql.domains import DOMAINS
from agentrl_sql.domains.spec import Field, TableSpec
from agentrl_sql.draws import Draws
from agentrl_sql.schema import Cell, Database, Row

NULL_SHARE = 0.15
"""Share of NULLs in a column that allows them."""

UNREFERENCED_SHARE = 0.25
"""Share of the rows of a table that no foreign key of a given table refers to: they test outer joins and NOT EXISTS."""


@lru_cache(maxsize=256)
def make_database(domain: str, seed: int) -> Database:
    """Draws the rows of all tables of a domain: a pure function, memoised.

    Keys have gaps, so that the greatest id is not the number of rows; numbers come from coarse grids and words from
    short lists, so that there are ties and duplicates; each database leaves some of the words out.

    Args:
        domain: Name of a domain.
        seed: Any whole number; two seeds give sibling databases of one schema.

    Raises:
        TaskError: If there is no such domain.
    """
    if domain not in DOMAINS:
        raise TaskError(f"there is no domain {domain!r}.{did_you_mean(domain, DOMAINS)}")
    draws = Draws("database", domain, seed)
    rows: dict[str, tuple[Row, ...]] = {}
    keys: dict[str, list[Cell]] = {}
    for spec in DOMAINS[domain].tables:
        n = draws.between(*spec.rows)
        columns = [_column(field, n, keys, draws) for field in spec.fields]
        keys[spec.table.name] = columns[_key_position(spec)]
        rows[spec.table.name] = tuple(zip(*columns, strict=True))
    return Database(DOMAINS[domain].schema, seed, rows)


def _key_position(spec: TableSpec) -> int:
    return spec.table.position(spec.table.primary_key)


def _column(field: Field, n: int, keys: dict[str, list[Cell]], draws: Draws) -> list[Cell]:
    """N values of one column."""
    role = field.column.role
    if role == "key":
        ids: list[Cell] = [*sorted(draws.sample(range(1, n + n // 2 + 2), n))]
        return ids
    if role == "label":
        return list(draws.sample(field.words, n))
    if role == "ref":
        parents = keys[field.target]
        used = draws.sample(parents, max(2, round(len(parents) * (1 - UNREFERENCED_SHARE))))
        values = _skewed(used, n, draws)
    elif role == "word":
        used = draws.sample(field.words, max(2, len(field.words) - draws.below(3)))
        values = _skewed(used, n, draws)
    elif role == "day":
        values = [_day(field, draws) for _ in range(n)]
    else:
        values = _numbers(field, n, draws)
    if field.column.nullable:
        values = [None if draws.chance(NULL_SHARE) else value for value in values]
    return values


def _skewed(items: list[Cell] | list[str], n: int, draws: Draws) -> list[Cell]:
    """N of the items with repetition, the earlier ones more often."""
    return [items[int(len(items) * draws.unit() ** 1.4)] for _ in range(n)]


def _numbers(field: Field, n: int, draws: Draws) -> list[Cell]:
    steps = int((field.high - field.low) / field.step) + 1
    return [field.low + field.step * draws.below(steps) for _ in range(n)]


def _day(field: Field, draws: Draws) -> str:
    year = draws.between(int(field.low), int(field.high))
    return f"{year}-{draws.between(1, 12):02d}-{draws.between(1, 28):02d}"
