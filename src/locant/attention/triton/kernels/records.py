"""What kernels receive, as records: tensors with strides, the sizes of a call, and the form it is compiled for."""

from __future__ import annotations

from typing import Any, NamedTuple


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
    again: bool  # whether every tile loads its queries and its keys, instead of keeping those of the block
    scratch: bool  # whether a program has scratch memory: for tables of vectors, and gradients of tables
    # which gradients `backward_queries` sums in buffers
    grad_bias: bool = False
    grad_gain: bool = False
    grad_query: bool = False
    grad_key: bool = False
    grad_value: bool = False
    grad_level: bool = False


class Tables(NamedTuple):
    """The tables of a call. Those that are not used are None."""

    bias: Any
    gain: Any
    query: Any
    key: Any
    value: Any
    level: Any


class FromQueries(NamedTuple):
    """What a call has for each query, in memory. `grad` is the gradient of the output: None in the forward pass."""

    q: Any
    vectors: Any
    level: Any
    temperature: Any
    grad: Any


class FromKeys(NamedTuple):
    """What a call has for each key, in memory."""

    k: Any
    v: Any
    vectors: Any
    level: Any


class Queries(NamedTuple):
    """A block of queries: q, p, and the high and the low part of its levels, and its temperatures."""

    content: Any
    vectors: Any
    level: Any
    level_low: Any
    temperature: Any


class Keys(NamedTuple):
    """A block of keys: k, t, and the high and the low part of its levels."""

    content: Any
    vectors: Any
    level: Any
    level_low: Any


class Tile(NamedTuple):
    """The pairs of a block of queries and a block of keys, in sequence b and head h."""

    b: Any
    h: Any
    start: Any  # the first query
    at: Any  # the first key
    i: Any  # [BM], the queries
    j: Any  # [BN], the keys
    seen: Any  # [BM, BN], whether a query may attend to a key
    col: Any  # [BM, BN], the columns of the pairs
    low: Any  # the first and the last column
    high: Any
    gap: Any  # the column of the first pair, before clipping
    single: Any  # whether it has one column; a constant if tiles cannot be far
    band: Any  # whether its positions are consecutive; a constant if all are
    scratch: Any
