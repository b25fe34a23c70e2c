"""Inkling's relative logits: the bias of every query is its own mixture of a few learned curves over the distance.

    logit_ij = τ_i · ( scale · q_i·k_j + Σ_d (W_h x_i)_d · P[d, i − j] )        0 ≤ i − j < extent; no bias elsewhere
    τ_i      = 1 + alpha · ln max(1, (i + 1) / n0)                              without alpha: 1

Thinking Machines 2026, as in transformers' modeling_inkling.py. x_i is the hidden state from which the layer computes
its queries, so `attend` needs x. The `width` curves P are shared by the heads; the mixture W_h x_i is not. The bias is
outside the scale. It is 0 for later keys, and causality is left to the mask.

Inkling's own layers have RMS-normed queries and keys and the scale 1/D. In other models the scheme keeps 1/√D. Only its
global layers have a temperature: `alpha=0.1,n0=…` switches it on. Positions below n0, negative ones too, have τ = 1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_float, check_int, exact, wide
from locant.terms import Sides, Terms, Tokens


class Inkling(Scheme):
    """Learned curves, mixed by every query. Parameters: width · (n_heads · d_model + extent)."""

    reads_queries = True
    read_parameters = ("project",)

    def __init__(
        self,
        *,
        extent: int = 1024,
        width: int = 16,
        alpha: float = 0.0,
        n0: int = 0,
        n_heads: int,
        d_model: int,
    ) -> None:
        super().__init__()
        check_int(self, "extent", extent, at_least=1)
        check_int(self, "width", width, at_least=1)
        check_int(self, "n0", n0, at_least=0)
        if alpha != 0:
            check_float(self, "alpha", alpha, above=0)
        if (alpha == 0) != (n0 == 0):
            raise ValueError(f"inkling: the temperature needs alpha and n0, both above 0; got alpha={alpha}, n0={n0}")
        check_int(self, "n_heads", n_heads, at_least=1)
        check_int(self, "d_model", d_model, at_least=1)
        self.extent, self.width, self.alpha, self.n0 = extent, width, alpha, n0
        self.n_heads, self.d_model = n_heads, d_model
        self.read_width = width
        self.shift_invariant = alpha == 0
        # The start of transformers: a bias of a few hundredths.
        self.project = nn.Parameter(torch.randn(n_heads * width, d_model) * 0.02)
        self.profiles = nn.Parameter(torch.randn(width, extent) * 0.02)

    @property
    def reach(self) -> int:
        return self.extent

    def basis(self, r: Tensor) -> Tensor:
        distance = -r
        inside = (distance >= 0) & (distance < self.extent)
        columns = wide(self.profiles)[:, distance.clamp(0, self.extent - 1)] * inside
        return columns.mT[None]  # [1, R, width]

    def terms(self, r: Tensor) -> Terms:
        return Terms(query_side=self.basis(r))

    def read(self, x: Tensor) -> Tensor:
        x, weight = wide(x), wide(self.project)
        dtype = torch.promote_types(x.dtype, weight.dtype)
        mixture = F.linear(x.to(dtype), weight.to(dtype))
        return mixture.view(*x.shape[:2], self.n_heads, self.width).transpose(1, 2)

    def sides(self, tokens: Tokens) -> Sides:
        assert tokens.read_q is not None
        if tokens.scale == 0:
            raise ValueError(f"{self}: it divides by the scale of the logits, which must not be 0; got scale=0")
        temperature = None
        if self.alpha:
            tokens_seen = exact(tokens.q_pos + 1)
            growth = torch.log((tokens_seen / self.n0).clamp(min=1.0))
            temperature = (1 + self.alpha * growth)[:, None]
        return Sides(query=tokens.read_q / tokens.scale, temperature=temperature)

    def parameter_count(self) -> int:
        return self.width * (self.n_heads * self.d_model + self.extent)

    def parameter_scale(self, name: str) -> float:
        """A change of 1/√d_model in W changes the mixture by 1, for hidden states of size 1."""
        return 1 / math.sqrt(self.d_model) if name == "project" else 1.0
