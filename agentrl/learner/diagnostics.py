"""How well the critic foresees: explained variance, overall and turn by turn, and calibration against outcomes.

Nothing here reaches a gradient. A figure that is not defined is NaN and never an error. Flat arrays as in `advantages`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_RETURN_VARIANCE = 1e-6
"""Below this variance of the returns, explained variance says nothing and is NaN."""
MIN_TURN_TOKENS = 16
"""A turn index with fewer tokens gets no figure of its own."""
MAX_TURNS = 8
"""Turn indices from 0 that get a figure of their own."""
MAX_BINS = 10
"""Bins of a calibration table."""
MIN_BIN = 8
"""Values that a calibration bin should hold: there are fewer bins where there are fewer values."""


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Turn starts with like values, and what came of them.

    Attributes:
        low: Least value in the bin, reward units.
        high: Largest.
        n: Turn starts.
        value: Mean value.
        outcome: Mean return from there on.
    """

    low: float
    high: float
    n: int
    value: float
    outcome: float


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """Share of the variance of the returns that the values explain: 1 - Var(R - V) / Var(R).

    Returns:
        1 for perfect values, 0 for a constant, below 0 for worse than a constant, NaN where the returns hardly vary.
    """
    if returns_N.numel() < 2:
        return math.nan
    variance = float(returns_N.double().var())
    if not variance >= MIN_RETURN_VARIANCE:
        return math.nan
    return 1.0 - float((returns_N.double() - values_N.double()).var()) / variance


def explained_by_turn(values_N: Tensor, returns_N: Tensor, turn_id_N: Tensor) -> dict[int, float]:
    """Explained variance among the tokens of each turn index below MAX_TURNS that has MIN_TURN_TOKENS of them.

    A critic that only knows how far an episode has come explains variance overall and none here.
    """
    found = {}
    for turn in range(MAX_TURNS):
        here_N = turn_id_N == turn
        if int(here_N.sum()) >= MIN_TURN_TOKENS:
            found[turn] = explained_variance(values_N[here_N], returns_N[here_N])
    return found


def calibration_table(values_K: Tensor, outcomes_K: Tensor) -> list[CalibrationBin]:
    """Sorts values into bins of about equal counts and compares each bin's mean with the mean of what came of it.

    Args:
        values_K: Values at turn starts, finite.
        outcomes_K: Return realised from there on, of episodes that came to their end.

    Returns:
        At most MAX_BINS bins by rising value; equal values share one. Empty where there are no values.
    """
    values_K, outcomes_K = values_K.double(), outcomes_K.double()
    n_bins = max(1, min(MAX_BINS, values_K.numel() // MIN_BIN))
    if not values_K.numel():
        return []
    sorted_K = values_K.sort().values
    below_K, up_to_K = (torch.searchsorted(sorted_K, values_K, right=right) for right in (False, True))
    bin_K = (below_K + up_to_K) * n_bins // (2 * values_K.numel())  # By the middle of the ranks that equal values have.
    table = []
    for index in range(n_bins):
        value_K, outcome_K = values_K[bin_K == index], outcomes_K[bin_K == index]
        if value_K.numel():
            ends = float(value_K.min()), float(value_K.max())
            table.append(CalibrationBin(*ends, value_K.numel(), float(value_K.mean()), float(outcome_K.mean())))
    return table


def calibration_error(table: Sequence[CalibrationBin]) -> float:
    """Expected calibration error: mean over values of |mean value - mean outcome| of their bin, reward units.

    Returns:
        0 for a critic that is right on average wherever it says the same; NaN for an empty table.

    Source: Naeini et al., AAAI 2015, with returns in the place of labels.
    """
    n = sum(each.n for each in table)
    return sum(each.n * abs(each.value - each.outcome) for each in table) / n if n else math.nan
