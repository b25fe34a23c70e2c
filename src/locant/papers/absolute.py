"""In which sense method 4 of Huang et al. generalises absolute position embeddings, in numbers.

Absolute embeddings add p_i to the query and p_j to the key (the projections of one row each). Method 4 adds one vector
a_ij to both and takes a·a away:

    absolute   (q_i + p_i)·(k_j + p_j)                = q_i·k_j + q_i·p_j + k_j·p_i + p_i·p_j
    method 4   (q_i + a_ij)·(k_j + a_ij) − a_ij·a_ij  = q_i·k_j + q_i·a_ij + k_j·a_ij

Method 4 has a vector per pair where absolute embeddings have one per position, so it is more general in its index. But
its vector meets both q and k, and absolute embeddings need p_j for q and p_i for k. Both at once need coordinates of
their own. With

    q' = (q, q, 0, 1)     k' = (k, 0, k, 0)     a_ij = (0, p_j, p_i, p_i·p_j)

we get q'·k' = q·k, q'·a = q·p_j + p_i·p_j and k'·a = k·p_i: method 4 in a head of 3·d + 1 coordinates, with a table
over pairs, is absolute attention. A table over offsets j − i, which is what method 4 trains, can be that table for one
query at a time, or for all queries if all rows p are equal.

All differences are the largest over queries and coordinates of the attention output, in double precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locant.attention.attend import attend
from locant.schemes.huang import Huang4

LENGTH, HEADS, WIDTH = 12, 2, 8
"""Tokens, heads and coordinates of a head in these numbers."""


@dataclass(frozen=True)
class Inputs:
    """Random queries, keys and values [1, H, L, D], vectors by offset [2·L − 1, D], and rows by position [L, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    query_rows: Tensor  # p as it is added to queries: W_Q p
    key_rows: Tensor  # p as it is added to keys: W_K p

    @classmethod
    def random(cls, seed: int = 0) -> Inputs:
        """Returns standard normal numbers in double precision."""
        made = torch.Generator().manual_seed(seed)
        shapes = [(1, HEADS, LENGTH, WIDTH)] * 3 + [(2 * LENGTH - 1, WIDTH)] + [(LENGTH, WIDTH)] * 2
        return cls(*(torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes))


def as_written(x: Inputs, *, minus_square: bool = True) -> float:
    """Returns the difference of method 4 to attention over q_i + a and k_j + a, minus a·a.

    Without `minus_square` the term a·a stays, and the two must differ: a control.
    """
    r = torch.arange(LENGTH)[None, :] - torch.arange(LENGTH)[:, None]
    a = x.offsets[r + LENGTH - 1]  # [i, j, D]
    queries, keys = x.q[:, :, :, None] + a, x.k[:, :, None] + a
    logits = (queries * keys).sum(-1)
    if minus_square:
        logits = logits - a.square().sum(-1)
    expected = (logits / WIDTH**0.5).softmax(-1) @ x.v
    return _gap(attend(x.q, x.k, x.v, method_4(x.offsets), impl="eager"), expected)


def equal_rows(x: Inputs) -> float:
    """Returns the difference to absolute embeddings whose rows are all the same p, with the table a_r = p."""
    p = x.query_rows[:1]
    table = p.expand(2 * LENGTH - 1, -1)
    same = p.expand(LENGTH, -1)
    found = attend(x.q, x.k, x.v, method_4(table), impl="eager")
    return _gap(found, absolute_attention(x, same, same))


def by_query(x: Inputs, *, table_of: int | None = None) -> float:
    """Returns the difference to absolute embeddings of method 4 with own coordinates, over all queries.

    Every query has the table of its own row. With `table_of`, all have the table of that one query: a control.
    """
    ones, zeros = torch.ones_like(x.q[..., :1]), torch.zeros_like(x.q)
    queries = torch.cat([x.q, x.q, zeros, ones], dim=-1)
    keys = torch.cat([x.k, zeros, x.k, 0 * ones], dim=-1)
    rows = []
    for i in range(LENGTH):
        table = pair_table(x, i if table_of is None else table_of)
        rows.append(
            attend(
                queries[:, :, i : i + 1], keys, x.v, method_4(table), q_pos=torch.tensor([i]),
                k_pos=torch.arange(LENGTH), scale=WIDTH**-0.5, impl="eager",
            )
        )  # fmt: skip
    return _gap(torch.cat(rows, dim=2), absolute_attention(x, x.query_rows, x.key_rows))


def pair_table(x: Inputs, i: int) -> Tensor:
    """Returns the vectors a_ij of query i by offset j − i, [2·L − 1, 3·D + 1]; zeros where there is no key."""
    table = x.q.new_zeros(2 * LENGTH - 1, 3 * WIDTH + 1)
    for j in range(LENGTH):
        p_i, p_j = x.query_rows[i], x.key_rows[j]
        table[j - i + LENGTH - 1] = torch.cat([torch.zeros_like(p_i), p_j, p_i, (p_i @ p_j)[None]])
    return table


def absolute_attention(x: Inputs, query_rows: Tensor, key_rows: Tensor) -> Tensor:
    """Returns attention over q_i + p_i and k_j + p_j."""
    return attend(x.q + query_rows, x.k + key_rows, x.v, None, impl="eager")


def method_4(table: Tensor) -> Huang4:
    """Returns method 4 with these vectors [2·clip + 1, D], shared by all heads."""
    scheme = Huang4(clip=len(table) // 2, heads="shared", n_heads=HEADS, head_dim=table.shape[1]).double()
    scheme.table.data.copy_(table[None])
    return scheme


def _gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max())
