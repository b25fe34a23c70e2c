"""KERPLE: conditionally positive definite kernels of the distance. Chi et al. 2022, arXiv 2205.09921.

    kind=log      logit += −p · ln(1 + a·|r|)        p, a > 0
    kind=power    logit += −a · |r|^p                a > 0, 0 < p ≤ 2

The formulas use |a| and |p|, and p reflected at 2 for the power. So a parameter that an optimizer moves out of its
domain still gets a gradient and can return. The authors clamp the parameters at every step instead.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_choice, check_int, exact, wide
from locant.terms import Terms


class Kerple(Scheme):
    """Learned kernel per head. Parameters: 2 · n_heads."""

    takes_reals = True

    def __init__(self, *, kind: str = "log", n_heads: int) -> None:
        super().__init__()
        check_choice(self, "kind", kind, ("log", "power"))
        check_int(self, "n_heads", n_heads, at_least=1)
        self.kind, self.n_heads = kind, n_heads
        self.p = nn.Parameter(2 * torch.rand(n_heads))
        self.a = nn.Parameter(torch.rand(n_heads))

    def terms(self, r: Tensor) -> Terms:
        a, p = wide(self.a).abs()[:, None], wide(self.p).abs()[:, None]
        distance = exact(r.abs()).to(a.dtype)
        if self.kind == "log":
            return Terms(bias=-p * torch.log1p(a * distance))
        p = 2 - (2 - p).abs()
        apart = distance > 0  # 0^p is 0, but its derivative in p is NaN
        return Terms(bias=-a * torch.where(apart, distance, 1.0) ** p * apart)

    def parameter_count(self) -> int:
        return 2 * self.n_heads
