"""The second backward kernel: gradients of keys and values, a block of keys at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from locant.attention.triton.kernels.bands import for_keys
from locant.attention.triton.kernels.logits import gradients_of, key_levels, keys_of, queries_of, sums_of_queries
from locant.attention.triton.kernels.records import FromKeys, FromQueries, Keys, Tables
from locant.attention.triton.kernels.tiles import (
    any_of,
    column_of,
    count,
    device_function,
    key_positions,
    own_scratch,
    product,
    query_positions,
    query_range,
    rows,
    store_rows,
    tile_of,
    visible,
)


@triton.jit
def backward_keys(
    q, k, v, raw_q, raw_k, query_level, key_level, temperature, bias, gain, query, key, value, level, q_pos, k_pos,
    mask, seed, limit, scratch, lse, grad, delta, dk, dv, draw_k, dkey_level, n, f, C: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys, of their values, vectors and levels: over all query heads that share them."""
    pid = tl.program_id(0)
    own = own_scratch(scratch, pid, C)
    of_queries, of_keys = FromQueries(q, raw_q, query_level, temperature, grad), FromKeys(k, v, raw_k, key_level)
    tables = Tables(bias, gain, query, key, value, level)
    blocks, kv_heads = tl.cdiv(n.lk, C.block_n), n.heads // n.groups
    for item in range(pid, n.batch * kv_heads * blocks, tl.num_programs(0)):
        start, b, kv = item % blocks * C.block_n, item // blocks // kv_heads, item // blocks % kv_heads
        j = start + tl.arange(0, C.block_n)
        kp = key_positions(k_pos, b, j, start, n, C)
        kt = rows(k, b, kv, j, n.lk, C.width, C.width_block)
        vt = rows(v, b, kv, j, n.lk, C.value_width, C.value_block)
        tt = kt
        if C.raw_k:
            tt = rows(raw_k, b, kv, j, n.lk, C.key_width, C.key_block)
        acc_k = tl.full([C.block_n, C.width_block], 0.0, tl.float32)
        acc_v = tl.full([C.block_n, C.value_block], 0.0, tl.float32)
        acc_t = tl.full([C.block_n, C.key_block], 0.0, tl.float32)
        begin, end = query_range(start, n, C)
        for group in range(n.groups):
            h = kv * n.groups + group
            d, d_low = key_levels(key_level, b, h, j, n, C)
            keys = Keys(kt, tt, d, d_low)
            acc_d = tl.full([C.block_n], 0.0, tl.float64)
            for at in range(begin, end, C.block_m):
                i = at + tl.arange(0, C.block_m)
                qp = query_positions(q_pos, b, i, at, n, C)
                seen = visible(qp, kp, i, j, b, h, mask, n, C)
                if C.guarded:
                    if any_of(seen):
                        tile = tile_of(b, h, i, j, at, start, qp, kp, seen, own, n, C)
                        acc_k, acc_v, acc_t, acc_d = _add_tile(
                            acc_k, acc_v, acc_t, acc_d, keys, vt, of_queries, of_keys, tables, lse, delta, seed, limit,
                            kv, tile, n, f, C,
                        )  # fmt: skip
                else:
                    tile = tile_of(b, h, i, j, at, start, qp, kp, seen, own, n, C)
                    acc_k, acc_v, acc_t, acc_d = _add_tile(
                        acc_k, acc_v, acc_t, acc_d, keys, vt, of_queries, of_keys, tables, lse, delta, seed, limit, kv,
                        tile, n, f, C,
                    )  # fmt: skip
            if C.key_level:
                tl.store(dkey_level + (b.to(tl.int64) * n.heads + h) * n.lk + j, acc_d, mask=j < n.lk)
        if C.raw_k:
            store_rows(draw_k, b, kv, j, n.lk, acc_t * f.scale, C.key_width, C.key_block)
        store_rows(dk, b, kv, j, n.lk, acc_k * f.scale, C.width, C.width_block)
        store_rows(dv, b, kv, j, n.lk, acc_v, C.value_width, C.value_block)


@device_function
def _add_tile(
    acc_k, acc_v, acc_t, acc_d, keys, vt, of_queries, of_keys, tables, lse, delta, seed, limit, kv, tile, n, f,
    C: tl.constexpr,
):  # fmt: skip
    """Adds a tile to the gradients of a block of keys."""
    if C.again:
        j = tile.at + count(C.block_n, C)
        keys = keys_of(of_keys, tile.b, kv, tile.h, j, n, C)
        vt = rows(of_keys.v, tile.b, kv, j, n.lk, C.value_width, C.value_block)
    queries = queries_of(of_queries, tile.b, tile.h, tile.i, n, C)
    gt = rows(of_queries.grad, tile.b, tile.h, tile.i, n.lq, C.value_width, C.value_block)
    sums = sums_of_queries(lse, delta, tile.b, tile.h, tile.i, n)
    w, dx, _, _, _, factor, _, of_levels = gradients_of(queries, keys, gt, vt, sums, tables, seed, limit, tile, n, f, C)
    acc_v += product(tl.trans(w), gt, C)
    if C.gain == 2:
        base = tables.gain.data + tile.h.to(tl.int64) * tables.gain.head
        for c in range(tile.low, tile.high + 1):
            of_column = product(tl.trans(tl.where(tile.col == c, dx, 0.0)), queries.content, C)
            acc_k += of_column * column_of(base, c, C.width, C.width_block)[None, :]
    else:
        acc_k += product(tl.trans(dx * factor), queries.content, C)
    if C.key:
        of_vectors = for_keys(dx, tables.key, tile, n, C.key_width, C.key_block, C)
        if C.raw_k:
            acc_t += of_vectors
        else:  # t is k: one sum takes half the registers of two
            acc_k += of_vectors
    if C.key_level:
        acc_d += tl.sum(dx * of_levels, 0).to(tl.float64)
    return acc_k, acc_v, acc_t, acc_d
