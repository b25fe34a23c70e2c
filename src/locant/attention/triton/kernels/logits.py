"""The logits of a tile, and their gradients: what the forward pass and both backward kernels share."""

from __future__ import annotations

import triton.language as tl

from locant.attention.triton.kernels.bands import by_key, by_query
from locant.attention.triton.kernels.dropout import kept
from locant.attention.triton.kernels.records import Keys, Queries
from locant.attention.triton.kernels.tiles import column_of, device_function, product, rows, table_product


@device_function
def queries_of(source, b, h, i, n, C: tl.constexpr):
    """A block of queries; zeros for numbers that are not used."""
    content = rows(source.q, b, h, i, n.lq, C.width, C.width_block)
    vectors = content
    if C.raw_q:
        vectors = rows(source.vectors, b, h, i, n.lq, C.query_width, C.query_block)
    nothing = tl.full([C.block_m], 0.0, tl.float32)
    e, e_low, tau = nothing, nothing, nothing
    if C.query_level:
        e, e_low = _level(source.level, b, h, i, n.lq, n)
    if C.temperature:
        tau = tl.load(source.temperature + (b.to(tl.int64) * n.heads + h) * n.lq + i, mask=i < n.lq, other=0.0)
    return Queries(content, vectors, e, e_low, tau)


@device_function
def keys_of(source, b, kv, h, j, n, C: tl.constexpr):
    """A block of keys, for query head h."""
    content = rows(source.k, b, kv, j, n.lk, C.width, C.width_block)
    vectors = content
    if C.raw_k:
        vectors = rows(source.vectors, b, kv, j, n.lk, C.key_width, C.key_block)
    d, d_low = key_levels(source.level, b, h, j, n, C)
    return Keys(content, vectors, d, d_low)


@device_function
def key_levels(key_level, b, h, j, n, C: tl.constexpr):
    """The high and the low part of the levels of keys; zeros if they are not used."""
    nothing = tl.full([C.block_n], 0.0, tl.float32)
    d, d_low = nothing, nothing
    if C.key_level:
        d, d_low = _level(key_level, b, h, j, n.lk, n)
    return d, d_low


@device_function
def _level(data, b, h, i, length, n):
    """The high and the low part of levels [B, H, L, 2]."""
    at = data + ((b.to(tl.int64) * n.heads + h) * length + i) * 2
    return tl.load(at, mask=i < length, other=0.0), tl.load(at + 1, mask=i < length, other=0.0)


@device_function
def _tanh(x):
    """tanh. Below 0.35 a series, where (1 − e) / (1 + e) would lose digits."""
    z = x * x
    series = 62.0 / 2835 + z * (-1382.0 / 155925)
    series = x * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * series))))
    e = tl.exp(-2.0 * tl.abs(x))
    rest = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.35, series, tl.where(x < 0, -rest, rest))


@device_function
def _slope_of_tanh(x):
    """The derivative of tanh as 4e / (1 + e)²: in 1 − tanh² nearly all digits cancel where tanh is flat."""
    e = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@device_function
def _content(qt, kt, gain, tile, C: tl.constexpr):
    """[BM, BN]: q_iᵀ G_r k_j, without a gain of numbers. A gain of vectors takes a product for each column."""
    if C.gain == 2:
        base = gain.data + tile.h.to(tl.int64) * gain.head
        found = tl.full([C.block_m, C.block_n], 0.0, tl.float32)
        for c in range(tile.low, tile.high + 1):
            g = column_of(base, c, C.width, C.width_block)
            found += tl.where(tile.col == c, table_product(qt.to(tl.float32) * g[None, :], tl.trans(kt), C), 0.0)
    else:
        found = product(qt, tl.trans(kt), C)
    return found


@device_function
def numbers_of(table, tile):
    """[BM, BN]: the number of each pair in a table of numbers."""
    return tl.load(table.data + tile.h.to(tl.int64) * table.head + tile.col).to(tl.float32)


@device_function
def logits_of(queries, keys, tables, tile, n, f, C: tl.constexpr):
    """The logits of a tile, and what their gradients need.

    Those are x, the content product, the factor of the gain, the sum of the levels, and the factor of the levels.
    """
    content = _content(queries.content, keys.content, tables.gain, tile, C)
    x, factor, levels, of_levels = content * f.scale, 1.0, 0.0, 1.0
    if C.gain == 1:
        factor = numbers_of(tables.gain, tile)
        x = x * factor
    if C.query:
        x += f.scale * by_query(queries.vectors, tables.query, tile, n, C.query_width, C.query_block, C)
    if C.key:
        x += f.scale * by_key(keys.vectors, tables.key, tile, n, C.key_width, C.key_block, C)
    if C.bias:
        x += numbers_of(tables.bias, tile)
    if C.query_level or C.key_level:
        levels = (queries.level[:, None] + keys.level[None, :]) + (queries.level_low[:, None] + keys.level_low[None, :])
        if C.level:
            of_levels = numbers_of(tables.level, tile)
            x += of_levels * levels
        else:
            x += levels
    logit = x
    if C.temperature:
        logit = x * queries.temperature[:, None]
    if C.softcap:
        logit = f.softcap * _tanh(logit / f.softcap)
    return logit, x, content, factor, levels, of_levels


@device_function
def sums_of_queries(lse, delta, b, h, i, n):
    """The largest logit, the logarithm of the sum, and g·out of queries. Rows behind the last one have no weight."""
    row = (b.to(tl.int64) * n.heads + h) * n.lq + i
    largest = tl.load(lse + 2 * row, mask=i < n.lq, other=0.0)
    log_total = tl.load(lse + 2 * row + 1, mask=i < n.lq, other=float("inf"))
    return largest, log_total, tl.load(delta + row, mask=i < n.lq, other=0.0)


@device_function
def gradients_of(queries, keys, gt, vt, sums, tables, seed, limit, tile, n, f, C: tl.constexpr):
    """The weights of a tile after dropout, the gradients of x and of τ x, and what the terms of x need.

    gt    [BM, Dv], the gradient of the output.
    vt    [BN, Dv], the values.
    sums  what `sums_of_queries` returned.
    """
    logit, x, content, factor, levels, of_levels = logits_of(queries, keys, tables, tile, n, f, C)
    largest, log_total, delta = sums
    w = tl.where(tile.seen, tl.exp((logit - largest[:, None]) - log_total[:, None]), 0.0)
    dw = product(gt, tl.trans(vt), C)
    if C.value:
        dw += by_query(gt, tables.value, tile, n, C.value_width, C.value_block, C)
    dropped = w
    if C.dropout:
        stays = kept(tile.i, tile.j, tile.b, tile.h, seed, limit, n)
        dropped, dw = tl.where(stays, w * f.keep, 0.0), tl.where(stays, dw * f.keep, 0.0)
    dlogit = tl.where(tile.seen, w * (dw - delta[:, None]), 0.0)
    if C.softcap:
        uncapped = x
        if C.temperature:
            uncapped = x * queries.temperature[:, None]
        dlogit = tl.where(tile.seen, dlogit * _slope_of_tanh(uncapped / f.softcap), 0.0)
    dx = dlogit
    if C.temperature:
        dx = dlogit * queries.temperature[:, None]
    return dropped, dx, dlogit, x, content, factor, levels, of_levels
