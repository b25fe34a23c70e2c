"""Block sizes of the Triton kernels: a table, with reasons. The same call always takes the same sizes.

`choose_blocks` is the table. `fastest` times candidates instead, if the user switched that on
(`locant.attention.triton.autotune`): sizes then depend on the machine, and with them the last bits of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple


class Blocks(NamedTuple):
    """The size of a tile, and how many warps compute it with how many stages of loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


INTERPRETED = Blocks(16, 16, 1, 1)
"""The interpreter has no registers to run out of. Small tiles test the edges of tiles on short sequences."""

CANDIDATES = (
    Blocks(128, 64, 8, 2), Blocks(128, 64, 4, 2), Blocks(64, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2),
    Blocks(32, 32, 4, 2), Blocks(32, 32, 2, 2),
)  # fmt: skip
"""What `fastest` tries. A kernel with scratch memory has one stage, whatever is written here."""


def choose_blocks(width: int, vectors: bool, itemsize: int, capability: int, backward: bool) -> Blocks:
    """The sizes for a kernel.

    width       the larger one of the head sizes of keys and values.
    vectors     whether a table of vectors or a vector gain is used.
    itemsize    bytes per number of q and k.
    capability  80 for compute capability 8.0, and so on.

    Two thirds of a tile's registers are its logits, BM · BN, and its accumulators, BM · width. So tiles shrink with the
    width, with the size of a number, and in the backward pass, which holds three tiles of logits at a time. A table of
    vectors also holds products with a band, twice as wide as a tile. Forward, queries are twice as many as keys,
    because each loaded key then serves more of them. Eight warps share a tile: with four, a bias spilled registers. Two
    stages load the next keys while a tile is computed; in the backward pass this spilled registers.

    Before compute capability 9.0 the operands of products are in registers too, and tiles are smaller for that.
    """
    registers = capability < 90 and (vectors or backward)
    if registers or (vectors and backward) or width > 128 or itemsize == 4:
        return Blocks(32, 32, 8, 1)
    if vectors or backward:
        return Blocks(64, 64, 8, 1)
    return Blocks(128, 64, 8, 2)


_fastest: dict[Hashable, Blocks] = {}


def fastest(key: Hashable, seconds: Callable[[Blocks], float | None]) -> Blocks:
    """The candidate that takes the least time for a kind of call; measured once for each key.

    `seconds` returns None for sizes that do not fit on the device.
    """
    if key not in _fastest:
        found = {blocks: time for blocks in CANDIDATES if (time := seconds(blocks)) is not None}
        if not found:
            raise RuntimeError("no block size of locant.attention.triton.blocks.CANDIDATES fits on this device")
        _fastest[key] = min(found, key=lambda blocks: found[blocks])
    return _fastest[key]
