"""The forward kernel: a block of queries over all its keys, with an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from locant.attention.triton.kernels.bands import for_queries
from locant.attention.triton.kernels.dropout import kept
from locant.attention.triton.kernels.logits import keys_of, logits_of, queries_of
from locant.attention.triton.kernels.records import FromKeys, FromQueries, Tables
from locant.attention.triton.kernels.tiles import (
    any_of,
    count,
    device_function,
    key_positions,
    key_range,
    own_scratch,
    product,
    query_positions,
    rows,
    store_rows,
    tile_of,
    visible,
)


@triton.jit
def forward(
    q, k, v, raw_q, raw_k, query_level, key_level, temperature, bias, gain, query, key, value, level, sinks, q_pos,
    k_pos, mask, seed, limit, scratch, out, lse, n, f, C: tl.constexpr,
):  # fmt: skip
    """A block of queries: the output, and for each query the largest logit and the logarithm of the sum.

    out  [B, H, Lq, Dv], float32.
    lse  [B, H, Lq, 2], float32: the largest logit, and log Σ exp(logit − largest); (0, ∞) if no key is visible.
    """
    pid = tl.program_id(0)
    own = own_scratch(scratch, pid, C)
    of_queries, of_keys = FromQueries(q, raw_q, query_level, temperature, None), FromKeys(k, v, raw_k, key_level)
    tables = Tables(bias, gain, query, key, value, level)
    blocks = tl.cdiv(n.lq, C.block_m)
    for item in range(pid, n.blocks * n.heads, tl.num_programs(0)):
        start, b, h = item % blocks * C.block_m, item // blocks // n.heads, item // blocks % n.heads
        kv = h // n.groups
        i = start + tl.arange(0, C.block_m)
        qp = query_positions(q_pos, b, i, start, n, C)
        queries = queries_of(of_queries, b, h, i, n, C)
        acc = tl.full([C.block_m, C.value_block], 0.0, tl.float32)
        if C.sinks:
            largest = tl.full([C.block_m], 0.0, tl.float32) + tl.load(sinks + h)
            total = tl.full([C.block_m], 1.0, tl.float32)
        else:
            largest = tl.full([C.block_m], float("-inf"), tl.float32)
            total = tl.full([C.block_m], 0.0, tl.float32)
        begin, end = key_range(start, n, C)
        for at in range(begin, end, C.block_n):
            j = at + tl.arange(0, C.block_n)
            kp = key_positions(k_pos, b, j, at, n, C)
            seen = visible(qp, kp, i, j, b, h, mask, n, C)
            if C.guarded:
                if any_of(seen):
                    tile = tile_of(b, h, i, j, start, at, qp, kp, seen, own, n, C)
                    acc, largest, total = _add_tile(
                        acc, largest, total, queries, of_queries, of_keys, tables, seed, limit, kv, tile, n, f, C
                    )
            else:
                tile = tile_of(b, h, i, j, start, at, qp, kp, seen, own, n, C)
                acc, largest, total = _add_tile(
                    acc, largest, total, queries, of_queries, of_keys, tables, seed, limit, kv, tile, n, f, C
                )
        none = largest == float("-inf")
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        store_rows(out, b, h, i, n.lq, acc, C.value_width, C.value_block)
        at = lse + ((b.to(tl.int64) * n.heads + h) * n.lq + i) * 2
        tl.store(at, tl.where(none, 0.0, largest), mask=i < n.lq)
        tl.store(at + 1, tl.where(none, float("inf"), tl.log(tl.where(none, 1.0, total))), mask=i < n.lq)


@device_function
def _add_tile(acc, largest, total, queries, of_queries, of_keys, tables, seed, limit, kv, tile, n, f, C: tl.constexpr):
    """Adds a tile to the sums of a block of queries."""
    if C.again:
        queries = queries_of(of_queries, tile.b, tile.h, tile.start + count(C.block_m, C), n, C)
    keys = keys_of(of_keys, tile.b, kv, tile.h, tile.j, n, C)
    logit, _, _, _, _, _ = logits_of(queries, keys, tables, tile, n, f, C)
    logit = tl.where(tile.seen, logit, float("-inf"))
    highest = tl.maximum(largest, tl.max(logit, 1))
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    w = tl.exp(logit - finite[:, None])
    before = tl.exp(largest - finite)
    total = total * before + tl.sum(w, 1)
    if C.dropout:
        w = tl.where(kept(tile.i, tile.j, tile.b, tile.h, seed, limit, n), w * f.keep, 0.0)
    vt = rows(of_keys.v, tile.b, kv, tile.j, n.lk, C.value_width, C.value_block)
    acc = acc * before[:, None] + product(w, vt, C)
    if C.value:
        acc += for_queries(w, tables.value, tile, n, C.value_width, C.value_block, C)
    return acc, highest, total
