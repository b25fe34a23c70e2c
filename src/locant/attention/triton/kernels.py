"""The kernels of the Triton back end: attention with every term, forward and backward, in tiles.

    x_ij     = scale · ( q_iᵀ G_r k_j + p_i·a_r + t_j·c_r ) + b_r + m_r · (e_i + d_j)
    logit_ij = cap · tanh(τ_i x_ij / cap)
    w_ij     = exp(logit_ij) / ( exp(sink) + Σ_l exp(logit_il) )
    out_i    = Σ_j w_ij · (v_j + u_r)

A tile is BM queries × BN keys. The softmax is online, as in FlashAttention, and the backward pass computes the logits
again from the largest logit and the logarithm of the sum of each query.

**Tables of vectors.** A tile with consecutive positions has BM + BN − 1 offsets. The products of its queries with these
columns of a table are one matrix product [BM, band], and row i of it must move i places to the left. Each program
writes the product to scratch memory of its own, which stays in the cache, and reads it with rows that are one number
shorter (`_skewed`). Gradients move rows back (`_unskewed`) and are matrix products too. There are three kinds of tiles:

    far      every pair has the same column (beyond the reach of the scheme): one column, no matrix product
    band     consecutive positions: as above
    scatter  any other positions: column by column, slow and right

Only calls with explicit positions compile the code for scattered tiles.

**Gradients of tables** use no atomics. Program (s, h) of `backward_queries` is the only one that adds to part s of
head h of a buffer, in a fixed order. PyTorch sums the parts. So the same call gives the same bits.

**Operands.** Products have operands of one dtype, that of q and k, and accumulate in float32. In half precision this
rounds weights, gradients of logits and tables of vectors to the dtype, as FlashAttention rounds the weights. Everything
else is float32. A float16 cannot hold every table, so products of a table are computed in TF32 there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl


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


class Rows(NamedTuple):
    """A tensor [B, H, L, width] whose last stride is 1, and its other strides."""

    data: Any
    batch: Any
    head: Any
    row: Any


class Table(NamedTuple):
    """A table [H or 1, R] or [H or 1, R, width], and the stride of its heads: 0 if they share it."""

    data: Any
    head: Any


class Positions(NamedTuple):
    """Positions [B, L] whose last stride is 1, in int64."""

    data: Any
    batch: Any


class Mask(NamedTuple):
    """A mask [B, H, Lq, Lk] of bytes, and all its strides."""

    data: Any
    batch: Any
    head: Any
    row: Any
    column: Any


class Sizes(NamedTuple):
    """Numbers of a call that the compiled kernel does not depend on."""

    heads: Any
    groups: Any  # query heads per key/value head
    lq: Any
    lk: Any
    columns: Any
    first: Any  # the offset of column 0
    lowest: Any
    highest: Any
    parts: Any  # of the buffers for gradients of tables
    blocks: Any  # of queries, B · ⌈Lq / BM⌉
    batch: Any


class Factors(NamedTuple):
    """Real numbers of a call."""

    scale: Any
    softcap: Any
    keep: Any  # 1 / (1 − dropout)


class Form(NamedTuple):
    """What a kernel is compiled for. Terms that are False take no instructions."""

    block_m: int
    block_n: int
    band: int  # a power of 2, at least block_m + block_n − 1
    width: int  # of q and k; widths are padded to blocks: powers of 2, at least 16
    width_block: int
    value_width: int
    value_block: int
    query_width: int  # of p
    query_block: int
    key_width: int  # of t
    key_block: int
    dtype: Any  # of the operands of products
    table_dtype: Any  # … with tables
    table_precision: str
    interpreted: bool
    consecutive: bool  # keys are 0 … Lk−1 and the queries the last of them
    far: bool  # whether tiles can have a single column
    lowest: bool
    highest: bool
    mask: bool
    guarded: bool  # a tile inside the range of a loop may have no visible pair, and is skipped
    bias: bool
    gain: int  # 0: none, 1: a number per offset, 2: a vector
    query: bool
    key: bool
    value: bool
    raw_q: bool  # p is another tensor than q
    raw_k: bool
    query_level: bool
    key_level: bool
    level: bool
    temperature: bool
    softcap: bool
    sinks: bool
    dropout: bool
    scratch: bool  # whether a program has scratch memory: for tables of vectors, and gradients of tables
    # which gradients `backward_queries` sums in buffers
    grad_bias: bool = False
    grad_gain: bool = False
    grad_query: bool = False
    grad_key: bool = False
    grad_value: bool = False
    grad_level: bool = False


# ------------------------------------------------------------------------------------------------- products and loads


@device_function
def _product(a, b, C: tl.constexpr):
    """a @ b in float32, from operands in the dtype of the content."""
    a, b = a.to(C.dtype), b.to(C.dtype)
    if C.interpreted:  # its product of bfloat16 reads bits as integers; operands are rounded all the same
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@device_function
def _table_product(a, b, C: tl.constexpr):
    """a @ b in float32, where one of them is a part of a table."""
    a, b = a.to(C.table_dtype), b.to(C.table_dtype)
    if C.interpreted:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=C.table_precision)


@device_function
def _rows(x, b, h, i, length, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
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
def _store_rows(x, b, h, i, length, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    w = tl.arange(0, BLOCK)
    at = x.data + b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head
    at = at + i.to(tl.int64)[:, None] * x.row + w[None, :]
    tl.store(at, value.to(x.data.dtype.element_ty), mask=(i < length)[:, None] & (w < WIDTH)[None, :])


@device_function
def _level(data, b, h, i, length, n):
    """The high and the low part of levels [B, H, L, 2]."""
    at = data + ((b.to(tl.int64) * n.heads + h) * length + i) * 2
    return tl.load(at, mask=i < length, other=0.0), tl.load(at + 1, mask=i < length, other=0.0)


@device_function
def _clip(u, n):
    return tl.minimum(tl.maximum(u, 0), n.columns - 1)


@device_function
def _columns_of(base, u, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns u of a table, clipped to its ends, [len(u), BLOCK]."""
    w = tl.arange(0, BLOCK)
    at = base + _clip(u, n).to(tl.int64)[:, None] * WIDTH + w[None, :]
    if WIDTH == BLOCK:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(w < WIDTH)[None, :], other=0.0)
    return found


@device_function
def _column_of(base, c, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Column c of a table, [BLOCK], in float32."""
    w = tl.arange(0, BLOCK)
    return tl.load(base + c * WIDTH + w, mask=w < WIDTH, other=0.0).to(tl.float32)


# ------------------------------------------------------------------------------------------------- offsets of a tile


@device_function
def _query_positions(q_pos, b, i, start, n, C: tl.constexpr):
    """The positions of queries. Those behind the last one go on by ones from the first, so that a tile stays a band."""
    if C.consecutive:
        found = i + (n.lk - n.lq)
    else:
        at = q_pos.data + b.to(tl.int64) * q_pos.batch
        beyond = tl.load(at + start) + (i - start)
        found = tl.where(i < n.lq, tl.load(at + i, mask=i < n.lq, other=0), beyond)
    return found


@device_function
def _key_positions(k_pos, b, j, start, n, C: tl.constexpr):
    if C.consecutive:
        found = j
    else:
        at = k_pos.data + b.to(tl.int64) * k_pos.batch
        beyond = tl.load(at + start) + (j - start)
        found = tl.where(j < n.lk, tl.load(at + j, mask=j < n.lk, other=0), beyond)
    return found


@device_function
def _visible(r, i, j, b, h, mask, n, C: tl.constexpr):
    """[BM, BN]: whether a query may attend to a key."""
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
def _kind(qp, kp, i, j, start, at, n, C: tl.constexpr):
    """The first and the last column of a tile, the column of its first pair before clipping, and whether it is a band.

    `start` and `at` are the first query and the first key. A far tile has one column.
    """
    if C.consecutive:
        gap = at - (start + (n.lk - n.lq)) - n.first
        low, high = _clip(gap - (C.block_m - 1), n), _clip(gap + (C.block_n - 1), n)
        band = gap == gap
    else:
        # The first of a band is the smallest.
        q_low, k_low = tl.min(qp, 0), tl.min(kp, 0)
        apart = tl.sum((qp - q_low != i - start).to(tl.int32), 0)
        apart += tl.sum((kp - k_low != j - at).to(tl.int32), 0)
        gap = tl.minimum(tl.maximum(k_low - q_low - n.first, -(2**30)), 2**30).to(tl.int32)
        low = _clip(k_low - tl.max(qp, 0) - n.first, n).to(tl.int32)
        high = _clip(tl.max(kp, 0) - q_low - n.first, n).to(tl.int32)
        band = apart == 0
    return low, high, gap, band


# ------------------------------------------------------------------------------------------------- a shift in a tile


@device_function
def _count(LENGTH: tl.constexpr, C: tl.constexpr):
    """0 … LENGTH − 1, as numbers that the compiler does not know.

    Addresses in scratch memory are the same in every tile. The compiler would compute all of them before the loop over
    tiles, and they would fill the registers.
    """
    count = tl.arange(0, LENGTH)
    if not C.interpreted:
        count = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [count], dtype=tl.int32, is_pure=False, pack=1)
    return count


@device_function
def _exchange(scratch, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr):
    """Writes x [ROWS, COLUMNS] to the scratch memory of this program, where all its threads can read it.

    The barrier before waits for those that still read what was there.
    """
    at = scratch + _count(ROWS, C)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.debug_barrier()
    tl.store(at, x)
    tl.debug_barrier()


@device_function
def _skewed(scratch, product, C: tl.constexpr):
    """[BM, BN] from products [BM, band] of queries with the columns of a band: that of each pair's own column."""
    _exchange(scratch, product, C.block_m, C.band, C)
    i, j = _count(C.block_m, C)[:, None], tl.arange(0, C.block_n)[None, :]
    return tl.load(scratch + i * C.band + (j - i + (C.block_m - 1)), volatile=True)


@device_function
def _skewed_keys(scratch, product, C: tl.constexpr):
    """[BM, BN] from products [band, BN] of the columns of a band with keys."""
    _exchange(scratch, product, C.band, C.block_n, C)
    i, j = _count(C.block_m, C)[:, None], tl.arange(0, C.block_n)[None, :]
    return tl.load(scratch + (j - i + (C.block_m - 1)) * C.block_n + j, volatile=True)


@device_function
def _unskewed(scratch, d, C: tl.constexpr):
    """[BM, band]: the number of the pair of query i at place c of the band; 0 if there is none."""
    _exchange(scratch, d, C.block_m, C.block_n, C)
    i = _count(C.block_m, C)[:, None]
    j = tl.arange(0, C.band)[None, :] + i - (C.block_m - 1)
    return tl.load(scratch + i * C.block_n + j, mask=(j >= 0) & (j < C.block_n), other=0.0, volatile=True)


@device_function
def _unskewed_keys(scratch, d, C: tl.constexpr):
    """[band, BN]: the number of the pair of key j at place c of the band."""
    _exchange(scratch, d, C.block_m, C.block_n, C)
    j = tl.arange(0, C.block_n)[None, :]
    i = j - _count(C.band, C)[:, None] + (C.block_m - 1)
    return tl.load(scratch + i * C.block_n + j, mask=(i >= 0) & (i < C.block_m), other=0.0, volatile=True)


@device_function
def _band_columns(gap, C: tl.constexpr):
    """[band]: the columns of a band, before clipping."""
    return gap - (C.block_m - 1) + tl.arange(0, C.band)


# ------------------------------------------------------------------------------------------------- vectors with tables


@device_function
def _by_query(
    x, table, h, col, low, high, gap, band, scratch, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr
):
    """[BM, BN]: x_i · table[r], for x [BM, BLOCK]."""
    base = table.data + h.to(tl.int64) * table.head
    found = tl.full([C.block_m, C.block_n], 0.0, tl.float32)
    if C.far:
        if low == high:
            a = _column_of(base, low, WIDTH, BLOCK)
            found += tl.sum(x.to(tl.float32) * a[None, :], 1)[:, None]
        else:
            if C.consecutive:
                found = _by_query_in_band(x, base, gap, scratch, n, WIDTH, BLOCK, C)
            else:
                if band:
                    found = _by_query_in_band(x, base, gap, scratch, n, WIDTH, BLOCK, C)
                else:
                    for c in range(low, high + 1):
                        a = _column_of(base, c, WIDTH, BLOCK)
                        found += tl.where(col == c, tl.sum(x.to(tl.float32) * a[None, :], 1)[:, None], 0.0)
    else:
        found = _by_query_in_band(x, base, gap, scratch, n, WIDTH, BLOCK, C)
    return found


@device_function
def _by_query_in_band(x, base, gap, scratch, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):
    a = _columns_of(base, _band_columns(gap, C), n, WIDTH, BLOCK)
    return _skewed(scratch, _table_product(x, tl.trans(a), C), C)


@device_function
def _by_key(
    t, table, h, col, low, high, gap, band, scratch, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr
):
    """[BM, BN]: t_j · table[r], for t [BN, BLOCK]."""
    base = table.data + h.to(tl.int64) * table.head
    found = tl.full([C.block_m, C.block_n], 0.0, tl.float32)
    if C.far:
        if low == high:
            a = _column_of(base, low, WIDTH, BLOCK)
            found += tl.sum(t.to(tl.float32) * a[None, :], 1)[None, :]
        else:
            if C.consecutive:
                found = _by_key_in_band(t, base, gap, scratch, n, WIDTH, BLOCK, C)
            else:
                if band:
                    found = _by_key_in_band(t, base, gap, scratch, n, WIDTH, BLOCK, C)
                else:
                    for c in range(low, high + 1):
                        a = _column_of(base, c, WIDTH, BLOCK)
                        found += tl.where(col == c, tl.sum(t.to(tl.float32) * a[None, :], 1)[None, :], 0.0)
    else:
        found = _by_key_in_band(t, base, gap, scratch, n, WIDTH, BLOCK, C)
    return found


@device_function
def _by_key_in_band(t, base, gap, scratch, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):
    a = _columns_of(base, _band_columns(gap, C), n, WIDTH, BLOCK)
    return _skewed_keys(scratch, _table_product(a, tl.trans(t), C), C)


@device_function
def _for_queries(
    d, table, h, col, low, high, gap, band, scratch, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr
):
    """[BM, BLOCK]: Σ_j d_ij · table[r]. The gradient of p, and the value term for d = w."""
    base = table.data + h.to(tl.int64) * table.head
    found = tl.full([C.block_m, BLOCK], 0.0, tl.float32)
    if C.far:
        if low == high:
            found += tl.sum(d, 1)[:, None] * _column_of(base, low, WIDTH, BLOCK)[None, :]
        else:
            if C.consecutive:
                found = _for_queries_in_band(d, base, gap, scratch, n, WIDTH, BLOCK, C)
            else:
                if band:
                    found = _for_queries_in_band(d, base, gap, scratch, n, WIDTH, BLOCK, C)
                else:
                    for c in range(low, high + 1):
                        a = _column_of(base, c, WIDTH, BLOCK)
                        found += tl.sum(tl.where(col == c, d, 0.0), 1)[:, None] * a[None, :]
    else:
        found = _for_queries_in_band(d, base, gap, scratch, n, WIDTH, BLOCK, C)
    return found


@device_function
def _for_queries_in_band(d, base, gap, scratch, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):
    a = _columns_of(base, _band_columns(gap, C), n, WIDTH, BLOCK)
    return _table_product(_unskewed(scratch, d, C), a, C)


@device_function
def _for_keys(
    d, table, h, col, low, high, gap, band, scratch, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr
):
    """[BN, BLOCK]: Σ_i d_ij · table[r]. The gradient of t."""
    base = table.data + h.to(tl.int64) * table.head
    found = tl.full([C.block_n, BLOCK], 0.0, tl.float32)
    if C.far:
        if low == high:
            found += tl.sum(d, 0)[:, None] * _column_of(base, low, WIDTH, BLOCK)[None, :]
        else:
            if C.consecutive:
                found = _for_keys_in_band(d, base, gap, scratch, n, WIDTH, BLOCK, C)
            else:
                if band:
                    found = _for_keys_in_band(d, base, gap, scratch, n, WIDTH, BLOCK, C)
                else:
                    for c in range(low, high + 1):
                        a = _column_of(base, c, WIDTH, BLOCK)
                        found += tl.sum(tl.where(col == c, d, 0.0), 0)[:, None] * a[None, :]
    else:
        found = _for_keys_in_band(d, base, gap, scratch, n, WIDTH, BLOCK, C)
    return found


@device_function
def _for_keys_in_band(d, base, gap, scratch, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):
    a = _columns_of(base, _band_columns(gap, C), n, WIDTH, BLOCK)
    return _table_product(tl.trans(_unskewed_keys(scratch, d, C)), a, C)


# ------------------------------------------------------------------------------------------------- gradients of tables


@device_function
def _add_column(base, c, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
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
def _sum_by_query(
    d, x, base, col, low, high, gap, band, scratch, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr
):
    """Adds Σ d_ij · x_i over the pairs of each column to a buffer."""
    if C.far:
        if low == high:
            _add_column(base, low, tl.sum(tl.sum(d, 1)[:, None] * x.to(tl.float32), 0), WIDTH, BLOCK)
        else:
            if C.consecutive:
                value = _table_product(tl.trans(_unskewed(scratch, d, C)), x, C)
                _add_band(base, _band_columns(gap, C), value, n, WIDTH, BLOCK)
            else:
                if band:
                    value = _table_product(tl.trans(_unskewed(scratch, d, C)), x, C)
                    _add_band(base, _band_columns(gap, C), value, n, WIDTH, BLOCK)
                else:
                    for c in range(low, high + 1):
                        of_queries = tl.sum(tl.where(col == c, d, 0.0), 1)
                        _add_column(base, c, tl.sum(of_queries[:, None] * x.to(tl.float32), 0), WIDTH, BLOCK)
    else:
        value = _table_product(tl.trans(_unskewed(scratch, d, C)), x, C)
        _add_band(base, _band_columns(gap, C), value, n, WIDTH, BLOCK)


@device_function
def _sum_by_key(
    d, t, base, col, low, high, gap, band, scratch, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr
):
    """Adds Σ d_ij · t_j over the pairs of each column to a buffer."""
    if C.far:
        if low == high:
            _add_column(base, low, tl.sum(tl.sum(d, 0)[:, None] * t.to(tl.float32), 0), WIDTH, BLOCK)
        else:
            if C.consecutive:
                value = _table_product(_unskewed_keys(scratch, d, C), t, C)
                _add_band(base, _band_columns(gap, C), value, n, WIDTH, BLOCK)
            else:
                if band:
                    value = _table_product(_unskewed_keys(scratch, d, C), t, C)
                    _add_band(base, _band_columns(gap, C), value, n, WIDTH, BLOCK)
                else:
                    for c in range(low, high + 1):
                        of_keys = tl.sum(tl.where(col == c, d, 0.0), 0)
                        _add_column(base, c, tl.sum(of_keys[:, None] * t.to(tl.float32), 0), WIDTH, BLOCK)
    else:
        value = _table_product(_unskewed_keys(scratch, d, C), t, C)
        _add_band(base, _band_columns(gap, C), value, n, WIDTH, BLOCK)


@device_function
def _sum_numbers(d, base, col, low, high, gap, band, scratch, n, C: tl.constexpr):
    """Adds Σ d_ij over the pairs of each column to a buffer of numbers."""
    if C.far:
        if low == high:
            _add_column(base, low, tl.sum(tl.sum(d, 1), 0), 1, 1)
        else:
            if C.consecutive:
                _add_band(base, _band_columns(gap, C), tl.sum(_unskewed(scratch, d, C), 0)[:, None], n, 1, 1)
            else:
                if band:
                    _add_band(base, _band_columns(gap, C), tl.sum(_unskewed(scratch, d, C), 0)[:, None], n, 1, 1)
                else:
                    for c in range(low, high + 1):
                        _add_column(base, c, tl.sum(tl.sum(tl.where(col == c, d, 0.0), 1), 0), 1, 1)
    else:
        _add_band(base, _band_columns(gap, C), tl.sum(_unskewed(scratch, d, C), 0)[:, None], n, 1, 1)


# ------------------------------------------------------------------------------------------------- logits


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
def _content(qt, kt, gain, h, col, low, high, C: tl.constexpr):
    """[BM, BN]: q_iᵀ G_r k_j, without a gain of numbers. A gain of vectors takes a product for each column."""
    if C.gain == 2:
        base = gain.data + h.to(tl.int64) * gain.head
        found = tl.full([C.block_m, C.block_n], 0.0, tl.float32)
        for c in range(low, high + 1):
            g = _column_of(base, c, C.width, C.width_block)
            found += tl.where(col == c, _product(qt.to(tl.float32) * g[None, :], tl.trans(kt), C), 0.0)
    else:
        found = _product(qt, tl.trans(kt), C)
    return found


@device_function
def _logits(
    qt, kt, pt, tt, e, e_low, d, d_low, tau, gain, bias, query, key, level, h, col, low, high, gap, band, scratch,
    n, f, C: tl.constexpr,
):  # fmt: skip
    """The logits of a tile, and what their gradients need.

    Those are x, the content product, the factor of the gain, the sum of the levels, and the factor of the levels.
    """
    content = _content(qt, kt, gain, h, col, low, high, C)
    x, factor, levels, of_levels = content * f.scale, 1.0, 0.0, 1.0
    if C.gain == 1:
        factor = tl.load(gain.data + h.to(tl.int64) * gain.head + col).to(tl.float32)
        x = x * factor
    if C.query:
        x += f.scale * _by_query(pt, query, h, col, low, high, gap, band, scratch, n, C.query_width, C.query_block, C)
    if C.key:
        x += f.scale * _by_key(tt, key, h, col, low, high, gap, band, scratch, n, C.key_width, C.key_block, C)
    if C.bias:
        x += tl.load(bias.data + h.to(tl.int64) * bias.head + col)
    if C.query_level or C.key_level:
        levels = (e[:, None] + d[None, :]) + (e_low[:, None] + d_low[None, :])
        if C.level:
            of_levels = tl.load(level.data + h.to(tl.int64) * level.head + col)
            x += of_levels * levels
        else:
            x += levels
    logit = x
    if C.temperature:
        logit = x * tau[:, None]
    if C.softcap:
        logit = f.softcap * _tanh(logit / f.softcap)
    return logit, x, content, factor, levels, of_levels


@device_function
def _kept(i, j, b, h, seed, limit, n):
    """[BM, BN]: whether a weight stays under dropout, by a counter-based random number of the pair."""
    row = i[:, None] + 0 * j[None, :]
    column = j[None, :] + 0 * i[:, None]
    head = (b * n.heads + h) + 0 * row
    number, _, _, _ = tl.philox(seed, column, row, head, 0 * row)
    return number.to(tl.uint32, bitcast=True).to(tl.int64) >= limit


@device_function
def _query_numbers(query_level, temperature, b, h, i, n, C: tl.constexpr):
    """The levels of queries as high and low parts, and their temperatures; zeros for what is not used."""
    nothing = tl.full([C.block_m], 0.0, tl.float32)
    e, e_low, tau = nothing, nothing, nothing
    if C.query_level:
        e, e_low = _level(query_level, b, h, i, n.lq, n)
    if C.temperature:
        tau = tl.load(temperature + (b.to(tl.int64) * n.heads + h) * n.lq + i, mask=i < n.lq, other=0.0)
    return e, e_low, tau


@device_function
def _key_numbers(key_level, b, h, j, n, C: tl.constexpr):
    nothing = tl.full([C.block_n], 0.0, tl.float32)
    d, d_low = nothing, nothing
    if C.key_level:
        d, d_low = _level(key_level, b, h, j, n.lk, n)
    return d, d_low


@device_function
def _key_range(start, n, C: tl.constexpr):
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
def _query_range(start, n, C: tl.constexpr):
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
def _own_scratch(scratch, pid, C: tl.constexpr):
    """The scratch memory of a program; None if it needs none."""
    if C.scratch:
        own = scratch + pid.to(tl.int64) * (C.block_m * C.band)
    else:
        own = scratch
    return own


# ------------------------------------------------------------------------------------------------- forward


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
    own = _own_scratch(scratch, pid, C)
    blocks = tl.cdiv(n.lq, C.block_m)
    for item in range(pid, n.blocks * n.heads, tl.num_programs(0)):
        start, b, h = item % blocks * C.block_m, item // blocks // n.heads, item // blocks % n.heads
        kv = h // n.groups
        i = start + tl.arange(0, C.block_m)
        qp = _query_positions(q_pos, b, i, start, n, C)
        qt = _rows(q, b, h, i, n.lq, C.width, C.width_block)
        pt = qt
        if C.raw_q:
            pt = _rows(raw_q, b, h, i, n.lq, C.query_width, C.query_block)
        e, e_low, tau = _query_numbers(query_level, temperature, b, h, i, n, C)
        acc = tl.full([C.block_m, C.value_block], 0.0, tl.float32)
        if C.sinks:
            largest = tl.full([C.block_m], 0.0, tl.float32) + tl.load(sinks + h)
            total = tl.full([C.block_m], 1.0, tl.float32)
        else:
            largest = tl.full([C.block_m], float("-inf"), tl.float32)
            total = tl.full([C.block_m], 0.0, tl.float32)
        begin, end = _key_range(start, n, C)
        for at in range(begin, end, C.block_n):
            j = at + tl.arange(0, C.block_n)
            kp = _key_positions(k_pos, b, j, at, n, C)
            r = kp[None, :] - qp[:, None]
            seen = _visible(r, i, j, b, h, mask, n, C)
            if C.guarded:
                if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                    acc, largest, total = _forward_tile(
                        acc, largest, total, qt, pt, e, e_low, tau, k, v, raw_k, key_level, bias, gain, query, key,
                        value, level, seed, limit, own, b, h, kv, i, j, start, at, qp, kp, r, seen, n, f, C,
                    )  # fmt: skip
            else:
                acc, largest, total = _forward_tile(
                    acc, largest, total, qt, pt, e, e_low, tau, k, v, raw_k, key_level, bias, gain, query, key, value,
                    level, seed, limit, own, b, h, kv, i, j, start, at, qp, kp, r, seen, n, f, C,
                )  # fmt: skip
        none = largest == float("-inf")
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        _store_rows(out, b, h, i, n.lq, acc, C.value_width, C.value_block)
        at = lse + ((b.to(tl.int64) * n.heads + h) * n.lq + i) * 2
        tl.store(at, tl.where(none, 0.0, largest), mask=i < n.lq)
        tl.store(at + 1, tl.where(none, float("inf"), tl.log(tl.where(none, 1.0, total))), mask=i < n.lq)


@device_function
def _forward_tile(
    acc, largest, total, qt, pt, e, e_low, tau, k, v, raw_k, key_level, bias, gain, query, key, value, level, seed,
    limit, scratch, b, h, kv, i, j, start, at, qp, kp, r, seen, n, f, C: tl.constexpr,
):  # fmt: skip
    """Adds a tile to the sums of a block of queries."""
    col = _clip(r - n.first, n).to(tl.int32)
    low, high, gap, band = _kind(qp, kp, i, j, start, at, n, C)
    kt = _rows(k, b, kv, j, n.lk, C.width, C.width_block)
    tt = kt
    if C.raw_k:
        tt = _rows(raw_k, b, kv, j, n.lk, C.key_width, C.key_block)
    d, d_low = _key_numbers(key_level, b, h, j, n, C)
    logit, _, _, _, _, _ = _logits(
        qt,
        kt,
        pt,
        tt,
        e,
        e_low,
        d,
        d_low,
        tau,
        gain,
        bias,
        query,
        key,
        level,
        h,
        col,
        low,
        high,
        gap,
        band,
        scratch,
        n,
        f,
        C,
    )
    logit = tl.where(seen, logit, float("-inf"))
    highest = tl.maximum(largest, tl.max(logit, 1))
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    w = tl.exp(logit - finite[:, None])
    before = tl.exp(largest - finite)
    total = total * before + tl.sum(w, 1)
    if C.dropout:
        w = tl.where(_kept(i, j, b, h, seed, limit, n), w * f.keep, 0.0)
    vt = _rows(v, b, kv, j, n.lk, C.value_width, C.value_block)
    acc = acc * before[:, None] + _product(w, vt, C)
    if C.value:
        acc += _for_queries(w, value, h, col, low, high, gap, band, scratch, n, C.value_width, C.value_block, C)
    return acc, highest, total


# ------------------------------------------------------------------------------------------------- backward


@device_function
def _gradient_tile(
    qt, kt, pt, tt, gt, vt, e, e_low, d, d_low, tau, largest, log_total, delta, gain, bias, query, key, value, level,
    seed, limit, b, h, i, j, r, seen, col, low, high, gap, band, scratch, n, f, C: tl.constexpr,
):  # fmt: skip
    """The weights of a tile after dropout, the gradients of x and of τ x, and what the terms of x need."""
    logit, x, content, factor, levels, of_levels = _logits(
        qt,
        kt,
        pt,
        tt,
        e,
        e_low,
        d,
        d_low,
        tau,
        gain,
        bias,
        query,
        key,
        level,
        h,
        col,
        low,
        high,
        gap,
        band,
        scratch,
        n,
        f,
        C,
    )
    w = tl.where(seen, tl.exp((logit - largest[:, None]) - log_total[:, None]), 0.0)
    dw = _product(gt, tl.trans(vt), C)
    if C.value:
        dw += _by_query(gt, value, h, col, low, high, gap, band, scratch, n, C.value_width, C.value_block, C)
    dropped = w
    if C.dropout:
        kept = _kept(i, j, b, h, seed, limit, n)
        dropped, dw = tl.where(kept, w * f.keep, 0.0), tl.where(kept, dw * f.keep, 0.0)
    dlogit = tl.where(seen, w * (dw - delta[:, None]), 0.0)
    if C.softcap:
        capped = logit / f.softcap
        dlogit = tl.where(seen, dlogit * (1.0 - capped * capped), 0.0)
    dx = dlogit
    if C.temperature:
        dx = dlogit * tau[:, None]
    return dropped, dx, dlogit, x, content, factor, levels, of_levels


@device_function
def _query_sums(lse, delta, b, h, i, n):
    """The largest logit, the logarithm of the sum, and g·out of queries. Rows behind the last one have no weight."""
    row = (b.to(tl.int64) * n.heads + h) * n.lq + i
    largest = tl.load(lse + 2 * row, mask=i < n.lq, other=0.0)
    log_total = tl.load(lse + 2 * row + 1, mask=i < n.lq, other=float("inf"))
    return largest, log_total, tl.load(delta + row, mask=i < n.lq, other=0.0)


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
    own = _own_scratch(scratch, pid, C)
    part, h = pid // n.heads, pid % n.heads
    kv = h // n.groups
    blocks = tl.cdiv(n.lq, C.block_m)
    buffer = (part.to(tl.int64) * n.heads + h) * n.columns
    for item in range(part, n.blocks, n.parts):
        b, start = item // blocks, item % blocks * C.block_m
        i = start + tl.arange(0, C.block_m)
        qp = _query_positions(q_pos, b, i, start, n, C)
        qt = _rows(q, b, h, i, n.lq, C.width, C.width_block)
        pt = qt
        if C.raw_q:
            pt = _rows(raw_q, b, h, i, n.lq, C.query_width, C.query_block)
        gt = _rows(grad, b, h, i, n.lq, C.value_width, C.value_block)
        e, e_low, tau = _query_numbers(query_level, temperature, b, h, i, n, C)
        largest, log_total, of_row = _query_sums(lse, delta, b, h, i, n)
        acc = tl.full([C.block_m, C.width_block], 0.0, tl.float32)
        acc_p = tl.full([C.block_m, C.query_block], 0.0, tl.float32)
        acc_e = tl.full([C.block_m], 0.0, tl.float64)
        acc_tau = tl.full([C.block_m], 0.0, tl.float64)
        begin, end = _key_range(start, n, C)
        for at in range(begin, end, C.block_n):
            j = at + tl.arange(0, C.block_n)
            kp = _key_positions(k_pos, b, j, at, n, C)
            r = kp[None, :] - qp[:, None]
            seen = _visible(r, i, j, b, h, mask, n, C)
            if C.guarded:
                if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                    acc, acc_p, acc_e, acc_tau = _backward_queries_tile(
                        acc, acc_p, acc_e, acc_tau, qt, pt, gt, e, e_low, tau, largest, log_total, of_row, k, v, raw_k,
                        key_level, bias, gain, query, key, value, level, dbias, dgain, dquery, dkey, dvalue, dlevel,
                        buffer, seed, limit, own, b, h, kv, i, j, start, at, qp, kp, r, seen, n, f, C,
                    )  # fmt: skip
            else:
                acc, acc_p, acc_e, acc_tau = _backward_queries_tile(
                    acc, acc_p, acc_e, acc_tau, qt, pt, gt, e, e_low, tau, largest, log_total, of_row, k, v, raw_k,
                    key_level, bias, gain, query, key, value, level, dbias, dgain, dquery, dkey, dvalue, dlevel,
                    buffer, seed, limit, own, b, h, kv, i, j, start, at, qp, kp, r, seen, n, f, C,
                )  # fmt: skip
        if C.raw_q:
            _store_rows(draw_q, b, h, i, n.lq, acc_p * f.scale, C.query_width, C.query_block)
        elif C.query:
            acc += acc_p
        _store_rows(dq, b, h, i, n.lq, acc * f.scale, C.width, C.width_block)
        row = (b.to(tl.int64) * n.heads + h) * n.lq + i
        if C.query_level:
            tl.store(dquery_level + row, acc_e, mask=i < n.lq)
        if C.temperature:
            tl.store(dtemperature + row, acc_tau, mask=i < n.lq)


@device_function
def _backward_queries_tile(
    acc, acc_p, acc_e, acc_tau, qt, pt, gt, e, e_low, tau, largest, log_total, of_row, k, v, raw_k, key_level, bias,
    gain, query, key, value, level, dbias, dgain, dquery, dkey, dvalue, dlevel, buffer, seed, limit, scratch, b, h, kv,
    i, j, start, at, qp, kp, r, seen, n, f, C: tl.constexpr,
):  # fmt: skip
    """Adds a tile to the gradients of a block of queries, and to those of tables."""
    col = _clip(r - n.first, n).to(tl.int32)
    low, high, gap, band = _kind(qp, kp, i, j, start, at, n, C)
    kt = _rows(k, b, kv, j, n.lk, C.width, C.width_block)
    tt = kt
    if C.raw_k:
        tt = _rows(raw_k, b, kv, j, n.lk, C.key_width, C.key_block)
    vt = _rows(v, b, kv, j, n.lk, C.value_width, C.value_block)
    d, d_low = _key_numbers(key_level, b, h, j, n, C)
    w, dx, dlogit, x, content, factor, levels, of_levels = _gradient_tile(
        qt, kt, pt, tt, gt, vt, e, e_low, d, d_low, tau, largest, log_total, of_row, gain, bias, query, key, value,
        level, seed, limit, b, h, i, j, r, seen, col, low, high, gap, band, scratch, n, f, C,
    )  # fmt: skip
    if C.gain == 2:
        base = gain.data + h.to(tl.int64) * gain.head
        for c in range(low, high + 1):
            of_column = _product(tl.where(col == c, dx, 0.0), kt, C)
            acc += of_column * _column_of(base, c, C.width, C.width_block)[None, :]
            if C.grad_gain:
                of_gain = tl.sum(qt.to(tl.float32) * of_column, 0) * f.scale
                _add_column(dgain + buffer * C.width, c, of_gain, C.width, C.width_block)
    else:
        acc += _product(dx * factor, kt, C)
        if C.grad_gain:
            _sum_numbers(dx * content * f.scale, dgain + buffer, col, low, high, gap, band, scratch, n, C)
    if C.query:
        acc_p += _for_queries(dx, query, h, col, low, high, gap, band, scratch, n, C.query_width, C.query_block, C)
        if C.grad_query:
            base = dquery + buffer * C.query_width
            _sum_by_query(
                dx * f.scale, pt, base, col, low, high, gap, band, scratch, n, C.query_width, C.query_block, C
            )
    if C.grad_key:
        base = dkey + buffer * C.key_width
        _sum_by_key(dx * f.scale, tt, base, col, low, high, gap, band, scratch, n, C.key_width, C.key_block, C)
    if C.grad_value:
        base = dvalue + buffer * C.value_width
        _sum_by_query(w, gt, base, col, low, high, gap, band, scratch, n, C.value_width, C.value_block, C)
    if C.grad_bias:
        _sum_numbers(dx, dbias + buffer, col, low, high, gap, band, scratch, n, C)
    if C.grad_level:
        _sum_numbers(dx * levels, dlevel + buffer, col, low, high, gap, band, scratch, n, C)
    if C.query_level:
        acc_e += tl.sum(dx * of_levels, 1).to(tl.float64)
    if C.temperature:
        acc_tau += tl.sum(dlogit * x, 1).to(tl.float64)
    return acc, acc_p, acc_e, acc_tau


@triton.jit
def backward_keys(
    q, k, v, raw_q, raw_k, query_level, key_level, temperature, bias, gain, query, key, value, level, q_pos, k_pos,
    mask, seed, limit, scratch, lse, grad, delta, dk, dv, draw_k, dkey_level, n, f, C: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys, of their values, vectors and levels: over all query heads that share them."""
    pid = tl.program_id(0)
    own = _own_scratch(scratch, pid, C)
    blocks, kv_heads = tl.cdiv(n.lk, C.block_n), n.heads // n.groups
    for item in range(pid, n.batch * kv_heads * blocks, tl.num_programs(0)):
        start, b, kv = item % blocks * C.block_n, item // blocks // kv_heads, item // blocks % kv_heads
        j = start + tl.arange(0, C.block_n)
        kp = _key_positions(k_pos, b, j, start, n, C)
        kt = _rows(k, b, kv, j, n.lk, C.width, C.width_block)
        vt = _rows(v, b, kv, j, n.lk, C.value_width, C.value_block)
        tt = kt
        if C.raw_k:
            tt = _rows(raw_k, b, kv, j, n.lk, C.key_width, C.key_block)
        acc_k = tl.full([C.block_n, C.width_block], 0.0, tl.float32)
        acc_v = tl.full([C.block_n, C.value_block], 0.0, tl.float32)
        acc_t = tl.full([C.block_n, C.key_block], 0.0, tl.float32)
        begin, end = _query_range(start, n, C)
        for group in range(n.groups):
            h = kv * n.groups + group
            d, d_low = _key_numbers(key_level, b, h, j, n, C)
            acc_d = tl.full([C.block_n], 0.0, tl.float64)
            for at in range(begin, end, C.block_m):
                i = at + tl.arange(0, C.block_m)
                qp = _query_positions(q_pos, b, i, at, n, C)
                r = kp[None, :] - qp[:, None]
                seen = _visible(r, i, j, b, h, mask, n, C)
                if C.guarded:
                    if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                        acc_k, acc_v, acc_t, acc_d = _backward_keys_tile(
                            acc_k, acc_v, acc_t, acc_d, kt, vt, tt, d, d_low, q, raw_q, query_level, temperature, bias,
                            gain, query, key, value, level, lse, grad, delta, seed, limit, own, b, h, i, j, at, start,
                            qp, kp, r, seen, n, f, C,
                        )  # fmt: skip
                else:
                    acc_k, acc_v, acc_t, acc_d = _backward_keys_tile(
                        acc_k, acc_v, acc_t, acc_d, kt, vt, tt, d, d_low, q, raw_q, query_level, temperature, bias,
                        gain, query, key, value, level, lse, grad, delta, seed, limit, own, b, h, i, j, at, start, qp,
                        kp, r, seen, n,
                        f, C,
                    )  # fmt: skip
            if C.key_level:
                tl.store(dkey_level + (b.to(tl.int64) * n.heads + h) * n.lk + j, acc_d, mask=j < n.lk)
        if C.raw_k:
            _store_rows(draw_k, b, kv, j, n.lk, acc_t * f.scale, C.key_width, C.key_block)
        elif C.key:
            acc_k += acc_t
        _store_rows(dk, b, kv, j, n.lk, acc_k * f.scale, C.width, C.width_block)
        _store_rows(dv, b, kv, j, n.lk, acc_v, C.value_width, C.value_block)


@device_function
def _backward_keys_tile(
    acc_k, acc_v, acc_t, acc_d, kt, vt, tt, d, d_low, q, raw_q, query_level, temperature, bias, gain, query, key, value,
    level, lse, grad, delta, seed, limit, scratch, b, h, i, j, start, at, qp, kp, r, seen, n, f, C: tl.constexpr,
):  # fmt: skip
    """Adds a tile to the gradients of a block of keys."""
    col = _clip(r - n.first, n).to(tl.int32)
    low, high, gap, band = _kind(qp, kp, i, j, start, at, n, C)
    qt = _rows(q, b, h, i, n.lq, C.width, C.width_block)
    pt = qt
    if C.raw_q:
        pt = _rows(raw_q, b, h, i, n.lq, C.query_width, C.query_block)
    gt = _rows(grad, b, h, i, n.lq, C.value_width, C.value_block)
    e, e_low, tau = _query_numbers(query_level, temperature, b, h, i, n, C)
    largest, log_total, of_row = _query_sums(lse, delta, b, h, i, n)
    w, dx, _, _, _, factor, _, of_levels = _gradient_tile(
        qt, kt, pt, tt, gt, vt, e, e_low, d, d_low, tau, largest, log_total, of_row, gain, bias, query, key, value,
        level, seed, limit, b, h, i, j, r, seen, col, low, high, gap, band, scratch, n, f, C,
    )  # fmt: skip
    acc_v += _product(tl.trans(w), gt, C)
    if C.gain == 2:
        base = gain.data + h.to(tl.int64) * gain.head
        for c in range(low, high + 1):
            of_column = _product(tl.trans(tl.where(col == c, dx, 0.0)), qt, C)
            acc_k += of_column * _column_of(base, c, C.width, C.width_block)[None, :]
    else:
        acc_k += _product(tl.trans(dx * factor), qt, C)
    if C.key:
        acc_t += _for_keys(dx, key, h, col, low, high, gap, band, scratch, n, C.key_width, C.key_block, C)
    if C.key_level:
        acc_d += tl.sum(dx * of_levels, 0).to(tl.float64)
    return acc_k, acc_v, acc_t, acc_d


# ------------------------------------------------------------------------------------------------- dropout


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
    kept = _kept(i, j, b, h, seed, limit, n)
    tl.store(at, kept.to(tl.uint8), mask=(i < n.lq)[:, None] & (j < n.lk)[None, :])
