"""ALiBi: a fixed linear penalty on distance. Press et al. 2022, arXiv 2108.12409.

    logit_ij = scale · q_i·k_j − m_h·|r|        m_h = 2^(−8h/H), h = 1 … H, for H a power of two

For other H: the slopes of the next smaller power of two, then every second slope of the next larger one.
Implementations differ if attention is not causal; this one is symmetric. `slopes=learned` makes the slopes parameters
that start at these values; `locant.fit` can set them. The paper found no gain in training them from scratch.

Falcon differs in two ways, which are options so that its models can be read exactly. `scaled=true` adds the penalty
before the logits are scaled. `rounding=bfloat16` computes, in causal attention, what is the same but for rounding:

    logit_ij = scale · q_i·k_j + round(round(m_h)·p_j)        p_j the position of the key, all in bfloat16
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_bool, check_choice, check_int, exact, wide
from locant.terms import Terms


class Alibi(Scheme):
    """Linear penalty. Parameters: 0; n_heads with slopes=learned."""

    takes_reals = True

    def __init__(self, *, slopes: str = "fixed", scaled: bool = False, rounding: str = "none", n_heads: int) -> None:
        super().__init__()
        check_choice(self, "slopes", slopes, ("fixed", "learned"))
        check_bool(self, "scaled", scaled)
        check_choice(self, "rounding", rounding, ("none", "bfloat16"))
        check_int(self, "n_heads", n_heads, at_least=1)
        if slopes == "learned" and rounding != "none":
            raise ValueError(f"alibi: slopes=learned cannot be trained through rounding={rounding}; leave one out")
        self.slopes, self.scaled, self.rounding, self.n_heads = slopes, scaled, rounding, n_heads
        self.shift_invariant = rounding == "none"
        self.ordered = rounding != "none"  # the position of the key stands for its distance
        if slopes == "learned":
            self.slope = nn.Parameter(torch.tensor(alibi_slopes(n_heads)))

    def terms(self, r: Tensor) -> Terms:
        if self.slopes == "learned":
            slope = wide(self.slope)
        else:
            slope = torch.tensor(alibi_slopes(self.n_heads), device=r.device, dtype=exact(r).dtype)
        if self.rounding == "bfloat16":
            return Terms(pair=_Rounded(slope, self.scaled))
        penalty = -slope[:, None] * r.abs()
        return Terms(score=penalty) if self.scaled else Terms(bias=penalty)

    def parameter_count(self) -> int:
        return self.n_heads if self.slopes == "learned" else 0


class _Rounded:
    """round(round(m_h)·p_j), times the scale of the logits if the penalty is scaled."""

    def __init__(self, slope: Tensor, scaled: bool) -> None:
        self.slope, self.scaled = slope, scaled

    def __call__(
        self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float, visible: Tensor | None
    ) -> Tensor:
        penalty = self.slope.bfloat16()[:, None] * k_pos[:, None, :].bfloat16()  # [B or 1, H, Lk]
        return penalty[:, :, None].to(q.dtype) * (scale if self.scaled else 1.0)


def alibi_slopes(n_heads: int) -> list[float]:
    """Returns the slope m_h of each head."""
    below = 1 << (n_heads.bit_length() - 1)  # the largest power of two ≤ n_heads
    slopes = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    above = [2 ** (-4 * h / below) for h in range(1, 2 * below + 1)]
    return slopes + above[0::2][: n_heads - below]
