"""Distances over which the heads of a decaying scheme (`fox`, `fade`) first decay: from 16 to 1,024 tokens."""

from __future__ import annotations

SHORTEST, LONGEST = 16, 1024
"""Tokens after which the decay of the first and of the last head is 1/e."""


def decay_lengths(n_heads: int) -> list[float]:
    """Returns one distance per head, from `SHORTEST` to `LONGEST` in equal ratios."""
    ratio = LONGEST / SHORTEST
    return [SHORTEST * ratio ** (head / max(1, n_heads - 1)) for head in range(n_heads)]
