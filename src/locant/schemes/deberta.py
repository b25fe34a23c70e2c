"""DeBERTa's disentangled attention. He et al. 2021, arXiv 2006.03654; log buckets from DeBERTa-v3, arXiv 2111.09543.

    logit_ij = scale · ( q_i·k_j + q_i·K_b + k_j·Q_b )        b = bucket(i − j) = bucket(−r),  scale = 1/√(3·head_dim)

K and Q are the position vectors after the layer's key and query projections. DeBERTa projects one table in every layer;
here the projected vectors are the parameters. The paper writes Q_{δ(j,i)}, but the published code, with which all
checkpoints were trained, uses bucket(i − j) on both sides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_int, wide
from locant.terms import Terms


class Deberta(Scheme):
    """Disentangled tables. Parameters: 2 · n_heads · 2·buckets · head_dim."""

    def __init__(self, *, buckets: int = 256, max_distance: int = 512, n_heads: int, head_dim: int) -> None:
        super().__init__()
        check_int(self, "buckets", buckets, at_least=4)
        if buckets % 2:  # with 2m + 1 the logarithm would not end at max_distance
            raise ValueError(f"deberta: buckets must be even, one half for near and one for far; got {buckets}")
        check_int(self, "max_distance", max_distance, at_least=buckets // 2 + 2)
        check_int(self, "n_heads", n_heads, at_least=1)
        check_int(self, "head_dim", head_dim, at_least=1)
        self.buckets, self.max_distance = buckets, max_distance
        self.n_heads, self.head_dim = n_heads, head_dim
        self.key_table = nn.Parameter(torch.randn(n_heads, 2 * buckets, head_dim) * 0.02)  # K
        self.query_table = nn.Parameter(torch.randn(n_heads, 2 * buckets, head_dim) * 0.02)  # Q

    def bucket(self, r: Tensor) -> Tensor:
        """Returns the table row of each offset: i − j up to buckets/2, logarithmic beyond, shifted to start at 0."""
        distance, middle = -r, self.buckets // 2
        # Both logarithms in float32, as in the published code: the edges of the buckets depend on the rounding.
        far = distance.abs().clamp(min=middle).float()
        octaves = torch.log(far / middle) / torch.log(
            torch.tensor((self.max_distance - 1) / middle, dtype=torch.float32)
        )
        grouped = (torch.ceil(octaves * (middle - 1)) + middle).long() * distance.sign()
        signed = torch.where(distance.abs() <= middle, distance, grouped)
        return (signed + self.buckets).clamp(0, 2 * self.buckets - 1)

    @property
    def reach(self) -> int:
        return self.max_distance + self.max_distance // 10_000  # float32 may reach the last bucket a little later

    def terms(self, r: Tensor) -> Terms:
        row = self.bucket(r)
        return Terms(query=wide(self.key_table)[:, row], key=wide(self.query_table)[:, row])

    def scale(self, head_dim: int) -> float:
        return 1 / math.sqrt(3 * head_dim)

    def parameter_count(self) -> int:
        return 2 * self.n_heads * 2 * self.buckets * self.head_dim
