"""ALiBi: a fixed linear penalty on distance. Press et al. 2022, arXiv 2108.12409.

    logit_ij = scale · q_i·k_j − m_h·|r|        m_h = 2^(−8h/H), h = 1 … H, for H a power of two

For other H: the slopes of the power of two below, then every other slope of the power above. Implementations
differ where attention is not causal; this one is symmetric.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locant.schemes.base import Scheme, check_int, exact
from locant.terms import Terms


class Alibi(Scheme):
    """Linear penalty. Parameters: 0."""

    def __init__(self, *, n_heads: int) -> None:
        super().__init__()
        check_int(self, "n_heads", n_heads, at_least=1)
        self.n_heads = n_heads

    def terms(self, r: Tensor) -> Terms:
        slopes = torch.tensor(alibi_slopes(self.n_heads), device=r.device, dtype=exact(r).dtype)
        return Terms(bias=-slopes[:, None] * r.abs())


def alibi_slopes(n_heads: int) -> list[float]:
    below = 1 << (n_heads.bit_length() - 1)  # the largest power of two ≤ n_heads
    slopes = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    above = [2 ** (-4 * h / below) for h in range(1, 2 * below + 1)]
    return slopes + above[0::2][: n_heads - below]
