from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import TaskError
from agentrl_sql.domains import DOMAINS, HELDOUT_DOMAINS, TRAIN_DOMAINS
from agentrl_sql.draws import Draws, number_of
from agentrl_sql.generate import make_database
from agentrl_sql.schema import Column, ForeignKey, Schema, Table, literal

SEEDS = range(12)
EVERY = [(domain, seed) for domain, seed in product(DOMAINS, SEEDS)]


def built(domain: str, seed: int) -> closing[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA foreign_keys = ON")
    make_database(domain, seed).build(connection)
    return closing(connection)


def test_there_are_enough_domains_and_none_is_both_trained_on_and_held_out() -> None:
    assert len(TRAIN_DOMAINS) >= 9
    assert len(HELDOUT_DOMAINS) >= 3
    assert len(DOMAINS) == len(TRAIN_DOMAINS) + len(HELDOUT_DOMAINS) >= 12


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_domain_has_two_to_five_related_tables(domain: str) -> None:
    schema = DOMAINS[domain].schema
    assert 2 <= len(schema.tables) <= 5
    for table in schema.tables:
        parents = [key.table for key in table.foreign_keys]
        assert len(parents) == len(set(parents)), "a question could not say which of two keys it means"
        related = parents or [child for child, _, parent in schema.links if parent is table]
        assert related, f"{table.name} stands alone"


def test_names_are_plain_words_and_no_two_domains_share_a_table() -> None:
    names = [table.name for domain in DOMAINS.values() for table in domain.schema.tables]
    assert len(names) == len(set(names))
    columns = [column.name for domain in DOMAINS.values() for table in domain.schema.tables for column in table.columns]
    for name in [*names, *columns]:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)?", name), name


@pytest.mark.parametrize("domain", DOMAINS)
def test_there_are_words_enough_for_every_label(domain: str) -> None:
    for spec in DOMAINS[domain].tables:
        for field in spec.fields:
            assert len(field.words) == len(set(field.words))
            assert not any("'" in word or "%" in word or "_" in word for word in field.words)
            if field.column.role == "label":
                assert len(field.words) >= spec.rows[1], (spec.table.name, field.column.name)


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_domain_can_be_asked_all_sorts_of_questions(domain: str) -> None:
    schema = DOMAINS[domain].schema
    columns = [column for table in schema.tables for column in table.columns]
    assert {"label", "word", "amount", "measure"} <= {column.role for column in columns}
    assert any(column.nullable and column.role in {"amount", "measure"} for column in columns)
    assert any(parent.label.role == "label" for _, _, parent in schema.links)


def test_keys_hold_and_tables_are_small() -> None:
    for domain, seed in EVERY:
        with built(domain, seed) as connection:
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
            for table in DOMAINS[domain].schema.tables:
                (n,) = connection.execute(f"SELECT COUNT(*) FROM {table.name}").fetchone()
                assert 8 <= n <= 40


def test_ids_have_gaps_columns_have_nulls_and_ties_and_parents_lack_children() -> None:
    gaps, found = 0, Counter[str]()
    for domain, seed in EVERY:
        database = make_database(domain, seed)
        for table in database.schema.tables:
            ids = [row[0] for row in database.rows[table.name]]
            assert ids == sorted(set(ids))
            gaps += ids[-1] != len(ids)
            for column in table.columns:
                values = database.values(table.name, column.name)
                has_null = len(values) < len(ids)
                assert column.nullable or not has_null
                found["null"] += has_null
                found["nullable"] += column.nullable
                if column.role in {"amount", "measure", "ordinal", "word"}:
                    found["ties"] += len(set(values)) < len(values)
                    found["tieable"] += 1
        for child, key, parent in database.schema.links:
            found["links"] += 1
            used = set(database.values(child.name, key.column))
            found["childless"] += len(used) < len(database.rows[parent.name])
    assert gaps > 0.9 * sum(len(domain.schema.tables) for domain in DOMAINS.values()) * len(SEEDS)
    assert found["null"] > 0.9 * found["nullable"]
    assert found["ties"] > 0.9 * found["tieable"]
    assert found["childless"] == found["links"]


@pytest.mark.parametrize("domain", DOMAINS)
def test_numbers_are_short_and_sums_of_halves_are_exact(domain: str) -> None:
    for seed in SEEDS:
        database = make_database(domain, seed)
        for table in database.schema.tables:
            for column in table.columns:
                for value in database.values(table.name, column.name):
                    if column.type == "REAL":
                        assert isinstance(value, float)
                        assert (value * 4).is_integer()
                    if column.type == "INTEGER":
                        assert type(value) is int
                    if column.type != "TEXT":
                        assert len(literal(value)) <= 4


def test_a_database_is_a_pure_function_of_domain_and_seed() -> None:
    again = make_database.__wrapped__
    for domain, seed in EVERY[::5]:
        assert again(domain, seed) == make_database(domain, seed)
        assert again(domain, seed).rows != again(domain, seed + 1).rows


def test_a_database_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from agentrl_sql.generate import make_database; from agentrl_sql.draws import number_of;"
        "print(number_of(*[make_database(d, 7).script() for d in ('shop', 'zoo')]))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = number_of(*[make_database(domain, 7).script() for domain in ("shop", "zoo")])
    assert printed == {f"{here}\n"}


@pytest.mark.parametrize("domain", DOMAINS)
def test_script_and_build_make_the_same_database(domain: str) -> None:
    with built(domain, 3) as one, closing(sqlite3.connect(":memory:")) as other:
        other.executescript(make_database(domain, 3).script())
        assert list(one.iterdump()) == list(other.iterdump())


def test_an_unknown_domain_is_named_with_the_nearest() -> None:
    with pytest.raises(TaskError, match=r"no domain 'shops'\. Did you mean 'shop'"):
        make_database("shops", 0)


LAMP = Table(
    "lamp",
    "lamps",
    (
        Column("id", "INTEGER", "key"),
        Column("name", "TEXT", "label"),
        Column("room_id", "INTEGER", "ref", nullable=True),
        Column("watts", "INTEGER", "amount"),
    ),
    (ForeignKey("room_id", "room"),),
)
ROOM = Table("room", "rooms", (Column("id", "INTEGER", "key"), Column("birth_year", "INTEGER", "ordinal")))


def test_ddl_and_summary() -> None:
    assert LAMP.ddl() == (
        "CREATE TABLE lamp (\n"
        "  id INTEGER PRIMARY KEY,\n"
        "  name TEXT NOT NULL UNIQUE,\n"
        "  room_id INTEGER REFERENCES room (id),\n"
        "  watts INTEGER NOT NULL\n"
        ");"
    )
    schema = Schema("house", (ROOM, LAMP))
    room, lamp = "room(id INTEGER, birth_year INTEGER)", "lamp(id INTEGER, name TEXT, room_id INTEGER, watts INTEGER)"
    assert schema.summary() == f"{room}\n{lamp}"
    assert schema.summary(["lamp"]) == lamp
    assert (ROOM.columns[1].words, ROOM.columns[1].verb, LAMP.columns[3].verb) == ("birth year", "is", "are")
    assert (LAMP.label.name, ROOM.label.name) == ("name", "id")


def test_unknown_tables_and_columns_are_named_with_the_nearest() -> None:
    with pytest.raises(TaskError, match=r"no table 'lamps'\. Did you mean 'lamp'"):
        Schema("house", (ROOM, LAMP)).table("lamps")
    with pytest.raises(TaskError, match=r"'lamp' has no column 'watt'\. Did you mean 'watts'"):
        LAMP.column("watt")


@settings(deadline=None)
@given(st.one_of(st.none(), st.text().filter(lambda text: "\0" not in text), st.integers(-(10**4), 10**4)))
def test_a_literal_reads_back_as_the_value(value: str | int | None) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        assert connection.execute(f"SELECT {literal(value)}").fetchone() == (value,)


@settings(deadline=None)
@given(st.integers(0, 4000).map(lambda n: n / 4))
def test_a_literal_of_a_float_is_written_as_a_person_would(value: float) -> None:
    assert float(literal(value)) == value
    assert not literal(value).endswith(".0")


def test_draws_are_what_they_have_always_been() -> None:
    draws = Draws("pinned", 1)
    seen = [draws.below(100), draws.between(5, 9), draws.pick("abcdef"), draws.sample(range(8), 4), draws.chance(0.5)]
    assert seen == [76, 6, "a", [6, 1, 3, 0], True]
    assert number_of("a", 1) == 9331952569449725121


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(0, 60), st.integers())
def test_a_sample_has_different_items_of_the_pool(size: int, n: int, seed: int) -> None:
    sample = Draws("sample", seed).sample(range(size), n)
    assert len(sample) == min(n, size) == len(set(sample))
    assert set(sample) <= set(range(size))
