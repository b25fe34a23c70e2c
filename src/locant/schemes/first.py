"""The first token is marked, and nothing else is said about where a token is.

    x_p = token_p + (first if p = 0 else rest)

What a table of absolute positions says when all its rows but the first become one: models lean on the first token, to
which heads look when they have nothing to look for (Xiao et al. 2023, arXiv 2309.17453), and know it by its position as
much as by being [CLS]. `locant.fit` leaves this behind when it takes a table away.
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
