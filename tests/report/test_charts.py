from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.report.charts import (
    Series,
    interval_bar,
    line_chart,
    nice_ticks,
    readable,
    running_mean,
    stacked_chart,
)

FINITE = st.floats(-1e12, 1e12)


@given(FINITE, st.floats(0, 1e12))
def test_ticks_are_round_and_cover(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= low + 1e-6 * step
    assert ticks[-1] >= low + span - 1e-6 * step
    assert 2 <= len(ticks) <= 8


def test_ticks_by_hand() -> None:
    assert nice_ticks(0.0, 1.0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert nice_ticks(55.0, 84.0) == [50.0, 60.0, 70.0, 80.0, 90.0]
    assert nice_ticks(3.0, 3.0)[0] < 3.0 < nice_ticks(3.0, 3.0)[-1]


@given(st.lists(st.none() | FINITE, min_size=1, max_size=60), st.booleans())
def test_a_line_chart_is_whole_xml_for_any_values(values: list[float | None], percent: bool) -> None:
    chart = line_chart("a", list(range(len(values))), [Series("x<y>&", values)], percent=percent)
    root = ET.fromstring(str(chart.svg))
    assert root.findall("path")
    assert "nan" not in str(chart.svg)
    assert len(json.loads(chart.data)["series"][0]["y"]) == len(values)


def test_a_gap_breaks_the_line() -> None:
    chart = line_chart("a", [0, 1, 2, 3], [Series("x", [0.0, None, 1.0, 0.5])])
    assert str(chart.svg).count("M") == 2
    assert chart.legend[0].last == "0.5"


def test_long_runs_are_thinned_to_the_last_iteration() -> None:
    chart = line_chart("a", list(range(5000)), [Series("x", [float(i) for i in range(5000)])])
    data = json.loads(chart.data)
    assert len(data["x"]) <= 400
    assert data["x"][-1] == 4999
    assert len(str(chart.svg)) < 15_000


def test_shares_are_stacked_and_the_rest_is_gathered() -> None:
    series = [Series(f"s{i}", [0.1, 0.1]) for i in range(10)]
    chart = stacked_chart("ends", [0, 1], series)
    assert [entry.name for entry in chart.legend][-1] == "other"
    assert chart.legend[-1].last == "30 %"
    assert len(chart.legend) == 8
    assert ET.fromstring(str(stacked_chart("ends", [4], series).svg)) is not None


def test_the_running_mean_by_hand() -> None:
    assert running_mean([1.0, 2.0, None, 6.0], 3) == [1.5, 1.5, None, 6.0]
    assert running_mean([1.0, 2.0], 0) == [1.0, 2.0]


def test_an_interval_is_drawn_inside_its_scale() -> None:
    bar = ET.fromstring(str(interval_bar(-3.0, 0.5, 3.0)))
    reach = next(line for line in bar.findall("line") if line.get("class") == "reach")
    assert (reach.get("x1"), reach.get("x2")) == ("4", "156")
    middle = ET.fromstring(str(interval_bar(-0.1, 0.0, 0.1, around_zero=True))).find("circle")
    assert middle is not None
    assert middle.get("cx") == "80"


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "-"), (0.123456, "0.1235"), (1e-9, "1e-09"), (12345.6, "1.235e+04")]
)
def test_numbers_are_short(value: float | None, expected: str) -> None:
    assert readable(value) == expected
    assert readable(0.5, percent=True) == "50 %"
