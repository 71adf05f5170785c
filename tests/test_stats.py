from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.stats import clustered_interval, paired_difference, pass_at_k, wilson_interval


def test_wilson_by_hand() -> None:
    assert wilson_interval(8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-5)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_clustered_interval_by_hand() -> None:
    # Deviations from 0.5 sum to 1, -1 and 0 in the clusters: error sqrt(3/2 * 2) / 6, and t(2) = 4.30265.
    reach = 4.302653 * math.sqrt(3) / 6
    found = clustered_interval([1, 1, 0, 0, 1, 0], ["a", "a", "b", "b", "c", "c"])
    assert found == pytest.approx((0.5 - reach, 0.5 + reach), abs=1e-5)


def test_single_values_give_the_usual_interval() -> None:
    reach = 3.182446 * math.sqrt(5 / 3) / 2
    assert clustered_interval([1, 2, 3, 4], "abcd") == pytest.approx((2.5 - reach, 2.5 + reach), abs=1e-5)


def test_repeating_an_episode_adds_no_certainty() -> None:
    once = clustered_interval([1, 0, 1, 1], "abcd")
    assert clustered_interval([1, 0, 1, 1] * 5, list("abcd") * 5) == pytest.approx(once)


def test_one_cluster_says_nothing() -> None:
    assert clustered_interval([1, 0], "aa") == (-math.inf, math.inf)


def test_paired_difference_by_hand() -> None:
    found = paired_difference([1, 1, 1, 1], [0, 0, 0, 0], "abcd")
    assert (found.mean, found.low, found.high, found.n_clusters) == (1.0, 1.0, 1.0, 4)
    assert found.p_value == 2 / 16
    # Sums +1, +1, -1 over three clusters: |sum| reaches 1 in all of the eight flips.
    assert paired_difference([1, 1, 0], [0, 0, 1], "abc").p_value == 1.0


def test_a_small_p_value_is_drawn_and_never_zero() -> None:
    n = 60
    found = paired_difference([1] * n, [0] * n, range(n), seed=3, n_flips=500)
    assert found.p_value == 1 / 501


def test_the_seed_decides_the_flips() -> None:
    a, b = [0, 1, 1, 0, 1] * 8, [1, 0, 1, 0, 0] * 8
    first = paired_difference(a, b, range(40), seed=1)
    assert paired_difference(a, b, range(40), seed=1) == first
    assert paired_difference(a, b, range(40), seed=2).p_value == pytest.approx(first.p_value, abs=0.02)


def test_drawn_flips_agree_with_all_flips() -> None:
    a, b = [1, 1, 0, 1, 1, 0, 1, 1], [0, 0, 1, 0, 1, 0, 0, 0]
    exact = paired_difference(a, b, range(8)).p_value
    assert paired_difference(a, b, range(8), n_flips=20).p_value == pytest.approx(exact, abs=0.25)
    assert exact == paired_difference(a, b, range(8), n_flips=256).p_value


def test_pairs_are_required() -> None:
    with pytest.raises(ValueError, match="expected pairs"):
        paired_difference([1], [1, 2], "ab")
    with pytest.raises(ValueError, match="expected pairs"):
        paired_difference([], [], "")


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, data: st.DataObject) -> None:
    successes, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * successes + [False] * (n - successes), k))
    assert pass_at_k(n, successes, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_needs_k_attempts() -> None:
    assert pass_at_k(3, 3, 4) is None
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
