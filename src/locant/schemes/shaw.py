"""Relative position vectors added to keys and values. Shaw et al. 2018, arXiv 1803.02155.

    logit_ij = scale · q_i·(k_j + aK_r)        out_i = Σ_j p_ij (v_j + aV_r)        r clipped to ±clip

p are the attention weights. `values=false` leaves aV out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_bool, check_int
from locant.schemes.table import rows, table_heads
from locant.terms import Terms


class Shaw(Scheme):
    """Two clipped tables. Parameters: 2 · (2·clip + 1) · head_dim, × n_heads with heads=own; half without values."""

    def __init__(
        self, *, clip: int = 64, heads: str = "shared", values: bool = True, n_heads: int, head_dim: int
    ) -> None:
        super().__init__()
        h = table_heads(self, clip, heads, n_heads)
        check_int(self, "head_dim", head_dim, at_least=1)
        check_bool(self, "values", values)
        self.clip, self.heads, self.values = clip, heads, values
        self.n_heads, self.head_dim = n_heads, head_dim
        self.table = nn.Parameter(torch.randn(h, 2 * clip + 1, head_dim) * 0.02)
        if values:
            self.value_table = nn.Parameter(torch.randn(h, 2 * clip + 1, head_dim) * 0.02)

    @property
    def reach(self) -> int:
        return self.clip

    def terms(self, r: Tensor) -> Terms:
        return Terms(
            query=rows(self.table, r, self.clip),
            value=rows(self.value_table, r, self.clip) if self.values else None,
        )

    def parameter_count(self) -> int:
        tables = 2 if self.values else 1
        return tables * (1 if self.heads == "shared" else self.n_heads) * (2 * self.clip + 1) * self.head_dim

    def clear_values(self) -> None:
        if self.values:
            self.value_table.data.zero_()
