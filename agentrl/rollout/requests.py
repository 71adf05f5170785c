"""What a collector asks of a policy that samples tokens for many episodes at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from agentrl.errors import PolicyError
from agentrl.types import Generation, Sampling


class ContextFullError(PolicyError):
    """The conversation is longer than the model's context: the episode ends as CONTEXT_FULL, which is no error."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One assistant message to be sampled.

    Attributes:
        episode: Names the episode, so that its keys and values can be kept from turn to turn.
        token_ids: [T] the whole trajectory so far, generation prompt included.
        sampling: How to draw.
        noise_key: What the draws depend on besides the distribution: equal keys give equal draws, whatever else is in
            the batch.
    """

    episode: str
    token_ids: Sequence[int]
    sampling: Sampling
    noise_key: tuple[int | str, ...]


class BatchPolicy(Protocol):
    """A TokenPolicy that samples for many episodes in lock-step."""

    def generate_batch(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Samples one message for each request, in their order."""

    def release(self, episode: str) -> None:
        """Forgets what is kept for an episode that has ended."""


def draws(noise_key: tuple[int | str, ...], n: int) -> npt.NDArray[np.float64]:
    """The uniform numbers that a message is drawn with, one a token.

    Args:
        noise_key: What they depend on.
        n: How many.

    Returns:
        [n] float64 in [0, 1), multiples of 2^-32: their product with a sum stays below the sum after rounding.
    """
    digest = hashlib.sha256(repr(noise_key).encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return np.asarray(generator.integers(0, 2**32, size=n) * 2.0**-32, dtype=np.float64)
