"""PoPE: the content decides how large a coordinate is, the position its phase. Gopalakrishnan et al. 2025.

    logit_ij = scale · Σ_c softplus(q_ic) · softplus(k_jc) · cos(r·θ_c + δ_hc)        θ_c = theta^(−c/D), c = 0 … D−1

arXiv 2509.10534. Every coordinate has a frequency of its own, where RoPE has one for two coordinates. So `rotate`
returns cosine and sine parts: queries and keys of 2·D numbers, and a content product that costs twice as much. The
learned phases δ are those of the keys. Grouped query heads share a key, so we subtract the phases from the angles of
the queries instead; the product is the same. They start at 0, as in PoPE-pytorch.

PoPE-pytorch clamps δ to [−2π, 0] on use. Every phase is equal to one in that range, so we take it as it is: a phase
that an optimizer moves out of the range keeps its gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_float, check_int, exact, wide


class Pope(Scheme):
    """Polar coordinates: sizes by content, phases by position. Parameters: n_heads · head_dim."""

    widens = takes_reals = True

    def __init__(self, *, theta: float = 10000.0, n_heads: int, head_dim: int) -> None:
        super().__init__()
        check_float(self, "theta", theta, above=0)
        check_int(self, "n_heads", n_heads, at_least=1)
        check_int(self, "head_dim", head_dim, at_least=1)
        self.theta, self.n_heads, self.head_dim = theta, n_heads, head_dim
        self.phase = nn.Parameter(torch.zeros(n_heads, head_dim))

    def rotate(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        speed = self.theta ** -(exact(torch.arange(self.head_dim, device=q_pos.device)) / self.head_dim)
        of_queries, of_keys = ((exact(pos)[..., None] * speed)[:, None] for pos in (q_pos, k_pos))
        return _polar(q, of_queries - wide(self.phase)[:, None]), _polar(k, of_keys)

    def parameter_count(self) -> int:
        return self.n_heads * self.head_dim


def _polar(x: Tensor, angle: Tensor) -> Tensor:
    """Numbers of the size softplus(x) at an angle, [B, H, L, 2·D]: real parts, then imaginary parts."""
    size = F.softplus(wide(x))
    return torch.cat([size * angle.cos().to(size.dtype), size * angle.sin().to(size.dtype)], dim=-1).to(x.dtype)
