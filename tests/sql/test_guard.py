"""The SQLite guard: every known way out is tried and must fail; queries of all kinds must go through."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl_sql.guard import NOW, PURE_FUNCTIONS, Failure, QueryLimits, Result, run

LIMITS = QueryLimits()
TABLES = ("city", "trip")


@pytest.fixture(scope="module")
def content():
    connection = sqlite3.connect(":memory:")
    connection.executescript(
        "CREATE TABLE city (id INTEGER PRIMARY KEY, name TEXT, people INTEGER);"
        "CREATE TABLE trip (id INTEGER PRIMARY KEY, city_id INTEGER REFERENCES city (id), cost REAL, day TEXT);"
        "CREATE TABLE secret (answer TEXT); INSERT INTO secret VALUES ('42');"
        "CREATE INDEX trip_city ON trip (city_id);"
    )
    connection.executemany("INSERT INTO city VALUES (?, ?, ?)", [(i, f"city{i}", 10 * i) for i in range(1, 31)])
    connection.executemany("INSERT INTO trip VALUES (?, ?, ?, ?)", [(i, i % 7, i / 2, "2024-05-01") for i in range(60)])
    connection.commit()
    yield connection.serialize()
    connection.close()


@pytest.fixture
def database(tmp_path, content):
    path = tmp_path / "base.db"
    path.write_bytes(content)
    return path


def fingerprint(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def outcome(database: Path, sql: str, limits: QueryLimits = LIMITS) -> Result | Failure:
    return run(str(database), sql, TABLES, limits)


ESCAPES = {
    "attach": "ATTACH '{folder}/evil.db' AS evil",
    "attach_after_a_comment": "/* SELECT */ ATTACH '{folder}/evil.db' AS evil",
    "attach_memory": "ATTACH ':memory:' AS evil",
    "detach": "DETACH main",
    "vacuum_into": "VACUUM INTO '{folder}/copy.db'",
    "vacuum": "VACUUM",
    "query_only": "PRAGMA query_only = OFF",
    "writable_schema": "PRAGMA writable_schema = ON",
    "heap": "PRAGMA hard_heap_limit = 0",
    "pragma_function": "SELECT * FROM pragma_table_info('secret')",
    "pragma_function_count": "SELECT COUNT(*) FROM pragma_database_list",
    "pragma_file_path": "SELECT file FROM pragma_database_list",
    "insert": "INSERT INTO city VALUES (99, 'x', 1)",
    "update": "UPDATE city SET people = 0",
    "delete": "DELETE FROM city",
    "replace": "REPLACE INTO city VALUES (1, 'x', 1)",
    "with_delete": "WITH x AS (SELECT 1) DELETE FROM city",
    "with_insert": "WITH x AS (SELECT 1) INSERT INTO city SELECT 99, 'x', 1",
    "drop": "DROP TABLE city",
    "alter": "ALTER TABLE city RENAME TO town",
    "create": "CREATE TABLE t (x)",
    "temp_table": "CREATE TEMP TABLE city AS SELECT 1 AS id",
    "temp_view": "CREATE TEMP VIEW city AS SELECT 1 AS id",
    "temp_trigger": "CREATE TEMP TRIGGER t AFTER UPDATE ON city BEGIN SELECT 1; END",
    "virtual_table": "CREATE VIRTUAL TABLE f USING fts5(x)",
    "begin": "BEGIN EXCLUSIVE",
    "savepoint": "SAVEPOINT s",
    "reindex": "REINDEX",
    "analyze": "ANALYZE",
    "explain": "EXPLAIN SELECT * FROM city",
    "two_statements": "SELECT 1; DROP TABLE city",
    "two_selects": "SELECT 1; SELECT 2",
    "statement_after_a_comment": "SELECT 1; -- no more\nDELETE FROM city",
    "master": "SELECT sql FROM sqlite_master",
    "master_count": "SELECT COUNT(*) FROM sqlite_master",
    "schema": "SELECT * FROM sqlite_schema",
    "temp_master": "SELECT * FROM sqlite_temp_master",
    "master_in_a_subquery": "SELECT name FROM city WHERE name IN (SELECT name FROM sqlite_master)",
    "master_quoted": 'SELECT * FROM "SQLITE_MASTER"',
    "master_qualified": "SELECT * FROM main.sqlite_master",
    "table_not_allowed": "SELECT answer FROM secret",
    "table_not_allowed_count": "SELECT COUNT(*) FROM secret, city",
    "table_not_allowed_behind_a_namesake": (
        "SELECT COUNT(*) FROM secret WHERE EXISTS (WITH secret AS (SELECT 1) SELECT COUNT(*) FROM secret)"
    ),
    "table_not_allowed_exists": "SELECT name FROM city WHERE EXISTS (SELECT 1 FROM main.secret)",
    "table_not_allowed_as_condition": "SELECT 1 WHERE '42' IN secret",
    "table_not_allowed_joined": "SELECT c.name FROM city c JOIN secret s ON s.answer = c.id",
    "dbstat": "SELECT * FROM dbstat",
    "statement_table": "SELECT * FROM sqlite_stmt",
    "json_table": "SELECT * FROM json_each('[1]')",
    "load_extension": "SELECT load_extension('libm')",
    "readfile": "SELECT readfile('/etc/passwd')",
    "writefile": "SELECT writefile('{folder}/x', 'x')",
    "edit": "SELECT edit('x')",
    "fts3_tokenizer": "SELECT fts3_tokenizer('simple')",
    "randomblob": "SELECT randomblob(10)",
    "zeroblob": "SELECT LENGTH(zeroblob(1000000000))",
    "random": "SELECT random()",
    "random_order": "SELECT name FROM city ORDER BY RANDOM()",
    "printf": "SELECT printf('%.*c', 2000000000, 'x')",  # spins for seconds in a single step
    "version": "SELECT sqlite_version()",
    "log": "SELECT sqlite_log(1, 'x')",
    "changes": "SELECT total_changes()",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_no_way_out(database, name):
    before = fingerprint(database.parent)
    result = outcome(database, ESCAPES[name].format(folder=database.parent))
    assert isinstance(result, Failure), result
    assert "42" not in result.text
    assert fingerprint(database.parent) == before


def test_nothing_that_sqlite_has_is_forgotten(database):
    """Functions are pure or refused; modules of virtual tables are all refused."""
    connection = sqlite3.connect(":memory:")
    functions = {name for (name,) in connection.execute("SELECT DISTINCT name FROM pragma_function_list")}
    modules = {name for (name,) in connection.execute("SELECT name FROM pragma_module_list")}
    connection.close()
    impure = "changes last_insert_rowid load_extension random randomblob total_changes zeroblob printf sqlite_version"
    assert functions - PURE_FUNCTIONS >= set(impure.split())
    for name in functions - PURE_FUNCTIONS:
        result = outcome(database, f'SELECT "{name}"(1)')
        assert isinstance(result, Failure), name
    for name in modules:
        for sql in (f'SELECT * FROM "{name}"', f'SELECT COUNT(*) FROM "{name}"', f"SELECT * FROM {name}('city')"):
            assert isinstance(outcome(database, sql), Failure), name


REFUSALS = {
    "DELETE FROM city": ("rejected", "not_read_only", "DELETE is not allowed, only SELECT"),
    "WITH x AS (SELECT 1) DELETE FROM city": ("rejected", "forbidden", "DELETE is not allowed, only SELECT"),
    "SELECT * FROM secret": ("rejected", "forbidden", "the table secret may not be read"),
    "SELECT random()": ("rejected", "forbidden", "the function random is not allowed"),
    "SELECT 1; SELECT 2": ("rejected", "multi_statement", "only one statement is allowed"),
    "SELECT nam FROM city": ("error", "exec_error", "no such column: nam"),
    "SELECT FROM": ("error", "exec_error", 'near "FROM": syntax error'),
    "the answer is 42": ("error", "exec_error", "expected a SELECT statement"),
    "": ("error", "exec_error", "expected a SELECT statement"),
    "-- SELECT 1": ("error", "exec_error", "expected a SELECT statement"),
    f"SELECT '{'é' * 10_000}'": ("error", "too_large", "the query is longer than 10000 characters"),
    "SELECT ?": ("error", "exec_error", "too many SQL variables"),
    "SELECT 'a\x00b'": ("error", "exec_error", "the query contains a null character"),
    "SELECT '\ud800'": ("error", "exec_error", "the query holds characters that are no text"),
}


@pytest.mark.parametrize("sql", REFUSALS)
def test_a_failure_says_what_it_is(database, sql):
    result = outcome(database, sql)
    kind, reason, text = REFUSALS[sql]
    assert (result.kind, result.reason) == (kind, reason)
    assert result.text.startswith(text)


BOMBS = {
    "endless_recursion": "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT COUNT(*) FROM r",
    "endless_rows": "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT MAX(n) FROM r",
    "cross_join": f"SELECT COUNT(*) FROM {', '.join(f'city c{i}' for i in range(28))}",
    "sorted_cross_join": f"SELECT * FROM {', '.join(f'city c{i}' for i in range(8))} ORDER BY c0.name || c7.name",
    "growing_strings": "WITH RECURSIVE r(s) AS (SELECT 'x' UNION ALL SELECT s || s FROM r) SELECT LENGTH(s) FROM r",
    "long_replace": "SELECT " + "replace(" * 20 + "'x'" + ", 'x', 'xxxxxxxxxx')" * 20,
    "group_concat": "SELECT LENGTH(group_concat(a.name || b.name || c.name)) FROM city a, city b, city c",
    "wide_and_deep_sort": (
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 100000)"
        f" SELECT '{'x' * 9000}' || n AS s FROM r ORDER BY s DESC"
    ),
    "deep_expression": f"SELECT {'(' * 5000}1{')' * 5000}",
    "long_expression": f"SELECT {' + '.join(['1'] * 3000)}",
    "many_unions": " UNION ALL ".join(["SELECT 1"] * 200),
    "many_columns": f"SELECT {', '.join(['1'] * 1500)}",
    "long_text": f"SELECT '{'x' * 100_000}'",
    "long_pattern": f"SELECT 'x' LIKE '{'%a' * 200}'",
    "many_joins": f"SELECT 1 FROM {', '.join(f'city c{i}' for i in range(70))}",
    "window_bomb": "SELECT SUM(a.id) OVER (ORDER BY b.id, c.id, d.id) FROM city a, city b, city c, city d ORDER BY 1",
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_bomb_goes_off(database, name):
    start = time.process_time()
    first = outcome(database, BOMBS[name])
    assert time.process_time() - start < 3
    assert isinstance(first, Failure), first
    assert first.kind == "error"
    assert outcome(database, BOMBS[name]) == first


def test_the_budget_is_counted_and_not_timed(database):
    """The least budget that lets a query pass is a property of the query: it is the same on every run."""
    sql = "SELECT COUNT(*) FROM city a, city b WHERE a.people < b.people"

    def passes(steps: int) -> bool:
        return isinstance(outcome(database, sql, QueryLimits(steps=steps)), Result)

    def least() -> int:
        low, high = 100, 2_000_000
        while high - low > 100:
            middle = (low + high) // 2
            low, high = (low, middle) if passes(middle) else (middle, high)
        return high // 100

    assert passes(2_000_000)
    assert not passes(100)
    assert least() == least()


def test_rows_and_bytes_are_capped(database):
    capped = outcome(database, "SELECT id FROM city", QueryLimits(rows=30))
    assert (len(capped.rows), capped.truncated) == (30, False)
    capped = outcome(database, "SELECT id FROM city", QueryLimits(rows=29))
    assert (len(capped.rows), capped.truncated) == (29, True)
    assert outcome(database, "SELECT name FROM city", QueryLimits(result_bytes=50)).reason == "too_large"


GOOD = {
    "SELECT name FROM city WHERE people > 280;": (("city29",), ("city30",)),
    "  \n-- a comment; with ; in it\n select /* ; */ COUNT(*) from city ;; ": ((30,),),
    "WITH big AS (SELECT * FROM city WHERE people >= 290) SELECT COUNT(*) FROM big": ((2,),),
    "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 4) SELECT SUM(n) FROM r": ((10,),),
    "VALUES (1, 'a'), (2, NULL)": ((1, "a"), (2, None)),
    "SELECT c.name, COUNT(*) FROM city c JOIN trip t ON t.city_id = c.id GROUP BY c.id HAVING COUNT(*) > 8": (
        ("city1", 9), ("city2", 9), ("city3", 9),
    ),
    "SELECT 1.5, 9e999, x'00ff', 9007199254740993, 'é', ''": ((1.5, float("inf"), b"\x00\xff", 2**53 + 1, "é", ""),),
    "SELECT CAST(x'ff41' AS TEXT)": (("\udcffA",),),
    "SELECT UPPER(SUBSTR(name, 1, 2)) || ROUND(2.567, 1), json_extract('[3]', '$[0]') FROM city WHERE id = 1": (
        ("CI2.6", 3),
    ),
    "SELECT ROW_NUMBER() OVER (ORDER BY id DESC) FROM city LIMIT 1": ((1,),),
    "SELECT x FROM (SELECT 1 AS x INTERSECT SELECT 1)": ((1,),),
    "SELECT 'a;b', ';'": (("a;b", ";"),),
    "SELECT strftime('%Y', day), julianday(day) > 0 FROM trip LIMIT 1": (("2024", 1),),
}  # fmt: skip


@pytest.mark.parametrize("sql", GOOD)
def test_ordinary_queries_run(database, sql):
    result = outcome(database, sql)
    assert isinstance(result, Result), result
    assert result.rows == GOOD[sql]


def test_now_is_a_fixed_day(database):
    sql = (
        "SELECT date('now'), datetime(), CURRENT_TIMESTAMP, CURRENT_DATE, current_time, strftime('%Y-%m', 'NOW'),"
        " date('now', '+1 month', '-1 day'), date('2024-02-28', '+1 day'), unixepoch() - unixepoch(CURRENT_TIMESTAMP)"
    )
    assert NOW == "2025-01-01 00:00:00"
    assert outcome(database, sql).rows == (
        ("2025-01-01", NOW, NOW, "2025-01-01", "00:00:00", "2025-01", "2025-01-31", "2024-02-29", 0),
    )


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        ("SELECT 1", set()),
        ("SELECT COUNT(*) FROM city", {"city"}),
        ("SELECT COUNT(*) FROM CITY AS c", {"city"}),
        ("SELECT 42 FROM city LIMIT 1", {"city"}),
        ("SELECT 1 WHERE EXISTS (SELECT 1 FROM trip)", {"trip"}),
        ("SELECT c.name FROM city c JOIN trip t ON t.city_id = c.id", {"city", "trip"}),
        ("WITH x AS (SELECT 1) SELECT COUNT(*) FROM x", set()),
        ("WITH city AS (SELECT 1 AS a) SELECT COUNT(*) FROM city", set()),
        ("WITH city AS (SELECT 1 AS a) SELECT a FROM city", set()),
        ("WITH city AS (SELECT 1 AS a FROM main.city) SELECT COUNT(*) FROM city", {"city"}),
        ("WITH city AS (SELECT name FROM main.city) SELECT COUNT(*) FROM city", {"city"}),
        ("SELECT COUNT(*) FROM (VALUES (1), (2)) AS city", set()),
    ],
)
def test_it_tells_which_tables_were_read(database, sql, tables):
    assert outcome(database, sql).tables == tables


def test_scans_can_be_reversed(database):
    forwards = outcome(database, "SELECT id FROM city").rows
    backwards = run(str(database), "SELECT id FROM city", TABLES, LIMITS, reverse_scans=True).rows
    assert backwards == forwards[::-1]


def test_a_path_that_is_not_there_makes_no_file(tmp_path):
    with pytest.raises(sqlite3.OperationalError):
        run(str(tmp_path / "mistyped.db"), "SELECT 1", TABLES, LIMITS)
    assert list(tmp_path.iterdir()) == []


WORDS = """
    SELECT FROM WHERE WITH AS ( ) ; , * city trip secret sqlite_master name id '42' 1 UNION ALL DELETE INSERT INTO
    PRAGMA ATTACH 'x.db' RECURSIVE VALUES -- /* */ " ' load_extension('x') JOIN ON = LIMIT ORDER BY
"""
words = st.sampled_from([*WORDS.split(), "\x00"])


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "base.db"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE city (id INTEGER, name TEXT); CREATE TABLE trip (id INTEGER); INSERT INTO city VALUES (1, 'a');"
        "CREATE TABLE secret (answer TEXT); INSERT INTO secret VALUES ('hidden');"
    )
    connection.close()
    before = fingerprint(path.parent)
    yield path
    assert fingerprint(path.parent) == before


@settings(max_examples=1500, deadline=None)
@given(sql=st.one_of(st.text(max_size=60), st.lists(words, max_size=14).map(" ".join)))
@example(sql="/*" * 1000)
@example(sql="--" * 5000 + "\n")
@example(sql="(" * 900 + "SELECT 1")
def test_no_text_raises_or_changes_a_thing(fuzzed, sql):
    result = outcome(fuzzed, sql, QueryLimits(steps=100_000))
    assert isinstance(result, Result | Failure)
    assert "hidden" not in repr(result)
