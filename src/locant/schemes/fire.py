"""FIRE: a small network of the interpolated distance. Li et al. 2024, arXiv 2310.04418.

    logit_ij = scale · q_i·k_j + MLP_h( ln(c·|r| + 1) / ln(c·max(T, i) + 1) )        c, T > 0 learned

T = |threshold| · length. Dividing by a function of the query position i keeps the input of the network within [0, 1]
for a causal model of any length. It also makes FIRE depend on absolute positions: it is not shift-invariant.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_int, wide
from locant.terms import Terms


class Fire(Scheme):
    """Functional interpolation. Parameters: 2 + 2·width + (width + 1) · n_heads."""

    shift_invariant = False
    takes_reals = True

    def __init__(self, *, width: int = 32, length: int = 512, n_heads: int) -> None:
        super().__init__()
        check_int(self, "width", width, at_least=1)
        check_int(self, "length", length, at_least=1)
        check_int(self, "n_heads", n_heads, at_least=1)
        self.width, self.length, self.n_heads = width, length, n_heads
        self.c = nn.Parameter(torch.tensor(0.1))
        self.threshold = nn.Parameter(torch.tensor(1.0))
        self.hidden = nn.Linear(1, width)
        self.out = nn.Linear(width, n_heads)

    def terms(self, r: Tensor) -> Terms:
        # Taken here, not in `pair`: the backward pass calls `pair` again, perhaps after the parameters have changed.
        c = wide(self.c).abs() + 1e-6  # never 0/0
        threshold = wide(self.threshold).abs() * self.length
        w1, b1, w2, b2 = map(wide, (self.hidden.weight, self.hidden.bias, self.out.weight, self.out.bias))

        def pair(q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float, visible: Tensor | None) -> Tensor:
            distance = (k_pos[:, None, :] - q_pos[:, :, None]).abs().to(c.dtype)  # [B or 1, Lq, Lk]
            limit = torch.maximum(threshold, q_pos.to(c.dtype)).clamp(min=1.0)[:, :, None]
            share = torch.log(c * distance + 1) / torch.log(c * limit + 1)
            hidden = F.relu(F.linear(share[..., None], w1, b1))
            return F.linear(hidden, w2, b2).movedim(-1, 1)  # [B or 1, H, Lq, Lk]

        return Terms(pair=pair)

    def parameter_count(self) -> int:
        return 2 + 2 * self.width + (self.width + 1) * self.n_heads
