"""Random draws that are the same on every machine and every Python from 3.11 on."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def number_of(*key: str | int) -> int:
    """A 64-bit number that depends on the key alone (not on PYTHONHASHSEED)."""
    text = "\x1f".join(str(part) for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Draws:
    """A stream of draws, fixed by its key.

    It is built on `random.Random.random` alone, because that is the only method of the module whose sequence Python
    promises never to change: frozen splits depend on it.

    Args:
        key: Names and numbers that the stream depends on.
    """

    def __init__(self, *key: str | int) -> None:
        self._random = random.Random(number_of(*key)).random

    def unit(self) -> float:
        """A number in [0, 1)."""
        return self._random()

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random() < probability

    def below(self, n: int) -> int:
        """A whole number in 0..n-1."""
        return int(self._random() * n)

    def between(self, low: int, high: int) -> int:
        """A whole number in low..high, both included."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, items: Sequence[T]) -> T:
        """One of the items, each as likely."""
        return items[int(self._random() * len(items))]

    def sample(self, items: Sequence[T], n: int) -> list[T]:
        """N different items in random order; all of them, shuffled, where there are no more than n."""
        pool = list(items)
        taken = min(n, len(pool))
        for i in range(taken):
            j = i + int(self._random() * (len(pool) - i))
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:taken]
