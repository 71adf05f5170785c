"""Seeds that follow from names and numbers, so that nothing random depends on an order or on a global state."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 31-bit seed that depends on every part and on nothing else."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
