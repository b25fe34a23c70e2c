"""ALiBi: a fixed linear penalty on distance. Press et al. 2022, arXiv 2108.12409.

    logit_ij = scale · q_i·k_j − m_h·|r|        m_h = 2^(−8h/H), h = 1 … H, for H a power of two

For other H: the slopes of the next smaller power of two, then every second slope of the next larger one.
Implementations differ if attention is not causal; this one is symmetric. `slopes=learned` makes the slopes parameters
that start at these values; `locant.fit` can set them. The paper found no gain in training them from scratch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_choice, check_int, exact, wide
from locant.terms import Terms


class Alibi(Scheme):
    """Linear penalty. Parameters: 0; n_heads with slopes=learned."""

    def __init__(self, *, slopes: str = "fixed", n_heads: int) -> None:
        super().__init__()
        check_choice(self, "slopes", slopes, ("fixed", "learned"))
        check_int(self, "n_heads", n_heads, at_least=1)
        self.slopes, self.n_heads = slopes, n_heads
        if slopes == "learned":
            self.slope = nn.Parameter(torch.tensor(alibi_slopes(n_heads)))

    def terms(self, r: Tensor) -> Terms:
        if self.slopes == "learned":
            slope = wide(self.slope)
        else:
            slope = torch.tensor(alibi_slopes(self.n_heads), device=r.device, dtype=exact(r).dtype)
        return Terms(bias=-slope[:, None] * r.abs())

    def parameter_count(self) -> int:
        return self.n_heads if self.slopes == "learned" else 0


def alibi_slopes(n_heads: int) -> list[float]:
    """Returns the slope m_h of each head."""
    below = 1 << (n_heads.bit_length() - 1)  # the largest power of two ≤ n_heads
    slopes = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    above = [2 ** (-4 * h / below) for h in range(1, 2 * below + 1)]
    return slopes + above[0::2][: n_heads - below]
