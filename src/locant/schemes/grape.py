"""GRAPE's additive form with gates of queries and keys (A-QK): ALiBi whose slope depends on both tokens.

    logit_ij = scale · q_i·k_j + r · ω_h · ( softplus(v_h·q_i / √D) + softplus(u_h·k_j / √D) )        j ≤ i

Zhang et al. 2025, arXiv 2512.07805, eq. 4.6. For j > i the formula would reward distance, so attention must be causal;
`two_sided=true` puts −|r| in place of r. v and u start at 0 and ω = exp(log_speed) > 0 at ALiBi's slopes divided by
2 ln 2, the sum of the two gates: the scheme starts as ALiBi. ω is learned here.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locant.schemes.alibi import alibi_slopes
from locant.schemes.base import Scheme, check_bool, check_int, wide
from locant.terms import Sides, Terms, Tokens


class Grape(Scheme):
    """A distance penalty by query and key. Parameters: (2 · head_dim + 1) · n_heads."""

    has_levels = takes_reals = True

    def __init__(self, *, two_sided: bool = False, n_heads: int, head_dim: int) -> None:
        super().__init__()
        check_bool(self, "two_sided", two_sided)
        check_int(self, "n_heads", n_heads, at_least=1)
        check_int(self, "head_dim", head_dim, at_least=1)
        self.two_sided, self.n_heads, self.head_dim = two_sided, n_heads, head_dim
        self.causal_only = not two_sided
        self.query_gate = nn.Parameter(torch.zeros(n_heads, head_dim))
        self.key_gate = nn.Parameter(torch.zeros(n_heads, head_dim))
        self.log_speed = nn.Parameter((torch.tensor(alibi_slopes(n_heads)) / (2 * math.log(2))).log())

    def terms(self, r: Tensor) -> Terms:
        speed = wide(self.log_speed).exp()[:, None]
        return Terms(level=speed * (-r.abs() if self.two_sided else r))

    def sides(self, tokens: Tokens) -> Sides:
        k = tokens.k.repeat_interleave(tokens.q.shape[1] // tokens.k.shape[1], dim=1)
        return Sides(query_level=self._gates(tokens.q, self.query_gate), key_level=self._gates(k, self.key_gate))

    def _gates(self, x: Tensor, gate: Tensor) -> Tensor:
        """softplus(gate·x / √D), [B, H, L], of x [B, H, L, D]."""
        x, gate = wide(x), wide(gate)
        dtype = torch.promote_types(x.dtype, gate.dtype)
        product = (x.to(dtype) @ gate.to(dtype)[..., None])[..., 0]
        return F.softplus(product / math.sqrt(self.head_dim))

    def parameter_count(self) -> int:
        return (2 * self.head_dim + 1) * self.n_heads
