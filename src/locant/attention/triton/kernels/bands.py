"""Terms that are vectors, and the gradients of all tables, in a tile.

The products of the queries of a band with its columns are one matrix product [BM, band], and row i of it must move i
places to the left (`_skewed`). Gradients move rows back (`_unskewed`).
"""

from __future__ import annotations

import triton.language as tl

from locant.attention.triton.kernels.tiles import column_of, columns_of, count, device_function, table_product

# ------------------------------------------------------------------------------------------------- a shift in a tile


@device_function
def _exchange(scratch, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr):
    """Writes x [ROWS, COLUMNS] to the scratch memory of this program, where all its threads can read it.

    The barrier before waits for those that still read what was there.
    """
    at = scratch + count(ROWS, C)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.debug_barrier()
    tl.store(at, x)
    tl.debug_barrier()


@device_function
def _skewed(scratch, product, C: tl.constexpr):
    """[BM, BN] from products [BM, band] of queries with the columns of a band: that of each pair's own column."""
    _exchange(scratch, product, C.block_m, C.band, C)
    i, j = count(C.block_m, C)[:, None], tl.arange(0, C.block_n)[None, :]
    return tl.load(scratch + i * C.band + (j - i + (C.block_m - 1)), volatile=True)


@device_function
def _skewed_keys(scratch, product, C: tl.constexpr):
    """[BM, BN] from products [band, BN] of the columns of a band with keys."""
    _exchange(scratch, product, C.band, C.block_n, C)
    i, j = count(C.block_m, C)[:, None], tl.arange(0, C.block_n)[None, :]
    return tl.load(scratch + (j - i + (C.block_m - 1)) * C.block_n + j, volatile=True)


@device_function
def _unskewed(scratch, d, C: tl.constexpr):
    """[BM, band]: the number of the pair of query i at place c of the band; 0 if there is none."""
    _exchange(scratch, d, C.block_m, C.block_n, C)
    i = count(C.block_m, C)[:, None]
    j = tl.arange(0, C.band)[None, :] + i - (C.block_m - 1)
    return tl.load(scratch + i * C.block_n + j, mask=(j >= 0) & (j < C.block_n), other=0.0, volatile=True)


@device_function
def _unskewed_keys(scratch, d, C: tl.constexpr):
    """[band, BN]: the number of the pair of key j at place c of the band."""
    _exchange(scratch, d, C.block_m, C.block_n, C)
    j = tl.arange(0, C.block_n)[None, :]
    i = j - count(C.band, C)[:, None] + (C.block_m - 1)
    return tl.load(scratch + i * C.block_n + j, mask=(i >= 0) & (i < C.block_m), other=0.0, volatile=True)


@device_function
def _band_columns(gap, C: tl.constexpr):
    """[band]: the columns of a band, before clipping."""
    return gap - (C.block_m - 1) + count(C.band, C)


# ------------------------------------------------------------------------------------------------- vectors with tables


@device_function
def by_query(x, table, tile, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):
    """[BM, BN]: x_i · table[r], for x [BM, BLOCK]."""
    base = table.data + tile.h.to(tl.int64) * table.head
    found = tl.full([C.block_m, C.block_n], 0.0, tl.float32)
    if tile.single:
        a = column_of(base, tile.low, WIDTH, BLOCK)
        found += tl.sum(x.to(tl.float32) * a[None, :], 1)[:, None]
    else:
        if tile.band:
            a = columns_of(base, _band_columns(tile.gap, C), n, WIDTH, BLOCK)
            found = _skewed(tile.scratch, table_product(x, tl.trans(a), C), C)
        else:
            for c in range(tile.low, tile.high + 1):
                a = column_of(base, c, WIDTH, BLOCK)
                found += tl.where(tile.col == c, tl.sum(x.to(tl.float32) * a[None, :], 1)[:, None], 0.0)
    return found


@device_function
def by_key(t, table, tile, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):
    """[BM, BN]: t_j · table[r], for t [BN, BLOCK]."""
    base = table.data + tile.h.to(tl.int64) * table.head
    found = tl.full([C.block_m, C.block_n], 0.0, tl.float32)
    if tile.single:
        a = column_of(base, tile.low, WIDTH, BLOCK)
        found += tl.sum(t.to(tl.float32) * a[None, :], 1)[None, :]
    else:
        if tile.band:
            a = columns_of(base, _band_columns(tile.gap, C), n, WIDTH, BLOCK)
            found = _skewed_keys(tile.scratch, table_product(a, tl.trans(t), C), C)
        else:
            for c in range(tile.low, tile.high + 1):
                a = column_of(base, c, WIDTH, BLOCK)
                found += tl.where(tile.col == c, tl.sum(t.to(tl.float32) * a[None, :], 1)[None, :], 0.0)
    return found


@device_function
def for_queries(d, table, tile, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):
    """[BM, BLOCK]: Σ_j d_ij · table[r]. The gradient of p, and the value term for d = w."""
    base = table.data + tile.h.to(tl.int64) * table.head
    found = tl.full([C.block_m, BLOCK], 0.0, tl.float32)
    if tile.single:
        found += tl.sum(d, 1)[:, None] * column_of(base, tile.low, WIDTH, BLOCK)[None, :]
    else:
        if tile.band:
            a = columns_of(base, _band_columns(tile.gap, C), n, WIDTH, BLOCK)
            found = table_product(_unskewed(tile.scratch, d, C), a, C)
        else:
            for c in range(tile.low, tile.high + 1):
                a = column_of(base, c, WIDTH, BLOCK)
                found += tl.sum(tl.where(tile.col == c, d, 0.0), 1)[:, None] * a[None, :]
    return found


@device_function
def for_keys(d, table, tile, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):
    """[BN, BLOCK]: Σ_i d_ij · table[r]. The gradient of t."""
    base = table.data + tile.h.to(tl.int64) * table.head
    found = tl.full([C.block_n, BLOCK], 0.0, tl.float32)
    if tile.single:
        found += tl.sum(d, 0)[:, None] * column_of(base, tile.low, WIDTH, BLOCK)[None, :]
    else:
        if tile.band:
            a = columns_of(base, _band_columns(tile.gap, C), n, WIDTH, BLOCK)
            found = table_product(tl.trans(_unskewed_keys(tile.scratch, d, C)), a, C)
        else:
            for c in range(tile.low, tile.high + 1):
                a = column_of(base, c, WIDTH, BLOCK)
                found += tl.sum(tl.where(tile.col == c, d, 0.0), 0)[:, None] * a[None, :]
    return found


# ------------------------------------------------------------------------------------------------- gradients of tables


@device_function
def add_column(base, c, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Adds a vector [BLOCK] to column c. Other threads may have written it: barriers order the accesses."""
    w = tl.arange(0, BLOCK)
    at = base + c * WIDTH + w
    tl.debug_barrier()
    tl.store(at, tl.load(at, mask=w < WIDTH, other=0.0) + value, mask=w < WIDTH)
    tl.debug_barrier()


@device_function
def _add_band(base, u, value, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Adds [band, BLOCK] to columns u. What lies beyond an end of the table belongs to the column at that end."""
    w = tl.arange(0, BLOCK)
    below = tl.sum(tl.where((u < 0)[:, None], value, 0.0), 0)
    above = tl.sum(tl.where((u >= n.columns)[:, None], value, 0.0), 0)
    value += tl.where((u == 0)[:, None], below[None, :], 0.0)
    value += tl.where((u == n.columns - 1)[:, None], above[None, :], 0.0)
    at = base + u.to(tl.int64)[:, None] * WIDTH + w[None, :]
    inside = ((u >= 0) & (u < n.columns))[:, None] & (w < WIDTH)[None, :]
    tl.debug_barrier()
    tl.store(at, tl.load(at, mask=inside, other=0.0) + value, mask=inside)
    tl.debug_barrier()


@device_function
def sum_by_query(d, x, base, tile, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):
    """Adds Σ d_ij · x_i over the pairs of each column to a buffer."""
    if tile.single:
        add_column(base, tile.low, tl.sum(tl.sum(d, 1)[:, None] * x.to(tl.float32), 0), WIDTH, BLOCK)
    else:
        if tile.band:
            value = table_product(tl.trans(_unskewed(tile.scratch, d, C)), x, C)
            _add_band(base, _band_columns(tile.gap, C), value, n, WIDTH, BLOCK)
        else:
            for c in range(tile.low, tile.high + 1):
                of_queries = tl.sum(tl.where(tile.col == c, d, 0.0), 1)
                add_column(base, c, tl.sum(of_queries[:, None] * x.to(tl.float32), 0), WIDTH, BLOCK)


@device_function
def sum_by_key(d, t, base, tile, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):
    """Adds Σ d_ij · t_j over the pairs of each column to a buffer."""
    if tile.single:
        add_column(base, tile.low, tl.sum(tl.sum(d, 0)[:, None] * t.to(tl.float32), 0), WIDTH, BLOCK)
    else:
        if tile.band:
            value = table_product(_unskewed_keys(tile.scratch, d, C), t, C)
            _add_band(base, _band_columns(tile.gap, C), value, n, WIDTH, BLOCK)
        else:
            for c in range(tile.low, tile.high + 1):
                of_keys = tl.sum(tl.where(tile.col == c, d, 0.0), 0)
                add_column(base, c, tl.sum(of_keys[:, None] * t.to(tl.float32), 0), WIDTH, BLOCK)


@device_function
def sum_numbers(d, base, tile, n, C: tl.constexpr):
    """Adds Σ d_ij over the pairs of each column to a buffer of numbers."""
    if tile.single:
        add_column(base, tile.low, tl.sum(tl.sum(d, 1), 0), 1, 1)
    else:
        if tile.band:
            value = tl.sum(_unskewed(tile.scratch, d, C), 0)[:, None]
            _add_band(base, _band_columns(tile.gap, C), value, n, 1, 1)
        else:
            for c in range(tile.low, tile.high + 1):
                add_column(base, c, tl.sum(tl.sum(tl.where(tile.col == c, d, 0.0), 1), 0), 1, 1)
