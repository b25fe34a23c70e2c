"""Which weights stay under dropout: a hash of a seed and the pair, which the backward pass computes again."""

from __future__ import annotations

import triton
import triton.language as tl

from locant.attention.triton.kernels.tiles import device_function


@device_function
def kept(i, j, b, h, seed, limit, n):
    """[BM, BN]: whether a weight stays under dropout, by a counter-based random number of the pair."""
    row = i[:, None] + 0 * j[None, :]
    column = j[None, :] + 0 * i[:, None]
    head = (b * n.heads + h) + 0 * row
    number, _, _, _ = tl.philox(seed, column, row, head, 0 * row)
    return number.to(tl.uint32, bitcast=True).to(tl.int64) >= limit


@triton.jit
def kept_weights(out, seed, limit, n, BLOCK: tl.constexpr):
    """The weights that stay under dropout, as bytes [B, H, Lq, Lk]: for second derivatives."""
    blocks_m, blocks_n = tl.cdiv(n.lq, BLOCK), tl.cdiv(n.lk, BLOCK)
    pid = tl.program_id(0)
    j = pid % blocks_n * BLOCK + tl.arange(0, BLOCK)
    i = pid // blocks_n % blocks_m * BLOCK + tl.arange(0, BLOCK)
    bh = pid // blocks_n // blocks_m
    b, h = bh // n.heads, bh % n.heads
    at = out + (bh.to(tl.int64) * n.lq + i)[:, None] * n.lk + j[None, :]
    stays = kept(i, j, b, h, seed, limit, n)
    tl.store(at, stays.to(tl.uint8), mask=(i < n.lq)[:, None] & (j < n.lk)[None, :])
