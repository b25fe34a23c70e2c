"""KERPLE: conditionally positive definite kernels of the distance. Chi et al. 2022, arXiv 2205.09921.

kind=log      logit += −p · ln(1 + a·|r|)        p, a > 0
kind=power    logit += −a · |r|^p                a > 0, 0 < p ≤ 2
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_choice, check_int, exact, wide
from locant.terms import Terms

FLOOR = 1e-2  # the authors keep both parameters above this


class Kerple(Scheme):
    """Learned kernel per head. Parameters: 2 · n_heads."""

    def __init__(self, *, kind: str = "log", n_heads: int) -> None:
        super().__init__()
        check_choice(self, "kind", kind, ("log", "power"))
        check_int(self, "n_heads", n_heads, at_least=1)
        self.kind, self.n_heads = kind, n_heads
        self.p = nn.Parameter(2 * torch.rand(n_heads))
        self.a = nn.Parameter(torch.rand(n_heads))

    def terms(self, r: Tensor) -> Terms:
        a = wide(self.a).clamp(min=FLOOR)[:, None]
        p = wide(self.p).clamp(min=FLOOR, max=2.0 if self.kind == "power" else None)[:, None]
        distance = exact(r.abs()).to(a.dtype)
        return Terms(bias=-p * torch.log1p(a * distance) if self.kind == "log" else -a * distance**p)

    def parameter_count(self) -> int:
        return 2 * self.n_heads
