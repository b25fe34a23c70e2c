"""Learned absolute positions: a table added to the token embeddings (BERT, GPT-2).

    x_p = token_p + table[p]            0 ≤ p < length

Gehring et al. 2017, arXiv 1705.03122; Devlin et al. 2019, arXiv 1810.04805.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_int, check_positions, readable, wide


class Learned(Scheme):
    """One vector per position. Parameters: length · d_model."""

    shift_invariant = False

    def __init__(self, *, length: int = 512, d_model: int) -> None:
        super().__init__()
        check_int(self, "length", length, at_least=1)
        check_int(self, "d_model", d_model, at_least=1)
        self.length = self.max_length = length
        self.d_model = d_model
        self.table = nn.Parameter(torch.randn(length, d_model) * 0.02)

    def embed(self, pos: Tensor) -> Tensor:
        pos = check_positions(self, pos)
        # Where the values cannot be read, F.embedding itself rejects positions out of range.
        if readable(pos) and pos.numel():
            low, high = int(pos.min()), int(pos.max())
            if low < 0 or high >= self.length:
                bad = low if low < 0 else high
                raise ValueError(
                    f"learned: position {bad} is outside the table (0 … {self.length - 1}); "
                    f"use learned:length={max(high, 0) + 1} or a scheme without a length, such as tisa or alibi"
                )
        return F.embedding(pos, wide(self.table)).to(self.table.dtype)  # [*pos.shape, d_model]

    @property
    def position_table(self) -> Tensor:
        return self.table

    def parameter_count(self) -> int:
        return self.length * self.d_model
