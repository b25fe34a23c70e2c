"""The parts of a tile: products and loads, the offsets of its pairs, and which pairs are visible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from locant.attention.triton.kernels.records import Tile


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """`triton.jit` for a function that kernels call.

    The interpreter would replace the functions of triton.language again at each of these calls, which takes several
    times longer than the call. The kernel around it has already replaced them.
    """
    jitted: Any = triton.jit(function)
    if isinstance(jitted, triton.runtime.JITFunction) or not hasattr(jitted, "rewrite"):
        found: Callable[..., Any] = jitted
        return found
    return lambda *arguments: jitted.rewrite()(*arguments)


# ------------------------------------------------------------------------------------------------- products and loads


@device_function
def count(LENGTH: tl.constexpr, C: tl.constexpr):
    """0 … LENGTH − 1, as numbers that the compiler does not know.

    What depends on them stays inside the loop over tiles. The compiler would compute addresses that are the same in
    every tile before the loop, and load rows there that every tile needs: both would fill the registers.
    """
    found = tl.arange(0, LENGTH)
    if not C.interpreted:
        found = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [found], dtype=tl.int32, is_pure=False, pack=1)
    return found


@device_function
def product(a, b, C: tl.constexpr):
    """a @ b in float32, from operands in the dtype of the content."""
    a, b = a.to(C.dtype), b.to(C.dtype)
    if C.interpreted:  # its product of bfloat16 reads bits as integers; operands are rounded all the same
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@device_function
def table_product(a, b, C: tl.constexpr):
    """a @ b in float32, where one of them is a part of a table."""
    a, b = a.to(C.table_dtype), b.to(C.table_dtype)
    if C.interpreted:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=C.table_precision)


@device_function
def rows(x, b, h, i, length, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows i of a tensor, [rows, BLOCK]; zeros outside."""
    w = tl.arange(0, BLOCK)
    at = x.data + b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head
    at = at + i.to(tl.int64)[:, None] * x.row + w[None, :]
    if WIDTH == BLOCK:
        found = tl.load(at, mask=(i < length)[:, None], other=0.0)
    else:
        found = tl.load(at, mask=(i < length)[:, None] & (w < WIDTH)[None, :], other=0.0)
    return found


@device_function
def store_rows(x, b, h, i, length, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Writes rows i of a tensor, except those outside."""
    w = tl.arange(0, BLOCK)
    at = x.data + b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head
    at = at + i.to(tl.int64)[:, None] * x.row + w[None, :]
    tl.store(at, value.to(x.data.dtype.element_ty), mask=(i < length)[:, None] & (w < WIDTH)[None, :])


@device_function
def _clip(u, n):
    return tl.minimum(tl.maximum(u, 0), n.columns - 1)


@device_function
def columns_of(base, u, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns u of a table, clipped to its ends, [len(u), BLOCK]."""
    w = tl.arange(0, BLOCK)
    at = base + _clip(u, n).to(tl.int64)[:, None] * WIDTH + w[None, :]
    if WIDTH == BLOCK:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(w < WIDTH)[None, :], other=0.0)
    return found


@device_function
def column_of(base, c, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Column c of a table, [BLOCK], in float32."""
    w = tl.arange(0, BLOCK)
    return tl.load(base + c * WIDTH + w, mask=w < WIDTH, other=0.0).to(tl.float32)


# ------------------------------------------------------------------------------------------------- offsets of a tile


@device_function
def query_positions(q_pos, b, i, start, n, C: tl.constexpr):
    """The positions of queries. Those behind the last one have the position of the first in the tile."""
    if C.consecutive:
        found = i + (n.lk - n.lq)
    else:
        at = q_pos.data + b.to(tl.int64) * q_pos.batch
        found = tl.where(i < n.lq, tl.load(at + i, mask=i < n.lq, other=0), tl.load(at + start))
    return found


@device_function
def key_positions(k_pos, b, j, start, n, C: tl.constexpr):
    """The positions of keys, in the same way."""
    if C.consecutive:
        found = j
    else:
        at = k_pos.data + b.to(tl.int64) * k_pos.batch
        found = tl.where(j < n.lk, tl.load(at + j, mask=j < n.lk, other=0), tl.load(at + start))
    return found


@device_function
def visible(qp, kp, i, j, b, h, mask, n, C: tl.constexpr):
    """[BM, BN]: whether a query may attend to a key."""
    r = kp[None, :] - qp[:, None]
    seen = (i < n.lq)[:, None] & (j < n.lk)[None, :]
    if C.lowest:
        seen = seen & (r >= n.lowest)
    if C.highest:
        seen = seen & (r <= n.highest)
    if C.mask:
        at = mask.data + b.to(tl.int64) * mask.batch + h.to(tl.int64) * mask.head
        at = at + i.to(tl.int64)[:, None] * mask.row + j.to(tl.int64)[None, :] * mask.column
        seen = seen & (tl.load(at, mask=seen, other=0) != 0)
    return seen


@device_function
def any_of(seen):
    """Whether a tile has a visible pair."""
    return tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0


@device_function
def _kind(qp, kp, i, j, start, at, n, C: tl.constexpr):
    """The first and the last column of a tile, the column of its first pair before clipping, and whether it is a band.

    `start` and `at` are the first query and the first key.
    """
    if C.consecutive:
        gap = at - (start + (n.lk - n.lq)) - n.first
        low, high = _clip(gap - (C.block_m - 1), n), _clip(gap + (C.block_n - 1), n)
        band: tl.constexpr = True  # the compiler leaves out what other tiles would need
    else:
        # The first of a band is the smallest. Places behind the last query and the last key do not count.
        q_low, k_low = tl.min(qp, 0), tl.min(kp, 0)
        apart = tl.sum(((qp - q_low != i - start) & (i < n.lq)).to(tl.int32), 0)
        apart += tl.sum(((kp - k_low != j - at) & (j < n.lk)).to(tl.int32), 0)
        gap = tl.minimum(tl.maximum(k_low - q_low - n.first, -(2**30)), 2**30).to(tl.int32)
        low = _clip(k_low - tl.max(qp, 0) - n.first, n).to(tl.int32)
        high = _clip(tl.max(kp, 0) - q_low - n.first, n).to(tl.int32)
        band = apart == 0
    return low, high, gap, band


@device_function
def _single(low, high, C: tl.constexpr):
    """Whether a tile has one column: it lies beyond an end of the tables."""
    if C.far:
        found = low == high
    else:
        found: tl.constexpr = False
    return found


@device_function
def key_range(start, n, C: tl.constexpr):
    """The keys that a block of queries may see: from, to. With explicit positions all; each tile is then tested."""
    begin, end = start * 0, start * 0 + n.lk
    if C.consecutive:
        if C.highest:
            last = tl.minimum(start + C.block_m, n.lq) - 1
            end = tl.minimum(end, last + (n.lk - n.lq) + n.highest + 1)
        if C.lowest:
            begin = tl.maximum(begin, start + (n.lk - n.lq) + n.lowest) // C.block_n * C.block_n
    return begin, end


@device_function
def query_range(start, n, C: tl.constexpr):
    """The queries that may see a block of keys: from, to."""
    begin, end = start * 0, start * 0 + n.lq
    if C.consecutive:
        if C.highest:
            begin = tl.maximum(begin, start - (n.lk - n.lq) - n.highest) // C.block_m * C.block_m
        if C.lowest:
            last = tl.minimum(start + C.block_n, n.lk) - 1
            end = tl.minimum(end, last - (n.lk - n.lq) - n.lowest + 1)
    return begin, end


@device_function
def own_scratch(scratch, pid, C: tl.constexpr):
    """The scratch memory of a program; None if it needs none."""
    if C.scratch:
        own = scratch + pid.to(tl.int64) * (C.block_m * C.band)
    else:
        own = scratch
    return own


@device_function
def tile_of(b, h, i, j, start, at, qp, kp, seen, scratch, n, C: tl.constexpr):
    """The tile of a block of queries from `start` and a block of keys from `at`, at positions qp and kp."""
    # Columns are computed here, and not from the offsets of `visible`: those have 64 bits, and would stay in registers.
    col = _clip(kp[None, :] - qp[:, None] - n.first, n).to(tl.int32)
    low, high, gap, band = _kind(qp, kp, i, j, start, at, n, C)
    return Tile(b, h, start, at, i, j, seen, col, low, high, gap, _single(low, high, C), band, scratch)
