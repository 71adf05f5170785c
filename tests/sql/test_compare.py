"""Comparing results: typed cells, tolerant bags, columns, order; golden cases, and brute force as the judge."""

from __future__ import annotations

import json
import sqlite3
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_sql.compare import Verdict, perfect_matching, same_bag, same_cell, same_result
from agentrl_sql.guard import Failure, QueryLimits, Result, run
from agentrl_sql.judge import Case, judge


def result(*rows, columns=None, truncated=False):
    width = len(rows[0]) if rows else 1
    return Result(tuple(columns or (f"c{i}" for i in range(width))), tuple(rows), truncated)


def verdict(gold, predicted, **options):
    found = same_result(gold, predicted, **options)
    return found.code, found.reason


@pytest.mark.parametrize(
    ("x", "y", "same"),
    [
        (None, None, True),
        (None, 0, False),
        (None, "", False),
        (7, 7, True),
        (7, 7.0, True),
        (7, "7", False),
        ("a", "A", False),
        ("a", "a ", False),
        ("é", "e\u0301", False),  # same_cell gets canonical text; same_result makes it so
        (b"a", "a", False),
        (0.0, -0.0, True),
        (float("inf"), float("inf"), True),
        (float("inf"), float("-inf"), False),
        (float("inf"), 1e308, False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (2**53 + 1, 2**53, False),
        (2**53 + 1, float(2**53), True),
        (1.0, 1.0 + 9e-7, True),
        (1.0, 1.0 + 2e-6, False),
        (0.0, 9e-10, True),
        (0.0, 2e-9, False),
        (200.0, 200.01, False),
        (82.86, 82.857142857, False),
        (1e12, 1e12 + 9e5, True),
    ],
)
def test_cells(x, y, same):
    assert same_cell(x, y) is same
    assert same_cell(y, x) is same


def test_text_is_compared_in_normal_form():
    assert verdict(result(("é",)), result(("e\u0301",))) == ("match", "ok")


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        (result((1, "a"), (2, "b")), result((2, "b"), (1, "a")), ("match", "ok")),
        (result((1,), (1,)), result((1,)), ("mismatch", "row_multiplicity")),
        (result((1,), (2,)), result((1,), (1,)), ("mismatch", "values")),
        (result((1,)), result((1, 2)), ("mismatch", "column_count")),
        (result((1,)), result(), ("mismatch", "empty_prediction")),
        (result(), result((1,)), ("mismatch", "values")),
        (result(), result(), ("match_vacuous", "both_empty")),
        (result((None, None)), result((None, None)), ("match_vacuous", "gold_all_null")),
        (result((None, 1)), result((None, 1)), ("match", "ok")),
        (result((1,)), result((1,), truncated=True), ("mismatch", "too_many_rows")),
        (result((1, 0.3)), result((1, 0.1 + 0.2)), ("match", "ok")),
        (result(("a", 1), ("b", 2)), result(("a", 2), ("b", 1)), ("mismatch", "values")),
    ],
)
def test_bags(gold, predicted, expected):
    assert verdict(gold, predicted) == expected


def test_columns_are_mapped_once_for_all_rows():
    gold = result(("a", 1), ("b", 2), columns=("name", "n"))
    swapped = result((1, "a"), (2, "b"), columns=("x", "y"))
    assert same_result(gold, swapped) == Verdict("match", "columns_permuted", (1, 0))
    crossed = result((1, "a"), ("b", 2), columns=("x", "y"))
    assert same_result(gold, crossed).code == "mismatch"


def test_equal_names_decide_which_column_is_which():
    gold = result((1, 2), (3, 4), columns=("low", "high"))
    assert same_result(gold, result((2, 1), (4, 3), columns=("HIGH", "low"))) == Verdict(
        "match", "columns_permuted", (1, 0)
    )
    assert same_result(gold, result((2, 1), (4, 3), columns=("low", "high"))).code == "mismatch"
    assert same_result(gold, result((2, 1), (4, 3), columns=("a", "b"))).code == "match"
    twice = result((2, 1), (4, 3), columns=("low", "low"))
    assert same_result(gold, twice).code == "match"


def test_many_equal_columns_do_not_explode():
    wide = tuple(range(3)) * 14
    gold = result(wide, wide[::-1])
    assert same_result(gold, result(wide[::-1], wide)).code == "match"
    assert same_result(gold, result(wide, wide)).code == "mismatch"


def test_order_counts_where_the_gold_orders():
    gold = result((3,), (2,), (1,))
    assert verdict(gold, result((3,), (2,), (1,)), ordered=True) == ("match", "ok")
    assert verdict(gold, result((1,), (2,), (3,)), ordered=True) == ("mismatch", "row_order")
    assert verdict(gold, result((1,), (2,), (3,))) == ("match", "ok")


def test_rows_with_equal_keys_may_come_in_any_order():
    gold = result(("ann", 9), ("bob", 9), ("cy", 8))
    keys = [(9,), (9,), (8,)]
    assert verdict(gold, result(("bob", 9), ("ann", 9), ("cy", 8)), ordered=True, keys=keys) == ("match", "ok")
    assert verdict(gold, result(("bob", 9), ("ann", 9), ("cy", 8)), ordered=True) == ("mismatch", "row_order")
    assert verdict(gold, result(("cy", 8), ("ann", 9), ("bob", 9)), ordered=True, keys=keys)[1] == "row_order"


def test_tolerance_is_matched_and_not_sorted():
    """Each left row fits two right ones; only one pairing serves all, and sorting by text or first cell misses it."""
    step = 8e-7
    left = [(1.0, 1.0 + step), (1.0 + step, 1.0)]
    right = [(1.0 + step, 1.0 + step), (1.0, 1.0)]
    assert same_bag(left, right)
    assert not same_bag([(1.0,), (1.0,)], [(1.0,), (1.0 + 3 * step,)])
    assert not same_bag([("a", 1.0), ("b", 2.0)], [("a", 2.0), ("b", 1.0)])


near = st.sampled_from([1.0, 1.0 + 6e-7, 1.0 + 1.2e-6, 1.0 + 1.8e-6, 2.0, 1, 2])
cells = st.one_of(near, st.sampled_from([None, "a", "1", 3]))


@settings(max_examples=600, deadline=None)
@given(st.integers(1, 2).flatmap(lambda width: st.tuples(*[st.lists(st.tuples(*[cells] * width), max_size=5)] * 2)))
def test_bags_agree_with_brute_force(sides):
    left, right = sides

    def fits(order):
        return all(same_cell(x, y) for i, j in enumerate(order) for x, y in zip(left[i], right[j], strict=True))

    expected = len(left) == len(right) and any(fits(order) for order in permutations(range(len(left))))
    assert same_bag(left, right) is expected


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, max(0, n - 1)), max_size=4), min_size=n, max_size=n)
    )
)
def test_matchings_agree_with_brute_force(edges):
    expected = any(all(j in edges[i] for i, j in enumerate(order)) for order in permutations(range(len(edges))))
    assert perfect_matching(edges) is expected


def test_a_long_chain_of_augmenting_paths_needs_no_recursion():
    n = 3000
    assert perfect_matching([[0] if i == n - 1 else [i, i + 1] for i in range(n)])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=6), st.permutations(range(3)), st.randoms())
def test_a_result_equals_itself_under_any_order_of_rows_and_columns(rows, order, random):
    shuffled = rows[:]
    random.shuffle(shuffled)
    moved = result(*[tuple(row[j] for j in order) for row in shuffled], columns=("x", "y", "z"))
    assert same_result(result(*rows), moved).code in ("match", "match_vacuous")


# -- on databases -----------------------------------------------------------------------------------------------------


def build(path, script):
    connection = sqlite3.connect(path)
    connection.executescript("PRAGMA synchronous = OFF;" + script)
    connection.close()
    return str(path)


@pytest.fixture
def worlds(tmp_path):
    rows = (((1, "a", 3), (2, "b", 3), (3, "c", 5)), ((1, "a", 9), (2, "d", 3)), ((5, "e", 4),))
    script = "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT, n INTEGER);"
    return [
        build(tmp_path / f"{i}.db", script + "".join(f"INSERT INTO t VALUES {row};" for row in table))
        for i, table in enumerate(rows)
    ]


def judged(worlds, gold, predicted, ordered=False):
    return [(v.code, v.reason) for v in judge(worlds, Case(gold, predicted, ordered, ["t"]))]


TOTAL, LISTED, THREES = "SELECT SUM(n) FROM t", "SELECT name FROM t ORDER BY name", "SELECT name FROM t WHERE n = 3"
MANY = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r LIMIT 2000) SELECT i FROM r"
FIRST = "SELECT MIN(name) FROM t"
RIGHT = [("match", "ok")]


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        (TOTAL, "select total(n) from t", RIGHT * 3),
        (TOTAL, "SELECT 11", [("mismatch", "reads_no_table")]),
        (TOTAL, "WITH t AS (SELECT 1) SELECT 10 + COUNT(*) FROM t", [("mismatch", "reads_no_table")]),
        (TOTAL, "SELECT 11 FROM t LIMIT 1", [*RIGHT, ("mismatch", "values")]),
        (TOTAL, "SELECT nothing FROM t", [("error", "exec_error")]),
        (TOTAL, "DELETE FROM t", [("rejected", "not_read_only")]),
        (THREES, "SELECT name FROM t WHERE n IN (3)", [*RIGHT, *RIGHT, ("match_vacuous", "both_empty")]),
        (LISTED, "SELECT name FROM t ORDER BY 1", RIGHT * 3),
        (LISTED, "SELECT name FROM t", [("mismatch", "accidental_order")]),
        (FIRST, "SELECT name FROM t LIMIT 1", [("mismatch", "accidental_order")]),
        (FIRST, "SELECT name FROM t ORDER BY id LIMIT 1", RIGHT * 3),
        (LISTED, "SELECT name FROM t ORDER BY name DESC", [("mismatch", "row_order")]),
        ("SELECT name FROM nowhere", "SELECT 1", [("invalid_gold", "exec_error")]),
        ("SELECT name FROM t WHERE n > 99", "SELECT 1", [("invalid_gold", "vacuous_everywhere")]),
        ("SELECT MAX(1) FROM t", "SELECT 1 FROM t", [("invalid_gold", "same_everywhere")]),
        (MANY, "SELECT 1", [("invalid_gold", "too_many_rows")]),
    ],
)
def test_the_judge(worlds, gold, predicted, expected):
    assert judged(worlds, gold, predicted, ordered=gold == LISTED) == expected


ACCIDENT = {
    "gold": "SELECT name FROM emp WHERE dept_id IS NOT NULL ORDER BY id",
    "pred": "SELECT name FROM emp WHERE dept_id IS NOT NULL",
}
LATER = {
    "c10": "an accidental order is the judge's to find: see ACCIDENT",
    "c07": "ties inside an ordered gold: the generated golds have none",
    "c52": "a tie at the limit",
    "c54": "a tie at the limit",
    "c56": "LIMIT without ORDER BY",
    "c58": "superlative_ties",
    "c41": "date_midnight_equiv",
}


def compared(path, case, ordered):
    gold, predicted = (run(path, case[key], ["dept", "emp", "sale", "acct"], QueryLimits()) for key in ("gold", "pred"))
    found = predicted if isinstance(predicted, Failure) else same_result(gold, predicted, ordered=ordered)
    return (found.kind if isinstance(found, Failure) else found.code), found.reason


@pytest.mark.shared
def test_golden_cases(shared_data, tmp_path):
    """Public cases with the verdict that each must get; those that need rules of a later version are named."""
    golden = json.loads((shared_data / "sql_comparator_cases.json").read_text())
    base = build(tmp_path / "base.db", golden["setup_sql"])
    variant = build(tmp_path / "variant.db", golden["setup_sql"] + golden["variant_sql"])
    wrong = {}
    for case in golden["cases"]:
        ordered = case["id"] in {"c03", "c09", "c11", "c53"}
        for path, key in ((base, "expected"), (variant, "expected_on_variant")):
            if key in case and case["id"] not in LATER:
                found, want = compared(path, case, ordered), (case[key]["verdict"], case[key]["reason"])
                if found != want:
                    wrong[case["id"], key] = found, want
    assert wrong == {}
    assert judge([base], Case(ACCIDENT["gold"], ACCIDENT["pred"], True, ["emp"]))[0].reason == "accidental_order"
