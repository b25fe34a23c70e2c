"""Block sizes of the Triton kernels: a table, with reasons. The same call always takes the same sizes.

`choose_blocks` is the table. `fastest` times candidates instead, if the user switched that on
(`locant.attention.triton.autotune`): sizes then depend on the machine, and with them the last bits of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple


class Blocks(NamedTuple):
    """The size of a tile, how many warps compute it, and how many stages of loads are in flight."""

    queries: int
    keys: int
    warps: int
    stages: int
    again: bool = False
    """Whether every tile loads the rows of its block again. Kept, they and their addresses take up to 60 registers."""


INTERPRETED = Blocks(16, 16, 1, 1)
"""The interpreter has no registers to run out of. Small tiles test the edges of tiles on short sequences."""

SMALLEST = Blocks(16, 16, 8, 1)
"""A matrix product has at least 16 rows and columns."""

CANDIDATES = (
    Blocks(128, 64, 8, 2), Blocks(128, 64, 4, 2), Blocks(64, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2),
    Blocks(32, 32, 4, 2), Blocks(32, 32, 2, 2), Blocks(32, 32, 8, 1, True), Blocks(16, 16, 8, 1),
)  # fmt: skip
"""What `fastest` tries. A kernel with scratch memory has one stage, whatever is written here."""

KINDS = ("numbers", "pairs", "vectors")
"""What a call has: biases, gains and levels at most; also explicit positions, a mask or dropout, which need numbers of
their own for every pair; or tables of vectors or a vector gain."""

TABLE: dict[tuple[int, int], dict[str, tuple[Blocks, Blocks, Blocks]]] = {
    (80, 64): {
        "forward": (Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 1), Blocks(32, 32, 4, 1)),
        "backward_queries": (Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1, True)),
        "backward_keys": (Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1)),
    },
    (90, 64): {
        "forward": (Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 1)),
        "backward_queries": (Blocks(64, 64, 8, 1), Blocks(64, 32, 8, 1), Blocks(32, 32, 8, 1, True)),
        "backward_keys": (Blocks(64, 64, 8, 1), Blocks(32, 64, 8, 1), Blocks(32, 32, 8, 1)),
    },
    (100, 64): {
        "forward": (Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 1), Blocks(64, 64, 8, 1)),
        "backward_queries": (Blocks(64, 64, 8, 1), Blocks(64, 64, 8, 1), Blocks(32, 32, 8, 1)),
        "backward_keys": (Blocks(64, 64, 8, 1), Blocks(64, 64, 8, 1), Blocks(32, 32, 8, 1)),
    },
    (80, 128): {
        "forward": (Blocks(128, 64, 8, 2), Blocks(64, 32, 8, 1), Blocks(32, 32, 8, 1)),
        "backward_queries": (Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1, True)),
        "backward_keys": (Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1)),
    },
    (90, 128): {
        "forward": (Blocks(128, 64, 8, 2), Blocks(64, 32, 8, 1), Blocks(32, 32, 8, 1)),
        "backward_queries": (Blocks(64, 32, 8, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1, True)),
        "backward_keys": (Blocks(32, 64, 8, 1), Blocks(32, 64, 8, 1), Blocks(32, 32, 8, 1, True)),
    },
    (100, 128): {
        "forward": (Blocks(64, 64, 8, 2), Blocks(64, 32, 8, 1), Blocks(32, 32, 8, 1)),
        "backward_queries": (Blocks(64, 64, 8, 1), Blocks(64, 64, 8, 1), Blocks(32, 32, 8, 1, True)),
        "backward_keys": (Blocks(32, 64, 8, 1), Blocks(32, 64, 8, 1), Blocks(32, 32, 8, 1, True)),
    },
}  # fmt: skip
"""By compute capability and head size, then by kernel: the blocks for each of `KINDS`.

They are the largest tiles that spilled no registers in the configurations of `resources.CONFIGURATIONS`. docs/gpu.md
lists the exceptions, most of them vectors at a head size of 128. There 16 × 16 tiles with eight
warps spilled nothing, but they are four times as many, and their warps would compute the same numbers.

- Two thirds of a tile's registers are its logits, BM · BN, and its accumulators, BM · width. So tiles shrink with the
  width and in the backward pass, which holds three tiles of logits at a time. A table of vectors also holds products
  with a band, twice as wide as a tile.
- Forward, queries are twice as many as keys where they fit, because each loaded key then serves more of them. By keys
  it is the other way round.
- Eight warps share a tile: with four, a bias spilled registers. The exceptions are small tiles: with eight warps the
  compiler spills a few registers of a thread on purpose, down to 128, so that two programs run at a time; with four
  warps it need not.
- Two stages load the next keys while a tile is computed. In the backward pass this spilled registers.
- At capability 8.0 the operands of products are in registers too, and tiles are smaller for that. At 9.0 and 10.0 the
  tensor cores read operands from shared memory if a tile has 64 rows.
"""


def choose_blocks(width: int, kind: str, itemsize: int, capability: int, kernel: str) -> Blocks:
    """The sizes for a kernel.

    width       the largest width of queries, values, and vectors that tables are multiplied by.
    kind        one of `KINDS`.
    itemsize    bytes per number of q and k. Products of float32 use no tensor cores, and take small tiles.
    capability  80 for compute capability 8.0, and so on. From 12.0 on, GPUs have tensor cores like those of 8.0.
    kernel      forward, backward_queries or backward_keys.
    """
    if width > 128 or itemsize == 4:
        # With vectors, 32 × 32 tiles of float32 spilled up to 10 KB, and took the compiler up to four minutes.
        return SMALLEST if kind == "vectors" else Blocks(32, 32, 8, 1)
    generation = 80 if capability < 90 or capability >= 120 else 90 if capability < 100 else 100
    return TABLE[generation, 64 if width <= 64 else 128][kernel][KINDS.index(kind)]


def smaller(blocks: Blocks) -> Blocks | None:
    """The next sizes to try on a device with too little shared memory for `blocks`; None if there are none.

    GPUs of capability 8.6, 8.9 and 12.0 have 99 KB per program, where 8.0 has 163 KB. A bias and a gain at a head size
    of 128 take 128 KB with two stages.
    """
    if blocks.stages > 1:
        return blocks._replace(stages=1)
    if blocks[:2] == SMALLEST[:2]:
        return None
    return blocks._replace(
        queries=max(SMALLEST.queries, blocks.queries // 2), keys=max(SMALLEST.keys, blocks.keys // 2)
    )


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
