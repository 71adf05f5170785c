"""How the benchmarks measure: CPU seconds of this process, rounds that take turns, medians of ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds that one call takes, all threads together."""
    began = time.process_time()
    work()
    return time.process_time() - began


def interleaved(works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each work by round, so that a machine that slows down slows all of them.

    Args:
        works: By name; each is called once before the clock starts.
        repeats: Rounds.
    """
    for work in works.values():
        work()
    took: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            took[name].append(cpu_s(work))
    return took


def times_as_fast(slow_s: Sequence[float], fast_s: Sequence[float]) -> str:
    """The median of the rounds' ratios, with the lowest and the highest."""
    ratios = [slow / fast for slow, fast in zip(slow_s, fast_s, strict=True)]
    return f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds)"
