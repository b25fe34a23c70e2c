"""Block sizes of the Triton kernels: a table, with reasons. The same call always takes the same sizes."""

from __future__ import annotations

from typing import NamedTuple


class Blocks(NamedTuple):
    """The size of a tile, and how many warps compute it with how many stages of loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


INTERPRETED = Blocks(16, 16, 1, 1)
"""The interpreter has no registers to run out of. Small tiles test the edges of tiles on short sequences."""


def choose_blocks(width: int, vectors: bool, itemsize: int, capability: int, backward: bool) -> Blocks:
    """The sizes for a kernel.

    width       the larger one of the head sizes of keys and values.
    vectors     whether a table of vectors or a vector gain is used.
    itemsize    bytes per number of q and k.
    capability  80 for compute capability 8.0, and so on.
    """
    side = 64 if width <= 128 and itemsize == 2 else 32
    if vectors or backward:
        return Blocks(side, side, 8 if vectors or width > 64 else 4, 2)
    return Blocks(2 * side, side, 8 if width > 64 else 4, 2)
