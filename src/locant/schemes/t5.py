"""T5's relative bias: one learned bias per head and bucket of offsets.

    logit_ij = scale · q_i·k_j + table[h, bucket(r)]

Raffel et al. 2020, arXiv 1910.10683. If bidirectional, half of the buckets are for r > 0. On each side, half of the
buckets hold one distance each, and the others grow logarithmically up to `max_distance`. T5 itself uses scale = 1 and
one table for all layers; both are decisions of the model, not of the scheme.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_bool, check_int, wide
from locant.terms import Terms


class T5(Scheme):
    """Bucketed bias. Parameters: buckets · n_heads."""

    def __init__(self, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True, n_heads: int) -> None:
        super().__init__()
        check_bool(self, "bidirectional", bidirectional)
        sides = 2 if bidirectional else 1
        check_int(self, "buckets", buckets, at_least=2 * sides)
        check_int(self, "n_heads", n_heads, at_least=1)
        if buckets % sides:
            raise ValueError(f"t5: buckets must be even, half of them for r > 0; got {buckets}")
        check_int(self, "max_distance", max_distance, at_least=buckets // (2 * sides) + 1)
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.n_heads = n_heads
        self.table = nn.Parameter(torch.randn(n_heads, buckets) * 0.02)

    def bucket(self, r: Tensor) -> Tensor:
        """Returns the bucket of each offset."""
        side = self.buckets // 2 if self.bidirectional else self.buckets
        start = (r > 0) * side if self.bidirectional else 0
        distance = r.abs() if self.bidirectional else (-r).clamp(min=0)
        single = side // 2  # each distance below this has its own bucket
        # float32, as in published models: the edges of the buckets depend on the rounding
        octaves = torch.log(distance.clamp(min=1).float() / single) / math.log(self.max_distance / single)
        grouped = (single + (octaves * (side - single)).long()).clamp(max=side - 1)
        return start + torch.where(distance < single, distance, grouped)

    @property
    def reach(self) -> int:
        return self.max_distance

    def terms(self, r: Tensor) -> Terms:
        return Terms(bias=wide(self.table)[:, self.bucket(r)])

    @property
    def bucket_table(self) -> Tensor:
        return self.table

    def parameter_count(self) -> int:
        return self.buckets * self.n_heads
