"""Comparing what was recorded with what is found: numbers with their place, and records field by field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from agentrl.types import JSON

SAME_NUMBER = 1e-9
"""Largest gap between two float64 results of the same arithmetic: absolute below 1, relative above."""


class Difference(NamedTuple):
    """Two values that should be equal.

    Attributes:
        where: Place in the episode or record, in words.
        recorded: What the run directory holds.
        found: What the replay gives; None where there is nothing.
    """

    where: str
    recorded: JSON
    found: JSON


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of quantity, compared.

    Attributes:
        what: Its name.
        compared: How many values.
        largest: The largest gap, absolute below 1 and relative above; infinite where one side has no number.
        tolerance: The largest gap that is allowed.
        worst: Where that gap is, and the two values; None where nothing differs at all.
    """

    what: str
    compared: int = 0
    largest: float = 0.0
    tolerance: float = SAME_NUMBER
    worst: Difference | None = None

    @property
    def ok(self) -> bool:
        """Whether every gap is allowed."""
        return self.largest <= self.tolerance

    def also(self, where: str, recorded: float | None, found: float | None) -> Self:
        """The row with one more pair of numbers; None stands for a number that is not finite, as in JSON."""
        return self._joined(1, gap(recorded, found), Difference(where, recorded, found))

    def also_tokens(self, recorded_N: npt.ArrayLike, found_N: npt.ArrayLike, place: Callable[[int], str]) -> Self:
        """The row with two arrays of equal length.

        Args:
            recorded_N: Floats or booleans; tensors of the CPU will do.
            found_N: The same.
            place: Says where a place in the arrays is.
        """
        a_N, b_N = np.asarray(recorded_N, dtype=np.float64), np.asarray(found_N, dtype=np.float64)
        if a_N.shape != b_N.shape:
            return self._joined(1, math.inf, Difference("the number of values", a_N.size, b_N.size))
        if not a_N.size:
            return self
        with np.errstate(invalid="ignore"):
            gap_N = np.abs(a_N - b_N) / np.maximum(np.abs(b_N), 1.0)
        gap_N[np.isnan(gap_N)] = math.inf
        gap_N[(a_N == b_N) | (np.isnan(a_N) & np.isnan(b_N))] = 0.0
        at = int(gap_N.argmax())
        return self._joined(a_N.size, float(gap_N[at]), Difference(place(at), float(a_N[at]), float(b_N[at])))

    def also_record(self, where: str, recorded: JSON, found: JSON) -> Self:
        """The row with two JSON values, field by field; a text, flag or field that differs is an infinite gap."""
        row = self
        for pair, size in _leaves(recorded, found, where):
            row = row._joined(1, size, pair)
        return row

    def as_dict(self) -> dict[str, JSON]:
        """JSON-able."""
        worst = None if self.worst is None else self.worst._asdict()
        numbers = {"compared": self.compared, "largest": self.largest, "tolerance": self.tolerance}
        return {"what": self.what, **numbers, "ok": self.ok, "worst": worst}

    def _joined(self, n: int, size: float, pair: Difference) -> Self:
        if size > self.largest:
            return replace(self, compared=self.compared + n, largest=size, worst=pair)
        return replace(self, compared=self.compared + n)


def gap(recorded: float | None, found: float | None) -> float:
    """How far two numbers are apart: absolute below 1, relative above; 0 for two that are not finite in one way."""
    a, b = (math.nan if value is None else float(value) for value in (recorded, found))
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    size = abs(a - b) / max(1.0, abs(b))
    return size if math.isfinite(size) else math.inf


def differences(recorded: JSON, found: JSON, where: str, ignored: frozenset[str] = frozenset()) -> list[Difference]:
    """Every place where two JSON values differ; numbers may by `SAME_NUMBER`.

    Args:
        recorded: As it was.
        found: As it is.
        where: Name of the whole.
        ignored: Fields that are not compared, wherever they stand.
    """
    return [pair for pair, size in _leaves(recorded, found, where, ignored) if size > SAME_NUMBER]


_ABSENT = "(absent)"


def _leaves(
    recorded: JSON, found: JSON, where: str, ignored: frozenset[str] = frozenset()
) -> Iterator[tuple[Difference, float]]:
    """Each pair of leaves, and how far its two values are apart."""
    if isinstance(recorded, Mapping) and isinstance(found, Mapping):
        for key in [*recorded, *(key for key in found if key not in recorded)]:
            if key not in ignored:
                inner = (recorded.get(key, _ABSENT), found.get(key, _ABSENT))
                yield from _leaves(*inner, f"{where}, {key}", ignored)
    elif _is_list(recorded) and _is_list(found):
        for i in range(max(len(recorded), len(found))):
            inner = (recorded[i] if i < len(recorded) else _ABSENT, found[i] if i < len(found) else _ABSENT)
            yield from _leaves(*inner, f"{where} {i}", ignored)
    elif _is_number(recorded) and _is_number(found):
        yield Difference(where, recorded, found), gap(recorded, found)
    else:
        yield Difference(where, recorded, found), 0.0 if recorded == found else math.inf


def _is_list(value: JSON) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_number(value: JSON) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
