"""A free bias for every offset up to a distance, as in Swin and other models with a learned relative bias.

    logit_ij = scale · q_i·k_j + table[h, min(max(r, −clip), clip)]

Liu et al. 2021, arXiv 2103.14030, in one dimension. The bias [L, L] of a head is a Toeplitz matrix. Up to the distance
`clip` it can be any, so it is an upper bound for TISA, T5, ALiBi and KERPLE.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_int, wide
from locant.terms import Terms


class Toeplitz(Scheme):
    """A bias per head and offset. Parameters: (2 · clip + 1) · n_heads."""

    def __init__(self, *, clip: int = 128, n_heads: int) -> None:
        super().__init__()
        check_int(self, "clip", clip, at_least=0)
        check_int(self, "n_heads", n_heads, at_least=1)
        self.clip, self.n_heads = clip, n_heads
        self.table = nn.Parameter(torch.randn(n_heads, 2 * clip + 1) * 0.02)

    @property
    def reach(self) -> int:
        return self.clip

    def terms(self, r: Tensor) -> Terms:
        return Terms(bias=wide(self.table)[:, r.clamp(-self.clip, self.clip) + self.clip])

    def parameter_count(self) -> int:
        return (2 * self.clip + 1) * self.n_heads

    def start_from_curve(self, offsets: Tensor, bias: Tensor, weight: Tensor) -> None:
        near = offsets.abs() <= self.clip
        columns = (offsets + self.clip)[near]
        low, high = int(columns.min()), int(columns.max())
        table = torch.zeros(self.table.shape, dtype=torch.float64)
        table[:, columns] = bias[:, near]
        table[:, :low] = table[:, low : low + 1]  # beyond the measured offsets: the value of the farthest one
        table[:, high + 1 :] = table[:, high : high + 1]
        self.table.data.copy_(table)
