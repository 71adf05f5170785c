from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Iterator

import pytest
import sqlglot
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import TaskError
from agentrl_sql.domains import DOMAINS
from agentrl_sql.draws import Draws
from agentrl_sql.generate import make_database
from agentrl_sql.questions import KINDS, LEVEL_OF, Question, fits, make_question
from agentrl_sql.questions_check import Worlds, check, same_rows
from agentrl_sql.schema import Cell, Column, Database, Row, Schema, Table


def drawn(kind: str, domain: str, n: int = 3) -> list[Question]:
    draws = Draws("test", kind, domain)
    return [make_question(make_database(domain, seed), LEVEL_OF[kind], draws, kind) for seed in range(n)]


def test_every_level_has_its_kinds_and_no_kind_has_two_levels() -> None:
    assert set(KINDS) == {1, 2, 3}
    assert len(LEVEL_OF) == sum(map(len, KINDS.values()))
    wanted = [
        "count",
        "count_where",
        "aggregate",
        "aggregate_where",
        "min_max",
        "list_where",
        "top_n",
        "distinct",
        "null",
        "between",
        "like",
    ]
    assert set(wanted) <= set(KINDS[1])


def everywhere(kind: str, n: int = 2) -> Iterator[tuple[Database, Question]]:
    """Questions of a kind about databases of all domains that have room for it."""
    for domain in DOMAINS:
        if fits(kind, DOMAINS[domain].schema):
            for seed, question in enumerate(drawn(kind, domain, n)):
                yield make_database(domain, seed), question


@pytest.mark.parametrize("kind", LEVEL_OF)
def test_a_question_is_well_formed_and_all_its_queries_run(kind: str) -> None:
    for database, question in everywhere(kind):
        assert (question.kind, question.level) == (kind, LEVEL_OF[kind])
        assert question.text[0].isupper()
        assert question.text[-1] in ".?"
        assert not re.search(r"[{}]|  | [.,?]", question.text), question.text
        assert 2 <= len(question.wrong) <= 5
        assert len(set(question.wrong)) == len(question.wrong)
        known = {table.name for table in database.schema.tables}
        assert question.tables
        assert set(question.tables) <= known
        read = set(re.findall(r"(?:FROM|JOIN) (\w+)", question.gold_sql))
        assert read == set(question.tables)
        with Worlds([database]) as worlds:
            for sql in (question.gold_sql, *question.wrong, *question.same_sql, question.keys_sql):
                assert not sql or worlds.rows(sql)


@pytest.mark.parametrize("kind", LEVEL_OF)
def test_golds_have_one_style(kind: str) -> None:
    keywords = re.compile(r"\b(select|from|where|and|or|not|join|on|group|by|order|limit|having|as|is|null|like)\b")
    for _, question in everywhere(kind):
        gold = re.sub(r"'[^']*'", "''", question.gold_sql)
        assert gold.startswith("SELECT ")
        assert not gold.endswith(";")
        assert "  " not in gold
        assert not keywords.search(gold), gold
        assert question.ordered == bool(re.search(r" ORDER BY [^()]*(\([^()]*\)[^()]*)?$", gold))


@pytest.mark.parametrize("kind", LEVEL_OF)
def test_golds_are_read_by_a_parser_that_is_not_sqlite(kind: str) -> None:
    for question in drawn(kind, "library") + drawn(kind, "garage"):
        parsed = sqlglot.parse_one(question.gold_sql, dialect="sqlite")
        tables = {table.name for table in parsed.find_all(sqlglot.exp.Table)}
        assert tables == set(question.tables)


def test_wording_varies() -> None:
    for kind in LEVEL_OF:
        database = make_database("library", 1)
        draws = Draws("wording", kind)
        starts = {make_question(database, LEVEL_OF[kind], draws, kind).text.split()[0] for _ in range(60)}
        assert len(starts) >= 2, kind


@pytest.mark.parametrize(
    ("kind", "gold"),
    [
        ("count", r"SELECT COUNT\(\*\) FROM \w+"),
        ("aggregate_where", r"SELECT (AVG|SUM)\(\w+\) FROM \w+ WHERE \w+ (=|<>|<|>|<=|>=) ('\w+'|[\d.]+)"),
        ("list_where", r"SELECT \w+(, \w+)? FROM \w+ WHERE \w+ (=|<>|<|>|<=|>=) ('\w+'|[\d.]+)"),
        ("top_n", r"SELECT \w+ FROM \w+ ORDER BY \w+( DESC)? LIMIT [1-4]"),
        ("null", r"SELECT [\w*(), ]+ FROM \w+ WHERE \w+ IS (NOT )?NULL"),
        ("join_count", r"SELECT COUNT\(\*\) FROM (\w+) JOIN (\w+) ON \1\.\2_id = \2\.id WHERE \2\.\w+ .+"),
        ("having_count", r"SELECT (\w+) FROM \w+ GROUP BY \1 HAVING COUNT\(\*\) (>|>=|<) \d+"),
        ("without", r"SELECT \w+ FROM (\w+) WHERE NOT EXISTS \(SELECT 1 FROM (\w+) WHERE \2\.\1_id = \1\.id.*\)"),
    ],
)
def test_golds_of_a_kind_have_its_shape(kind: str, gold: str) -> None:
    for _, question in everywhere(kind):
        assert re.fullmatch(gold, question.gold_sql), question.gold_sql


def test_level_1_is_short() -> None:
    lengths = [len(question.gold_sql) for kind in KINDS[1] for _, question in everywhere(kind)]
    assert sum(lengths) / len(lengths) < 60
    assert max(lengths) < 110


def test_a_literal_in_a_question_occurs_in_the_database_and_in_the_gold() -> None:
    for domain in DOMAINS:
        for question in drawn("count_where", domain, 8):
            value = question.text.rstrip(".?").split()[-1]
            assert question.gold_sql.endswith(f" {value}")


def test_unknown_levels_and_kinds_are_refused() -> None:
    database = make_database("shop", 0)
    with pytest.raises(TaskError, match="level 1, 2 or 3, found 4"):
        make_question(database, 4, Draws("x"))
    with pytest.raises(TaskError, match=r"level 1 has no kind 'counts'\. Did you mean 'count'"):
        make_question(database, 1, Draws("x"), "counts")


def test_a_kind_that_the_tables_do_not_allow_is_refused() -> None:
    assert not fits("two_joins", DOMAINS["farm"].schema)
    with pytest.raises(TaskError, match="'farm' allows no question of kind 'two_joins'"):
        make_question(make_database("farm", 0), 2, Draws("x"), "two_joins")


def test_a_level_without_a_kind_draws_any_of_them() -> None:
    draws = Draws("any")
    seen = Counter(make_question(make_database("shop", 0), 1, draws).kind for _ in range(300))
    assert set(seen) == set(KINDS[1])


# -- the check, on three databases written by hand --

COIN = Table(
    "coin",
    "coins",
    (
        Column("id", "INTEGER", "key"),
        Column("metal", "TEXT", "word"),
        Column("worth", "INTEGER", "amount"),
        Column("year", "INTEGER", "ordinal", nullable=True),
    ),
)


def coins(*rows: Row) -> Database:
    return Database(Schema("coins", (COIN,)), 0, {"coin": rows})


BASE = coins((1, "gold", 10, 1900), (2, "gold", 20, None), (3, "iron", 5, 1950), (4, "iron", 5, 1960))
SIBLINGS = (
    coins((2, "gold", 30, 1910), (5, "iron", 7, 1920)),
    coins((3, "gold", 40, None), (4, "gold", 2, 1930), (6, "iron", 1, 1931)),
)


def verdict(gold: str, *wrong: str, ordered: bool = False, keys: str = "", same: tuple[str, ...] = ()) -> str | None:
    question = Question("?", gold, 1, "count", ("coin",), ordered, wrong, keys, same)
    with Worlds((BASE, *SIBLINGS)) as worlds:
        return check(question, worlds)


@pytest.mark.parametrize(
    ("gold", "wrong", "expected"),
    [
        ("SELECT COUNT(*) FROM coin", ("SELECT MAX(id) FROM coin",), None),
        ("SELECT id FROM coin WHERE worth > 99", (), "vacuous"),
        ("SELECT COUNT(*) FROM coin WHERE worth > 99", (), "vacuous"),
        ("SELECT year FROM coin WHERE id = 2 AND worth = 20", (), "vacuous"),
        ("SELECT id FROM coin WHERE worth = 20", (), "vacuous"),
        ("SELECT id, year FROM coin", (), "null"),
        ("SELECT MAX(year) FROM coin WHERE metal = 'gold' AND worth > 9", (), "null"),
        ("SELECT COUNT(DISTINCT metal) FROM coin", (), "constant"),
        ("SELECT DISTINCT metal FROM coin", (), "constant"),
        ("SELECT SUM(worth) FROM coin", ("SELECT SUM(worth) FROM coin WHERE worth > 0",), "weak"),
        ("SELECT MAX(worth) FROM coin", ("SELECT MAX(worth) FROM coin WHERE metal = 'gold'",), "weak"),
        ("SELECT COUNT(*) FROM coin WHERE worth > 5", ("SELECT COUNT(*) FROM coin WHERE worth >= 5",), None),
    ],
)
def test_check(gold: str, wrong: tuple[str, ...], expected: str | None) -> None:
    assert verdict(gold, *wrong) == expected


def test_check_refuses_a_tie_at_the_limit() -> None:
    gold = "SELECT id FROM coin ORDER BY worth LIMIT {}"
    keys = "SELECT worth FROM coin ORDER BY worth LIMIT {}"
    assert verdict(gold.format(1), ordered=True, keys=keys.format(2)) == "tied"
    falling, falling_keys = gold.replace("worth", "worth DESC"), keys.replace("BY worth", "BY worth DESC")
    assert verdict(falling.format(2), ordered=True, keys=falling_keys.format(3)) is None
    assert verdict(falling.format(3), ordered=True, keys=falling_keys.format(4)) == "tied"


def test_check_refuses_an_answer_that_depends_on_the_scan() -> None:
    assert verdict("SELECT id FROM coin LIMIT 1") == "unstable"
    assert verdict("SELECT SUM(worth) FROM (SELECT worth FROM coin LIMIT 2)") == "unstable"
    assert verdict("SELECT id FROM coin ORDER BY id LIMIT 1", ordered=True) is None


def test_check_refuses_a_text_with_two_readings() -> None:
    gold = "SELECT id FROM coin WHERE metal LIKE 'G%'"
    assert verdict(gold, same=("SELECT id FROM coin WHERE metal GLOB 'g*'",)) is None
    assert verdict(gold, same=("SELECT id FROM coin WHERE metal GLOB 'G*'",)) == "ambiguous"


def test_an_ordered_answer_is_told_from_the_same_rows_in_another_order() -> None:
    wrong = "SELECT id FROM coin ORDER BY id DESC"
    assert verdict("SELECT id FROM coin", wrong) == "weak"
    assert verdict("SELECT id FROM coin ORDER BY id", wrong, ordered=True) is None


def test_worlds_are_closed_and_the_scan_is_turned_back() -> None:
    with Worlds([BASE]) as worlds:
        forward = worlds.rows("SELECT id FROM coin")
        assert worlds.reversed_rows("SELECT id FROM coin") == [forward[0][::-1]]
        assert worlds.rows("SELECT id FROM coin") == forward
    with pytest.raises(sqlite3.ProgrammingError):
        worlds.rows("SELECT 1")


ROWS = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2)), max_size=5)


@settings(deadline=None)
@given(ROWS)
def test_rows_agree_as_bags_under_any_order_of_rows_and_columns(rows: list[tuple[Cell, ...]]) -> None:
    moved = rows[::-1]
    assert same_rows(rows, moved, ordered=False)
    assert same_rows(rows, [row[::-1] for row in moved], ordered=False)
    assert same_rows(rows, moved, ordered=True) == (rows == moved)
    assert not same_rows(rows, [*rows, ("a", 0)], ordered=False)


def test_rows_are_not_mixed_column_by_column() -> None:
    assert not same_rows([(1, 2), (3, 4)], [(1, 4), (3, 2)], ordered=False)
    assert not same_rows([(1, 1), (2, 2)], [(1, 1), (1, 1)], ordered=False)
    assert not same_rows([(1,)], [(1, 1)], ordered=False)
    assert same_rows([], [], ordered=True)
