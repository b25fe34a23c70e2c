"""Transformer-XL / XLNet relative positions. Dai et al. 2019, arXiv 1901.02860; Yang et al. 2019, arXiv 1906.08237.

    logit_ij = scale · ( (q_i + u)·k_j + (q_i + v)·a_r )        a_r = W s(i − j) = W s(−r)

s is the sinusoid of the distance i − j, first all sines, then all cosines. u and v are one vector per head each. In
`Terms`: query = a, key = u, score = v·a.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_even, check_float, check_int, exact, wide
from locant.schemes.sinusoidal import frequencies
from locant.terms import Terms


class XL(Scheme):
    """Projected sinusoids. Parameters: n_heads · head_dim · (d_model + 2)."""

    takes_reals = True

    def __init__(self, *, theta: float = 10000.0, n_heads: int, head_dim: int, d_model: int) -> None:
        super().__init__()
        check_float(self, "theta", theta, above=0)
        check_int(self, "n_heads", n_heads, at_least=1)
        check_int(self, "head_dim", head_dim, at_least=1)
        check_int(self, "d_model", d_model, at_least=2)
        check_even(self, "d_model", d_model)
        self.theta = theta
        self.n_heads, self.head_dim, self.d_model = n_heads, head_dim, d_model
        self.project = nn.Parameter(torch.randn(n_heads, head_dim, d_model) * 0.02)  # W
        self.content_bias = nn.Parameter(torch.zeros(n_heads, head_dim))  # u
        self.position_bias = nn.Parameter(torch.zeros(n_heads, head_dim))  # v

    def terms(self, r: Tensor) -> Terms:
        angle = exact(-r)[:, None] * frequencies(self.d_model, self.theta, r.device)
        project = wide(self.project)
        sinusoid = torch.cat([angle.sin(), angle.cos()], dim=-1).to(project.dtype)  # [R, d_model]
        vectors = torch.einsum("rm,hdm->hrd", sinusoid, project)
        return Terms(
            query=vectors,
            key=wide(self.content_bias)[:, None, :].expand_as(vectors),
            score=torch.einsum("hd,hrd->hr", wide(self.position_bias), vectors),
        )

    def parameter_count(self) -> int:
        return self.n_heads * self.head_dim * (self.d_model + 2)
