"""A content product that fades with distance. Chi et al. 2022 (KERPLE, Table 6), arXiv 2205.09921.

    logit_ij = scale · q_i·k_j · exp(−a_h·|r|^p_h)        a > 0, 0 < p ≤ 2, one of each per head

A far logit goes to 0 and not to −∞: far keys get equal weights; with a bias their weights go to 0. In the paper's table
a gain of this kind held its perplexity past the training length, and the same curve as a bias did not.

The formula uses |a|, and p reflected at 0 and 2, so a parameter that leaves its domain keeps its gradient. The start is
p = 1 and a = 1/T with T from 16 to 1,024 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_int, exact, wide
from locant.schemes.decay_lengths import LONGEST, decay_lengths
from locant.terms import Terms


class Fade(Scheme):
    """A gain that decays over the distance. Parameters: 2 · n_heads."""

    takes_reals = True

    def __init__(self, *, n_heads: int) -> None:
        super().__init__()
        check_int(self, "n_heads", n_heads, at_least=1)
        self.n_heads = n_heads
        self.a = nn.Parameter(torch.tensor([1 / length for length in decay_lengths(n_heads)]))
        self.p = nn.Parameter(torch.ones(n_heads))

    def terms(self, r: Tensor) -> Terms:
        a = wide(self.a).abs()[:, None]
        p = 2 - (wide(self.p).abs()[:, None] % 4 - 2).abs()
        distance = exact(r.abs()).to(a.dtype)
        apart = distance > 0  # 0^p is 0, but its derivative in p is NaN
        power = torch.where(apart, distance, 1.0) ** p * apart
        # e^−80 is negligible, and CPUs are ten times slower on values below the smallest normal float.
        return Terms(gain=torch.exp((-a * power).clamp(min=-80.0)))

    def parameter_count(self) -> int:
        return 2 * self.n_heads

    def parameter_scale(self, name: str) -> Tensor | float:
        """a spans decades: its scale is its own size."""
        return self.a.detach().abs().clamp(min=0.1 / LONGEST) if name == "a" else 1.0
