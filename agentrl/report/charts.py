"""Charts as inline SVG: drawn here, so that a report reads without a script; the script only adds the readout."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

Value = float | None

_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 8, 22
_MOST_POINTS = 400
_SMOOTHED_OVER = 16
"""The running mean takes this part of a line."""
SLOTS = 8
"""Colours for series; a ninth would not be told apart."""


@dataclass(frozen=True)
class Series:
    """A named line: one value for each iteration, None where there is none."""

    name: str
    values: Sequence[Value]

    @property
    def last(self) -> Value:
        """The newest value."""
        return next((value for value in reversed(self.values) if value is not None), None)


class Legend(NamedTuple):
    """One entry of a chart's legend."""

    name: str
    slot: int
    last: str


@dataclass(frozen=True)
class Chart:
    """What the template places: title, drawing, legend, and the numbers behind them for the readout."""

    title: str
    svg: Markup
    legend: tuple[Legend, ...]
    data: str


class _Frame:
    """Maps iterations and values to places in the drawing."""

    def __init__(self, iterations: Sequence[int], low: float, high: float) -> None:
        self.ticks = nice_ticks(low, high)
        self.low, self.high = min(low, self.ticks[0]), max(high, self.ticks[-1])
        self.first, self.last = iterations[0], iterations[-1]

    def x(self, iteration: float) -> float:
        span = (self.last - self.first) or 1
        return _LEFT + (iteration - self.first) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _TOP + (self.high - value) / (self.high - self.low) * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self, percent: bool) -> str:
        parts = []
        for tick in self.ticks:
            y = _place(self.y(tick))
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y}" dy="0.32em" text-anchor="end">')
            parts.append(f"{readable(tick, percent)}</text>")
        for tick in sorted({self.first, (self.first + self.last) // 2, self.last}):
            anchor = "start" if tick == self.first else "end" if tick == self.last else "middle"
            x = _place(self.x(tick))
            parts.append(f'<text class="tick" x="{x}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{tick}</text>')
        return "".join(parts)


def line_chart(title: str, iterations: Sequence[int], series: Sequence[Series], *, percent: bool = False) -> Chart:
    """Lines over iterations; long ones are drawn faint, with their running mean on top.

    Args:
        title: What they show.
        iterations: The x of each value.
        series: At most `SLOTS` of them are drawn.
        percent: Whether values are shares.
    """
    series = series[:SLOTS]
    iterations, series = _thinned(iterations, series)
    seen = [value for line in series for value in line.values if value is not None]
    low, high = (0.0, 1.0) if percent or not seen else (min(seen), max(seen))
    frame = _Frame(iterations, low, high)
    parts = [frame.axes(percent)]
    window = len(iterations) // _SMOOTHED_OVER
    for slot, line in enumerate(series):
        if window > 1:
            parts.append(f'<path class="line faint s{slot}" d="{_path(frame, iterations, line.values)}"/>')
        parts.append(f'<path class="line s{slot}" d="{_path(frame, iterations, running_mean(line.values, window))}"/>')
        ends = [(x, y) for x, y in zip(iterations, line.values, strict=True) if y is not None][-1:]
        parts += [_dot(frame, x, y, slot) for x, y in ends]
    return _chart(title, iterations, series, parts, percent)


def stacked_chart(title: str, iterations: Sequence[int], series: Sequence[Series]) -> Chart:
    """Shares that add up to one, stacked; beyond `SLOTS` series the smallest are drawn together."""
    iterations, series = _thinned(iterations, _with_rest(series))
    frame = _Frame(iterations, 0.0, 1.0)
    floor = [0.0] * len(iterations)
    parts = [frame.axes(percent=True)]
    for slot, line in enumerate(series):
        top = [low + (value or 0.0) for low, value in zip(floor, line.values, strict=True)]
        if len(iterations) == 1:
            outline = [(0.0, top[0]), (1.0, top[0]), (1.0, floor[0]), (0.0, floor[0])]
            places = [(_LEFT + x * (_WIDTH - _LEFT - _RIGHT), frame.y(y)) for x, y in outline]
        else:
            places = [(frame.x(x), frame.y(y)) for x, y in zip(iterations, top, strict=True)]
            places += [(frame.x(x), frame.y(y)) for x, y in zip(reversed(iterations), reversed(floor), strict=True)]
        d = "L".join(f"{_place(x)} {_place(y)}" for x, y in places)
        parts.append(f'<path class="area s{slot}" d="M{d}Z"/>')
        floor = top
    return _chart(title, iterations, series, parts, percent=True)


def interval_bar(low: float, value: float, high: float, *, around_zero: bool = False) -> Markup:
    """A value with its interval on a scale from 0 to 1, or from -1 to 1 with 0 in the middle."""
    width, height = 160, 16
    bottom = -1.0 if around_zero else 0.0
    places = [
        _place(4 + (edge - bottom) / (1 - bottom) * (width - 8)) for edge in (max(low, bottom), value, min(high, 1))
    ]
    zero = _place(4 + (0 - bottom) / (1 - bottom) * (width - 8))
    svg = (
        f'<svg class="interval" viewBox="0 0 {width} {height}" width="{width}" height="{height}" aria-hidden="true">'
        f'<line class="grid" x1="4" x2="{width - 4}" y1="8" y2="8"/>'
        f'<line class="axis" x1="{zero}" x2="{zero}" y1="2" y2="14"/>'
        f'<line class="reach" x1="{places[0]}" x2="{places[2]}" y1="8" y2="8"/>'
        f'<circle class="dot s0" cx="{places[1]}" cy="8" r="4"/></svg>'
    )
    return Markup(svg)  # noqa: S704 (numbers of ours alone)


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that cover a range, about `count` steps apart; a flat range is widened."""
    if high - low < 1e-12 * max(1.0, abs(low), abs(high)):
        reach = abs(low) * 0.1 or 1.0
        low, high = low - reach, high + reach
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def running_mean(values: Sequence[Value], window: int) -> list[Value]:
    """Each value's mean with those around it, `window` in all; fewer at the ends, none where there is no value."""
    reach = max(0, window // 2)
    means: list[Value] = []
    for index, value in enumerate(values):
        near = [v for v in values[max(0, index - reach) : index + reach + 1] if v is not None]
        means.append(None if value is None else sum(near) / len(near))
    return means


def readable(value: Value, percent: bool = False) -> str:
    """A number as short as it can be read."""
    if value is None:
        return "-"
    return f"{100 * value:.3g} %" if percent else f"{value:.4g}"


def _chart(title: str, iterations: Sequence[int], series: Sequence[Series], parts: list[str], percent: bool) -> Chart:
    data = {
        "x": list(iterations),
        "left": _LEFT / _WIDTH,
        "right": 1 - _RIGHT / _WIDTH,
        "percent": percent,
        "series": [{"name": s.name, "y": [None if v is None else float(f"{v:.4g}") for v in s.values]} for s in series],
    }
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}<line class="cross" y1="{_TOP}" '
    svg += f'y2="{_HEIGHT - _BOTTOM}"/></svg>'
    legend = tuple(Legend(line.name, slot, readable(line.last, percent)) for slot, line in enumerate(series))
    return Chart(title, Markup(svg), legend, json.dumps(data))  # noqa: S704 (numbers of ours alone)


def _path(frame: _Frame, iterations: Sequence[int], values: Sequence[Value]) -> str:
    parts, pen = [], "M"
    for x, y in zip(iterations, values, strict=True):
        if y is None:
            pen = "M"
            continue
        parts.append(f"{pen}{_place(frame.x(x))} {_place(frame.y(y))}")
        pen = "L"
    return "".join(parts)


def _dot(frame: _Frame, x: int, y: float, slot: int) -> str:
    return f'<circle class="dot s{slot}" cx="{_place(frame.x(x))}" cy="{_place(frame.y(y))}" r="3"/>'


def _place(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _thinned(iterations: Sequence[int], series: Sequence[Series]) -> tuple[list[int], list[Series]]:
    """At most `_MOST_POINTS` iterations, evenly taken, the last one among them."""
    stride = math.ceil(len(iterations) / _MOST_POINTS)
    keep = range((len(iterations) - 1) % stride, len(iterations), stride)
    return [iterations[i] for i in keep], [Series(line.name, [line.values[i] for i in keep]) for line in series]


def _with_rest(series: Sequence[Series]) -> list[Series]:
    if len(series) <= SLOTS:
        return list(series)
    by_size = sorted(series, key=lambda line: -sum(value or 0.0 for value in line.values))
    rest = [
        sum(value or 0.0 for value in values) for values in zip(*(s.values for s in by_size[SLOTS - 1 :]), strict=True)
    ]
    return [*by_size[: SLOTS - 1], Series("other", rest)]
