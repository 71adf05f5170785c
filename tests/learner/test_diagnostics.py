"""Figures of the critic by hand: explained variance, by turn too, and calibration against outcomes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from agentrl.learner.diagnostics import (
    MAX_BINS,
    MIN_BIN,
    MIN_TURN_TOKENS,
    CalibrationBin,
    calibration_error,
    calibration_table,
    explained_by_turn,
    explained_variance,
)

F64 = torch.float64


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((4,), 9.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    # Var(R) = 5/3; R - V = (-1, 0, 1, 0) has variance 2/3: 1 - 2/5.
    assert explained_variance(torch.tensor([1.0, 1.0, 1.0, 3.0]), returns) == pytest.approx(0.6)


def test_explained_variance_is_not_defined_where_returns_hardly_vary():
    assert math.isnan(explained_variance(torch.rand(4), torch.ones(4)))
    assert math.isnan(explained_variance(torch.rand(4), torch.ones(4) + 1e-4 * torch.tensor([1.0, -1.0, 1.0, -1.0])))
    assert math.isnan(explained_variance(torch.ones(1), torch.ones(1)))
    assert math.isnan(explained_variance(torch.zeros(0), torch.zeros(0)))
    assert math.isnan(explained_variance(torch.zeros(2), torch.tensor([math.nan, 1.0])))


def test_a_critic_that_only_knows_how_far_an_episode_is_explains_nothing_inside_a_turn():
    """Turn 0 earns 0 or 2 in turns, turn 1 earns 10 or 12; the critic says 1 and 11. Turn 2 has a token too few."""
    n = MIN_TURN_TOKENS
    turns = torch.tensor([0] * n + [1] * n + [2] * (n - 1) + [9] * n)
    returns = torch.tensor([0.0, 2.0] * (n // 2) + [10.0, 12.0] * (n // 2) + [5.0] * (n - 1) + [1.0, 3.0] * (n // 2))
    values = torch.where(turns == 0, 1.0, torch.where(turns == 1, 11.0, 5.0))
    found = explained_by_turn(values, returns, turns)
    assert found == {0: pytest.approx(0.0), 1: pytest.approx(0.0)}
    assert explained_variance(values[: 2 * n], returns[: 2 * n]) > 0.95
    assert explained_by_turn(torch.zeros(n), torch.ones(n), torch.zeros(n)) == {0: pytest.approx(math.nan, nan_ok=True)}


def test_calibration_by_hand():
    """Two bins of 8: values 0 came to .25, values 1 came to .5, so the error is (8 * .25 + 8 * .5) / 16."""
    values = torch.tensor([0.0, 1.0] * MIN_BIN, dtype=F64)
    outcomes = torch.tensor([0.0, 0.0, 0.5, 1.0] * (MIN_BIN // 2), dtype=F64)
    table = calibration_table(values, outcomes)
    assert table == [CalibrationBin(0.0, 0.0, 8, 0.0, 0.25), CalibrationBin(1.0, 1.0, 8, 1.0, 0.5)]
    assert calibration_error(table) == pytest.approx(0.375)
    unequal = calibration_table(torch.tensor([0.0] * 4 + [1.0] * 12), torch.ones(16))
    assert [each.n for each in unequal] == [4, 12]
    # Bins of unequal counts weigh as their counts.
    assert calibration_error([CalibrationBin(0, 0, 3, 0.0, 1.0), CalibrationBin(1, 1, 1, 1.0, 1.0)]) == 0.75


def test_equal_values_share_a_bin_and_the_order_of_values_does_not_matter():
    constant = calibration_table(torch.full((100,), 0.5), torch.tensor([0.0, 1.0] * 50))
    assert constant == [CalibrationBin(0.5, 0.5, 100, 0.5, 0.5)]
    values, outcomes = torch.arange(100.0, dtype=F64), torch.arange(100.0, dtype=F64) + 2.0
    table = calibration_table(values, outcomes)
    assert len(table) == MAX_BINS
    assert sum(each.n for each in table) == 100
    assert all(each.n == 10 for each in table)
    assert all(below.high < above.low for below, above in itertools.pairwise(table))
    assert calibration_error(table) == pytest.approx(2.0)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert calibration_table(values[order], outcomes[order]) == table


def test_calibration_of_few_values_uses_fewer_bins_and_of_none_is_not_defined():
    """Fifteen values are one bin: over a single value an error would be the noise of its outcome."""
    (only,) = calibration_table(torch.arange(15.0), torch.zeros(15))
    assert (only.n, only.value, only.outcome) == (15, 7.0, 0.0)
    assert calibration_error(calibration_table(torch.ones(1), torch.zeros(1))) == 1.0
    assert calibration_table(torch.zeros(0), torch.zeros(0)) == []
    assert math.isnan(calibration_error([]))
