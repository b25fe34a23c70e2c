"""One vector for the first token and another for all others.

    x_p = token_p + (first if p = 0 else rest)

This is a table of absolute positions whose rows from 1 on are equal. Heads that find no match attend to the first token
(Xiao et al. 2023, arXiv 2309.17453), and models recognize it by its position as much as by being [CLS]. So `locant.fit`
keeps these two vectors when it removes a table.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_int, check_positions


class First(Scheme):
    """Two vectors. Parameters: 2 · d_model."""

    shift_invariant = False

    def __init__(self, *, d_model: int) -> None:
        super().__init__()
        check_int(self, "d_model", d_model, at_least=1)
        self.d_model = d_model
        self.first = nn.Parameter(torch.randn(d_model) * 0.02)
        self.rest = nn.Parameter(torch.randn(d_model) * 0.02)

    def embed(self, pos: Tensor) -> Tensor:
        return torch.where((check_positions(self, pos) == 0)[..., None], self.first, self.rest)

    def parameter_count(self) -> int:
        return 2 * self.d_model

    @torch.no_grad()
    def start_from_table(self, first: Tensor, rest: Tensor) -> None:
        self.first.copy_(first)
        self.rest.copy_(rest)
