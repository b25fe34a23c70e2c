"""xPos: RoPE with a decay over distance. Sun et al. 2023, arXiv 2212.10554.

    q_i → ζ^{i/base} R_i q_i        k_j → ζ^{−j/base} R_j k_j        ζ_t = (2t/d + γ) / (1 + γ)

The pair t of the product is multiplied by ζ_t^{(i−j)/base}. This decays towards the past and grows towards the future,
so xPos is meant for causal models. The powers are relative to the middle position of each row. If they would overflow
the dtype of q and k, the result is float64; if they would overflow float64, `rotate` raises. Compiled code and
vmap cannot read positions: they always use float64, and return inf or NaN in the last case.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locant.schemes.base import Scheme, check_choice, check_even, check_float, check_int, exact, readable
from locant.schemes.rope import LAYOUTS, rotated
from locant.schemes.sinusoidal import frequencies


class Xpos(Scheme):
    """Rotary positions with decay. Parameters: 0."""

    grows = takes_reals = ordered = True

    def __init__(
        self,
        *,
        theta: float = 10000.0,
        base: float = 512.0,
        gamma: float = 0.4,
        layout: str = "interleaved",
        head_dim: int,
    ) -> None:
        super().__init__()
        for name, value in {"theta": theta, "base": base, "gamma": gamma}.items():
            check_float(self, name, value, above=0)
        check_choice(self, "layout", layout, LAYOUTS)
        check_int(self, "head_dim", head_dim, at_least=2)
        check_even(self, "head_dim", head_dim)
        self.planes = (layout, head_dim if layout == "half" else 0)
        self.theta, self.base, self.gamma, self.layout, self.head_dim = theta, base, gamma, layout, head_dim

    def rotate(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        device = q_pos.device
        speed = frequencies(self.head_dim, self.theta, device)
        share = exact(torch.arange(0, self.head_dim, 2, device=device)) / self.head_dim
        log_zeta = torch.log((share + self.gamma) / (1 + self.gamma))  # negative, [pairs]
        first = torch.minimum(q_pos.amin(-1), k_pos.amin(-1))
        last = torch.maximum(q_pos.amax(-1), k_pos.amax(-1))
        middle = (exact(first + last) / 2)[:, None]  # [B or 1, 1]

        if not readable(middle):  # the span is not known
            q, k = q.double(), k.double()
        else:
            span = int((last - first).max())
            growth = -math.log(self.gamma / (1 + self.gamma)) * span / self.base  # log of the largest product
            if growth > math.log(torch.finfo(torch.float64).max) / 2:
                raise ValueError(
                    f"xpos: the positions span {span} and ζ^(r/{self.base:g}) overflows float64; "
                    f"use a larger base (xpos:base=…) or rope"
                )
            if growth > math.log(torch.finfo(q.dtype).max) / 2:
                q, k = q.double(), k.double()

        def turned(x: Tensor, pos: Tensor, sign: int) -> Tensor:
            fading = torch.exp(sign * (exact(pos) - middle)[..., None] / self.base * log_zeta)
            return rotated(x, exact(pos)[..., None] * speed, self.layout, fading)

        return turned(q, q_pos, +1), turned(k, k_pos, -1)
