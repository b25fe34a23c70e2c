"""FoPE: RoPE whose cosines and sines are mixtures of all frequencies. Hua et al. 2024, arXiv 2412.17739.

    (F_p x)_t = (x₁·cos'_t(p) − x₂·sin'_t(p),  x₂·cos'_t(p) + x₁·sin'_t(p))        for the pair t = (x₁, x₂)
    cos'_t(p) = Σ_f C_hft · cos ω_f p        sin'_t(p) = Σ_f S_hft · sin ω_f p        ω_f = theta^(−2f/D)

The coefficients are fixed: the identity plus normal noise of standard deviation spread / √(kept pairs), from `seed`.
They are used as drawn; the paper's listing divides each column by its sum, the authors' code does not. Frequencies
below 2π/length make less than one turn in training and are dropped, and the pairs of these frequencies stay as they
are (cos' = 1, sin' = 0). The authors' code sets both to 1, which turns by 45° and scales by √2: `rest=turned`. It also
mixes at most D/4 pairs; we mix all whose frequency is kept.

A mixture is no rotation, so the logit depends on both positions and not on r alone. By default every head has
coefficients of its own, as published. Grouped query heads share a key and so need `heads=shared`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locant.schemes.base import Scheme, check_choice, check_even, check_float, check_int, exact, wide
from locant.schemes.sinusoidal import frequencies

UNIT = 2.0**-26
"""A coefficient of 1 in the buffer."""


class Fope(Scheme):
    """Rotary positions with mixed frequencies. Parameters: 0."""

    shift_invariant = False
    takes_reals = True
    coefficients: Tensor
    """[2, H or 1, pairs, pairs], for cosines and sines: whole numbers of UNIT, saved with the weights.

    Not floating point: a model that is moved to half precision would take the coefficients along.
    """

    def __init__(
        self,
        *,
        theta: float = 10000.0,
        length: int = 512,
        spread: float = 0.3,
        seed: int = 0,
        heads: str = "own",
        rest: str = "still",
        n_heads: int,
        head_dim: int,
    ) -> None:
        super().__init__()
        check_float(self, "theta", theta, above=0)
        check_int(self, "length", length, at_least=7)  # the fastest pair has the frequency 1 > 2π/7
        check_float(self, "spread", spread, above=0)
        check_int(self, "seed", seed, at_least=0)
        check_choice(self, "heads", heads, ("own", "shared"))
        check_choice(self, "rest", rest, ("still", "turned"))
        check_int(self, "n_heads", n_heads, at_least=1)
        check_int(self, "head_dim", head_dim, at_least=2)
        check_even(self, "head_dim", head_dim)
        self.theta, self.length, self.spread, self.seed = theta, length, spread, seed
        self.heads, self.rest, self.n_heads, self.head_dim = heads, rest, n_heads, head_dim
        self.own_keys = heads == "own"
        kept = sum(theta ** (-2 * t / head_dim) >= 2 * math.pi / length for t in range(head_dim // 2))
        shape = (2, n_heads if heads == "own" else 1, kept, kept)
        self.register_buffer("coefficients", torch.zeros(shape, dtype=torch.int64))
        if not self.coefficients.is_meta:
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
            drawn = torch.eye(kept, dtype=torch.float64, device="cpu") + spread / math.sqrt(kept) * noise
            self.coefficients.copy_((drawn / UNIT).round().long())

    def mixtures(self) -> tuple[Tensor, Tensor]:
        """Returns C and S, [H or 1, pairs, pairs] in float64 where the device has it: mixed frequency, then pair."""
        cosines, sines = exact(self.coefficients) * UNIT
        return cosines, sines

    def rotate(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        if self.own_keys and k.shape[1] != self.n_heads:
            raise ValueError(
                f"{self}: every head has coefficients of its own, but {self.n_heads} query heads share {k.shape[1]} "
                f"key heads; use fope:heads=shared"
            )
        return self._turned(q, q_pos), self._turned(k, k_pos)

    def _turned(self, x: Tensor, pos: Tensor) -> Tensor:
        cosines, sines = self.mixtures()
        kept, half = cosines.shape[-1], self.head_dim // 2
        angle = (exact(pos)[..., None] * frequencies(self.head_dim, self.theta, pos.device)[:kept])[:, None]
        cos, sin = angle.cos() @ cosines, angle.sin() @ sines  # [B or 1, H or 1, L, kept]
        still = (*cos.shape[:-1], half - kept)
        cos = torch.cat([cos, cos.new_ones(still)], dim=-1)
        sin = torch.cat([sin, sin.new_full(still, 1.0 if self.rest == "turned" else 0.0)], dim=-1)
        first, second = wide(x).split(half, dim=-1)
        cos, sin = cos.to(first.dtype), sin.to(first.dtype)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
