"""The Gymnasium space of messages."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
from gymnasium import Space

_SAMPLE_LENGTH = 40
_SAMPLE_CHARACTERS = string.ascii_letters + string.digits + " .,:;(){}\"'`<>\n"


class TextSpace(Space[str]):
    """Any text of at most `max_length` characters, the empty one included.

    `gymnasium.spaces.Text` has a fixed set of characters, by default without space and newline, so that it holds no
    message that a model or a tool writes.
    """

    def __init__(self, max_length: int = 2**24, seed: int | np.random.Generator | None = None) -> None:
        """Makes the space.

        Args:
            max_length: Longest text, characters.
            seed: Of the samples.
        """
        self.max_length = max_length
        super().__init__(shape=None, dtype=str, seed=seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A short random text.

        Args:
            mask: Not taken; here for the signature of Gymnasium.
            probability: Not taken either.

        Raises:
            ValueError: If a mask or a probability is given.
        """
        if mask is not None or probability is not None:
            raise ValueError("TextSpace.sample takes neither a mask nor a probability: leave them out.")
        length = int(self.np_random.integers(min(_SAMPLE_LENGTH, self.max_length) + 1))
        picks = self.np_random.integers(len(_SAMPLE_CHARACTERS), size=length)
        return "".join(_SAMPLE_CHARACTERS[i] for i in picks)

    def contains(self, x: Any) -> bool:
        """Whether it is a text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    @property
    def is_np_flattenable(self) -> bool:
        """Texts have no fixed-size array."""
        return False

    def __repr__(self) -> str:
        return f"TextSpace({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace) and self.max_length == other.max_length

    def __hash__(self) -> int:
        return hash((TextSpace, self.max_length))
