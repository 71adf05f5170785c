"""Gaps by hand: absolute below 1, relative above, infinite where one side has no number."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.replay.compare import Row, differences, gap

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("recorded", "found", "expected"),
    [
        (1.0, 1.0, 0.0),
        (0.25, 0.5, 0.25),
        (110.0, 100.0, 0.1),
        (NAN, NAN, 0.0),
        (None, NAN, 0.0),
        (None, 0.0, INF),
        (0.0, NAN, INF),
        (INF, INF, 0.0),
        (INF, -INF, INF),
        (INF, 1.0, INF),
    ],
)
def test_gaps(recorded: float | None, found: float | None, expected: float) -> None:
    assert gap(recorded, found) == pytest.approx(expected)
    row = Row("x").also("here", recorded, found)
    assert (row.compared, row.ok) == (1, expected == 0.0)
    a_N, b_N = (torch.tensor([2.0, NAN if x is None else x], dtype=torch.float64) for x in (recorded, found))
    row = Row("x").also_tokens(a_N, b_N, lambda at: f"token {at}")
    assert row.largest == pytest.approx(expected)
    assert row.compared == 2
    assert row.worst is None if expected == 0 else row.worst.where == "token 1"


def test_arrays_of_other_lengths_and_of_none() -> None:
    row = Row("x").also_tokens(torch.zeros(3), torch.zeros(4), str)
    assert (row.ok, row.worst) == (False, ("the number of values", 3, 4))
    assert Row("x").also_tokens(torch.zeros(0), torch.zeros(0), str) == Row("x")
    row = Row("x").also_tokens(torch.tensor([True, False]), torch.tensor([True, True]), str)
    assert row.largest == 1.0


def test_the_largest_gap_is_kept() -> None:
    row = Row("x", tolerance=0.1).also("a", 0.0, 0.05).also("b", 0.0, 0.08).also("c", 0.0, 0.01)
    assert (row.compared, row.worst.where, row.ok) == (3, "b", True)
    assert not row.also("d", 0.0, 0.11).ok


def test_records_differ_in_texts_fields_and_lengths() -> None:
    old = {"a": [1, {"b": "x"}], "n": 1.0, "t": True, "d": 3.0}
    new = {"a": [1, {"b": "y"}, 2], "n": 1.0 + 1e-12, "t": 1, "e": None}
    found = {d.where: (d.recorded, d.found) for d in differences(old, new, "it", frozenset({"d"}))}
    assert found == {"it, a 1, b": ("x", "y"), "it, a 2": ("(absent)", 2), "it, e": ("(absent)", None)}
    assert Row("x").also_record("it", old, old).ok
    assert Row("x").also_record("it", old, new).worst.where == "it, a 1, b"
