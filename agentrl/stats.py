"""Intervals and tests that can be trusted with a few hundred episodes. Pure functions; scipy is imported when called.

Episodes of one task are not independent, so means are given with an interval clustered by task, and two policies are
compared task by task (Miller, arXiv:2411.00640). Shapes: `_B` episode.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """Both ends of a confidence interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The mean of a - b over tasks that both did.

    Attributes:
        mean: a - b.
        low: Lower end of the interval.
        high: Upper end of the interval.
        p_value: Two-sided, of a sign-flip permutation test over clusters.
        n_clusters: Tasks compared.
    """

    mean: float
    low: float
    high: float
    p_value: float
    n_clusters: int


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a share, for independent episodes; (0, 1) where there are none."""
    if n == 0:
        return Interval(0.0, 1.0)
    from scipy.stats import binomtest

    found = binomtest(successes, n).proportion_ci(confidence_level=confidence, method="wilson")
    return Interval(float(found.low), float(found.high))


def clustered_interval(values_B: Sequence[float], clusters_B: Sequence[Hashable], confidence: float = 0.95) -> Interval:
    """Interval of a mean whose values come in clusters, by the clustered standard error and Student's t.

    The standard error is sqrt(G / (G - 1) * sum over clusters of (sum of its deviations)^2) / B, with G clusters and
    G - 1 degrees of freedom. With one value in each cluster it is the usual interval of a mean.

    Args:
        values_B: The values.
        clusters_B: The cluster (task) of each.
        confidence: Coverage.

    Returns:
        The interval; infinite with fewer than two clusters, and of width 0 where all values are equal.
    """
    values = np.asarray(values_B, dtype=np.float64)
    n_clusters, index_B = _clusters(clusters_B)
    if n_clusters < 2:
        return Interval(-math.inf, math.inf)
    from scipy.stats import t

    mean = float(values.mean())
    sums_G = np.bincount(index_B, weights=values - mean, minlength=n_clusters)
    error = math.sqrt(n_clusters / (n_clusters - 1) * float(sums_G @ sums_G)) / len(values)
    reach = float(t.ppf(0.5 + confidence / 2, n_clusters - 1)) * error
    return Interval(mean - reach, mean + reach)


def paired_difference(
    a_B: Sequence[float], b_B: Sequence[float], clusters_B: Sequence[Hashable], seed: int = 0, n_flips: int = 10_000
) -> PairedDifference:
    """Compares two policies on the same tasks: mean of a - b, clustered interval, permutation p-value.

    Under the null hypothesis the two are exchangeable in each cluster, so that the sign of a cluster's difference is a
    coin flip. All flips are counted where there are at most `n_flips`, else that many are drawn (the observed one
    counts as one of them, so that the p-value is never 0).

    Args:
        a_B: Values of the first policy.
        b_B: Values of the second, in the same order.
        clusters_B: The cluster (task) of each pair.
        seed: Of the flips that are drawn.
        n_flips: Most flips.

    Raises:
        ValueError: If the lengths differ or there is nothing to compare.
    """
    if not len(a_B) == len(b_B) == len(clusters_B) or not len(a_B):
        raise ValueError(f"expected pairs, found {len(a_B)} and {len(b_B)} values in {len(clusters_B)} clusters.")
    differences_B = np.asarray(a_B, dtype=np.float64) - np.asarray(b_B, dtype=np.float64)
    n_clusters, index_B = _clusters(clusters_B)
    interval = clustered_interval(differences_B.tolist(), clusters_B)
    sums_G = np.bincount(index_B, weights=differences_B, minlength=n_clusters).astype(np.float64)
    return PairedDifference(
        mean=float(differences_B.mean()),
        low=interval.low,
        high=interval.high,
        p_value=_flip_test(sums_G, seed, n_flips),
        n_clusters=n_clusters,
    )


def pass_at_k(n: int, successes: int, k: int) -> float | None:
    """Chance that at least one of k attempts drawn from n succeeds, without bias (Chen et al., arXiv:2107.03374).

    Returns:
        1 - C(n - successes, k) / C(n, k), or None where there are fewer than k attempts.
    """
    return None if n < k else 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def _clusters(clusters_B: Sequence[Hashable]) -> tuple[int, npt.NDArray[np.int64]]:
    number: dict[Hashable, int] = {}
    index = [number.setdefault(cluster, len(number)) for cluster in clusters_B]
    return len(number), np.asarray(index, dtype=np.int64)


def _flip_test(sums_G: FloatArray, seed: int, n_flips: int) -> float:
    moving = sums_G[sums_G != 0]
    observed = abs(float(moving.sum()))
    # Sums of the same numbers in another order differ in the last bits: a tie must count as one.
    bar = observed - 1e-9 * max(1.0, observed)
    n = len(moving)
    if 2**n <= n_flips:
        signs = 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float(np.mean(np.abs(signs @ moving) >= bar))
    rng = np.random.default_rng(seed)
    reached = sum(
        int(np.sum(np.abs(rng.choice((-1.0, 1.0), size=(rows, n)) @ moving) >= bar)) for rows in _blocks(n_flips)
    )
    return (reached + 1) / (n_flips + 1)


def _blocks(n: int, size: int = 1000) -> list[int]:
    return [size] * (n // size) + ([n % size] if n % size else [])
