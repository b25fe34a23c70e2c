"""RoPE: queries and keys are rotated by their position, so their product depends on the offset.

    (R_p x)_t : the pair t is rotated by the angle p · theta^(−2t/d)        (R_i q)·(R_j k) = qᵀ R_{j−i} k

Su et al. 2021, arXiv 2104.09864. `layout=half` pairs coordinate t with t + d/2 (Llama, GPT-NeoX); `interleaved`
pairs 2t with 2t + 1 (the paper, GPT-J). `partial` is the share of the head, from its first coordinate, that is rotated.

Scalings, for sequences longer than the training length (`original`):

    linear      positions divided by factor                                    Chen et al. 2023, arXiv 2306.15595
    ntk         theta · factor^(d/(d−2)), at every length                      bloc97 2023
    dynamic     theta · (factor·n/original − factor + 1)^(d/(d−2)), n > original the row's length
    yarn        low frequencies divided by factor, high ones kept, a ramp between   Peng et al. 2023, arXiv 2309.00071
    llama3      the same idea with Llama 3.1's ramp over wavelengths

With `dynamic` every angle depends on the final length. It is not shift-invariant, and past `original` decoding one
token at a time differs from the full pass. The length is computed per row of the batch (its largest position + 1), so
the result of a row does not depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from locant.schemes.base import Scheme, check_choice, check_even, check_float, check_int, exact, wide
from locant.schemes.sinusoidal import frequencies

LAYOUTS = ("half", "interleaved")


class Rope(Scheme):
    """Rotary positions. Parameters: 0."""

    def __init__(
        self,
        *,
        theta: float = 10000.0,
        layout: str = "half",
        partial: float = 1.0,
        scaling: str = "none",
        factor: float = 1.0,
        original: int = 2048,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        low: float = 1.0,
        high: float = 4.0,
        head_dim: int,
    ) -> None:
        super().__init__()
        check_float(self, "theta", theta, above=0)
        check_choice(self, "layout", layout, LAYOUTS)
        check_float(self, "partial", partial, above=0)
        check_choice(self, "scaling", scaling, SCALINGS)
        check_float(self, "factor", factor, above=0)
        check_int(self, "original", original, at_least=1)
        check_int(self, "head_dim", head_dim, at_least=2)
        for name, value in {"beta_fast": beta_fast, "beta_slow": beta_slow, "low": low, "high": high}.items():
            check_float(self, name, value, above=0)
        if partial > 1:
            raise ValueError(f"rope: partial is a share of the head and must be at most 1, got {partial:g}")
        if high <= low:
            raise ValueError(f"rope: high must be above low = {low:g}, got {high:g}")
        if factor != 1 and scaling == "none":
            raise ValueError(f"rope: factor={factor:g} does nothing without scaling; add scaling=linear, ntk, yarn, …")
        self.theta, self.layout, self.partial = theta, layout, partial
        self.scaling, self.factor, self.original = scaling, factor, original
        self.beta_fast, self.beta_slow, self.low, self.high = beta_fast, beta_slow, low, high
        self.head_dim = head_dim
        self.rotary_dim = int(head_dim * partial)
        if self.rotary_dim < 2:
            raise ValueError(f"rope: head_dim · partial = {head_dim} · {partial:g} leaves nothing to rotate")
        check_even(self, f"head_dim · partial = {head_dim} · {partial:g}", self.rotary_dim)
        if self.rotary_dim < 4 and scaling in ("ntk", "dynamic"):
            raise ValueError(f"rope: scaling={scaling} needs at least 4 rotated dimensions, got {self.rotary_dim}")
        self.planes = (layout, self.rotary_dim if layout == "half" else 0)  # t and t + d/2, or 2t and 2t + 1
        # dynamic: the final length changes every angle
        self.shift_invariant = self.pairwise = self.incremental = scaling != "dynamic"

    def frequencies(self, length: Tensor) -> Tensor:
        """Returns radians per position for each pair: [pairs], or [B or 1, 1, pairs] if they depend on the length."""
        return SCALINGS[self.scaling](self, length)

    def magnitude(self) -> float:
        """Returns the factor on q and on k. It is 1, except for YaRN, which also sharpens attention."""
        return 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" and self.factor > 1 else 1.0

    def rotate(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        length = torch.maximum(q_pos.amax(-1), k_pos.amax(-1)) + 1  # [B or 1]
        speed = self.frequencies(length)
        return (
            rotated(q, exact(q_pos)[..., None] * speed, self.layout, self.magnitude()),
            rotated(k, exact(k_pos)[..., None] * speed, self.layout, self.magnitude()),
        )


def rotated(x: Tensor, angle: Tensor, layout: str, magnitude: Tensor | float = 1.0) -> Tensor:
    """Rotates the first 2·pairs coordinates of x [B, H, L, D] by angle [B or 1, L, pairs], and scales them."""
    pairs = angle.shape[-1]
    turned, rest = wide(x[..., : 2 * pairs]), x[..., 2 * pairs :]
    cos = (angle.cos() * magnitude).unsqueeze(1).to(turned.dtype)  # [B or 1, 1, L, pairs]
    sin = (angle.sin() * magnitude).unsqueeze(1).to(turned.dtype)
    if layout == "half":
        first, second = turned[..., :pairs], turned[..., pairs:]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def _plain(rope: Rope, length: Tensor) -> Tensor:
    return frequencies(rope.rotary_dim, rope.theta, length.device)


def _linear(rope: Rope, length: Tensor) -> Tensor:
    return _plain(rope, length) / rope.factor


def _ntk(rope: Rope, length: Tensor) -> Tensor:
    d = rope.rotary_dim
    return frequencies(d, rope.theta * rope.factor ** (d / (d - 2)), length.device)


def _dynamic(rope: Rope, length: Tensor) -> Tensor:
    d = rope.rotary_dim
    growth = rope.factor * exact(length).clamp(min=rope.original) / rope.original - (rope.factor - 1)
    theta = rope.theta * growth ** (d / (d - 2))  # [B or 1]
    return theta[:, None, None] ** -(exact(torch.arange(0, d, 2, device=length.device)) / d)


def _yarn(rope: Rope, length: Tensor) -> Tensor:
    d = rope.rotary_dim

    def pair_that_turns(times: float) -> float:
        """Returns the (fractional) pair that makes this many turns over the original length."""
        return d * math.log(rope.original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(rope.beta_slow)), d - 1)
    ramp = (exact(torch.arange(d // 2, device=length.device)) - first) / (last - first or 0.001)
    slow = ramp.clamp(0, 1)
    fast = _plain(rope, length)
    return fast / rope.factor * slow + fast * (1 - slow)


def _llama3(rope: Rope, length: Tensor) -> Tensor:
    fast = _plain(rope, length)
    turns = rope.original * fast / (2 * math.pi)  # over the original length
    kept = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return fast / rope.factor * (1 - kept) + fast * kept


SCALINGS: dict[str, Callable[[Rope, Tensor], Tensor]] = {
    "none": _plain,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}
