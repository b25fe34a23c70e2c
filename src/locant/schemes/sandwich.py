"""Sandwich: the inner product of sinusoidal embeddings as a bias. Chi et al. 2023, arXiv 2212.10356.

logit_ij = scale · q_i·k_j + (1 / c_h) · Σ_{t < width/2} cos(r · theta^(−2t/width))        c_h = 8h/H, h = 1 … H
"""

from __future__ import annotations

import torch
from torch import Tensor

from locant.schemes.base import Scheme, check_even, check_float, check_int, exact
from locant.schemes.sinusoidal import frequencies
from locant.terms import Terms


class Sandwich(Scheme):
    """Fixed sum of cosines that decays with distance. Parameters: 0."""

    takes_reals = True

    def __init__(self, *, width: int = 128, theta: float = 10000.0, n_heads: int) -> None:
        super().__init__()
        check_int(self, "width", width, at_least=2)
        check_even(self, "width", width)
        check_float(self, "theta", theta, above=0)
        check_int(self, "n_heads", n_heads, at_least=1)
        self.width, self.theta, self.n_heads = width, theta, n_heads

    def terms(self, r: Tensor) -> Terms:
        waves = torch.cos(exact(r)[:, None] * frequencies(self.width, self.theta, r.device)).sum(-1)  # [R]
        compression = 8 * exact(torch.arange(1, self.n_heads + 1, device=r.device)) / self.n_heads
        return Terms(bias=waves / compression[:, None])
