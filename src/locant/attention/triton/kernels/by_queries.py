"""The first backward kernel: gradients of queries and of tables, a block of queries at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from locant.attention.triton.kernels.bands import add_column, for_queries, sum_by_key, sum_by_query, sum_numbers
from locant.attention.triton.kernels.logits import gradients_of, keys_of, queries_of, sums_of_queries
from locant.attention.triton.kernels.records import FromKeys, FromQueries, Tables
from locant.attention.triton.kernels.tiles import (
    any_of,
    column_of,
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
def backward_queries(
    q, k, v, raw_q, raw_k, query_level, key_level, temperature, bias, gain, query, key, value, level, q_pos, k_pos,
    mask, seed, limit, scratch, lse, grad, delta, dq, draw_q, dquery_level, dtemperature, dbias, dgain, dquery, dkey,
    dvalue, dlevel, n, f, C: tl.constexpr,
):  # fmt: skip
    """The gradients of queries, their levels and temperatures, and a part of the gradients of tables.

    Program (s, h) takes every n.parts-th block of queries of head h. dbias and the others are buffers
    [parts, H, R, width] of zeros.
    """
    pid = tl.program_id(0)
    own = own_scratch(scratch, pid, C)
    of_queries, of_keys = FromQueries(q, raw_q, query_level, temperature, grad), FromKeys(k, v, raw_k, key_level)
    tables = Tables(bias, gain, query, key, value, level)
    dtables = Tables(dbias, dgain, dquery, dkey, dvalue, dlevel)
    part, h = pid // n.heads, pid % n.heads
    kv = h // n.groups
    blocks = tl.cdiv(n.lq, C.block_m)
    buffer = (part.to(tl.int64) * n.heads + h) * n.columns
    for item in range(part, n.blocks, n.parts):
        b, start = item // blocks, item % blocks * C.block_m
        i = start + tl.arange(0, C.block_m)
        qp = query_positions(q_pos, b, i, start, n, C)
        queries = queries_of(of_queries, b, h, i, n, C)
        gt = rows(grad, b, h, i, n.lq, C.value_width, C.value_block)
        sums = sums_of_queries(lse, delta, b, h, i, n)
        acc = tl.full([C.block_m, C.width_block], 0.0, tl.float32)
        acc_p = tl.full([C.block_m, C.query_block], 0.0, tl.float32)
        acc_e = tl.full([C.block_m], 0.0, tl.float64)
        acc_tau = tl.full([C.block_m], 0.0, tl.float64)
        begin, end = key_range(start, n, C)
        for at in range(begin, end, C.block_n):
            j = at + tl.arange(0, C.block_n)
            kp = key_positions(k_pos, b, j, at, n, C)
            seen = visible(qp, kp, i, j, b, h, mask, n, C)
            if C.guarded:
                if any_of(seen):
                    tile = tile_of(b, h, i, j, start, at, qp, kp, seen, own, n, C)
                    acc, acc_p, acc_e, acc_tau = _add_tile(
                        acc, acc_p, acc_e, acc_tau, queries, gt, sums, of_queries, of_keys, tables, dtables, buffer,
                        seed, limit, kv, tile, n, f, C,
                    )  # fmt: skip
            else:
                tile = tile_of(b, h, i, j, start, at, qp, kp, seen, own, n, C)
                acc, acc_p, acc_e, acc_tau = _add_tile(
                    acc, acc_p, acc_e, acc_tau, queries, gt, sums, of_queries, of_keys, tables, dtables, buffer, seed,
                    limit, kv, tile, n, f, C,
                )  # fmt: skip
        if C.raw_q:
            store_rows(draw_q, b, h, i, n.lq, acc_p * f.scale, C.query_width, C.query_block)
        store_rows(dq, b, h, i, n.lq, acc * f.scale, C.width, C.width_block)
        row = (b.to(tl.int64) * n.heads + h) * n.lq + i
        if C.query_level:
            tl.store(dquery_level + row, acc_e, mask=i < n.lq)
        if C.temperature:
            tl.store(dtemperature + row, acc_tau, mask=i < n.lq)


@device_function
def _add_tile(
    acc, acc_p, acc_e, acc_tau, queries, gt, sums, of_queries, of_keys, tables, dtables, buffer, seed, limit, kv, tile,
    n, f, C: tl.constexpr,
):  # fmt: skip
    """Adds a tile to the gradients of a block of queries, and to those of tables."""
    if C.again:
        i = tile.start + count(C.block_m, C)
        queries = queries_of(of_queries, tile.b, tile.h, i, n, C)
        gt = rows(of_queries.grad, tile.b, tile.h, i, n.lq, C.value_width, C.value_block)
    keys = keys_of(of_keys, tile.b, kv, tile.h, tile.j, n, C)
    vt = rows(of_keys.v, tile.b, kv, tile.j, n.lk, C.value_width, C.value_block)
    w, dx, dlogit, x, content, factor, levels, of_levels = gradients_of(
        queries, keys, gt, vt, sums, tables, seed, limit, tile, n, f, C
    )
    if C.gain == 2:
        base = tables.gain.data + tile.h.to(tl.int64) * tables.gain.head
        for c in range(tile.low, tile.high + 1):
            of_column = product(tl.where(tile.col == c, dx, 0.0), keys.content, C)
            acc += of_column * column_of(base, c, C.width, C.width_block)[None, :]
            if C.grad_gain:
                of_gain = tl.sum(queries.content.to(tl.float32) * of_column, 0) * f.scale
                add_column(dtables.gain + buffer * C.width, c, of_gain, C.width, C.width_block)
    else:
        acc += product(dx * factor, keys.content, C)
        if C.grad_gain:
            sum_numbers(dx * content * f.scale, dtables.gain + buffer, tile, n, C)
    if C.query:
        of_vectors = for_queries(dx, tables.query, tile, n, C.query_width, C.query_block, C)
        if C.raw_q:
            acc_p += of_vectors
        else:  # p is q: one sum takes half the registers of two
            acc += of_vectors
        if C.grad_query:
            base = dtables.query + buffer * C.query_width
            sum_by_query(dx * f.scale, queries.vectors, base, tile, n, C.query_width, C.query_block, C)
    if C.grad_key:
        base = dtables.key + buffer * C.key_width
        sum_by_key(dx * f.scale, keys.vectors, base, tile, n, C.key_width, C.key_block, C)
    if C.grad_value:
        base = dtables.value + buffer * C.value_width
        sum_by_query(w, gt, base, tile, n, C.value_width, C.value_block, C)
    if C.grad_bias:
        sum_numbers(dx, dtables.bias + buffer, tile, n, C)
    if C.grad_level:
        sum_numbers(dx * levels, dtables.level + buffer, tile, n, C)
    if C.query_level:
        acc_e += tl.sum(dx * of_levels, 1).to(tl.float64)
    if C.temperature:
        acc_tau += tl.sum(dlogit * x, 1).to(tl.float64)
    return acc, acc_p, acc_e, acc_tau
