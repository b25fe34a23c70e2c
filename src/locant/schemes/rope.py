"""RoPE: queries and keys are rotated by their position, so their product depends on the offset.

    (R_p x)_t : the pair t is rotated by the angle p · theta^(−2t/d)        (R_i q)·(R_j k) = qᵀ R_{j−i} k

Su et al. 2021, arXiv 2104.09864. `layout=half` pairs coordinate t with t + d/2 (Llama, GPT-NeoX); `interleaved`
pairs 2t with 2t + 1 (the paper, GPT-J). `partial` is the share of the head that is rotated, and `first` the coordinate
where that part starts (DeepSeek rotates the end of a head). `attention_factor` multiplies the rotated coordinates of q
and of k; by default it is YaRN's for YaRN, and 1 otherwise.

Scalings, for sequences longer than the training length (`original`):

    linear      positions divided by factor                                    Chen et al. 2023, arXiv 2306.15595
    ntk         theta · factor^(d/(d−2)), at every length                      bloc97 2023
    dynamic     theta · (factor·n/original − factor + 1)^(d/(d−2)), n > original the row's length
    yarn        low frequencies divided by factor, high ones kept, a ramp between   Peng et al. 2023, arXiv 2309.00071
    llama3      the same idea with Llama 3.1's ramp over wavelengths
    table       any speeds, from a table that is set with `set_speeds`
    longrope    two such tables: for rows up to `original`, and for longer rows    Ding et al. 2024, arXiv 2402.13753

A table starts with the speeds of `none`, the second one with those of `linear`.

YaRN's ramp starts and ends at whole pairs, or between pairs with `truncate=false` (gpt-oss).

With `dynamic` and `longrope` every angle depends on the final length. They are not shift-invariant, and past
`original` decoding one token at a time differs from the full pass. The length is computed per row of the batch (its
largest position + 1), so the result of a row does not depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from locant.schemes.base import Scheme, check_bool, check_choice, check_even, check_float, check_int, exact, wide
from locant.schemes.sinusoidal import frequencies

LAYOUTS = ("half", "interleaved")
TABLES = {"table": 1, "longrope": 2}
"""Scalings with tables of speeds, and how many tables they have."""
SPEED_UNIT = 2.0**-60
"""Radians per position of 1 in a table of speeds."""


class Rope(Scheme):
    """Rotary positions. Parameters: 0."""

    takes_reals = True

    speeds: Tensor
    """[tables, pairs], for scalings with tables: whole numbers of SPEED_UNIT, saved with the weights.

    Not floating point: a model that is moved to half precision would take the speeds along.
    """

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
        first: int = 0,
        attention_factor: float | None = None,
        truncate: bool = True,
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
        check_int(self, "first", first, at_least=0)
        if attention_factor is not None:
            check_float(self, "attention_factor", attention_factor, above=0)
        check_bool(self, "truncate", truncate)
        if partial > 1:
            raise ValueError(f"rope: partial is a share of the head and must be at most 1, got {partial:g}")
        if high <= low:
            raise ValueError(f"rope: high must be above low = {low:g}, got {high:g}")
        if factor != 1 and scaling == "none":
            raise ValueError(f"rope: factor={factor:g} does nothing without scaling; add scaling=linear, ntk, yarn, …")
        self.theta, self.layout, self.partial = theta, layout, partial
        self.scaling, self.factor, self.original = scaling, factor, original
        self.beta_fast, self.beta_slow, self.low, self.high = beta_fast, beta_slow, low, high
        self.first, self.attention_factor, self.truncate = first, attention_factor, truncate
        self.head_dim = head_dim
        self.rotary_dim = int(head_dim * partial + 1e-6)  # 49 · (28/49) is a little below 28
        if self.rotary_dim < 2:
            raise ValueError(f"rope: head_dim · partial = {head_dim} · {partial:g} leaves nothing to rotate")
        check_even(self, f"head_dim · partial = {head_dim} · {partial:g}", self.rotary_dim)
        if self.rotary_dim < 4 and scaling in ("ntk", "dynamic"):
            raise ValueError(f"rope: scaling={scaling} needs at least 4 rotated dimensions, got {self.rotary_dim}")
        if first + self.rotary_dim > head_dim:
            raise ValueError(
                f"rope: {self.rotary_dim} rotated coordinates from coordinate {first} on do not fit into head_dim = "
                f"{head_dim}; lower first or partial"
            )
        self.planes = _planes(layout, first, self.rotary_dim)
        # dynamic, longrope: the final length changes every angle
        self.shift_invariant = self.pairwise = self.incremental = scaling not in ("dynamic", "longrope")
        if scaling in TABLES:
            self._add_tables(TABLES[scaling])

    def _add_tables(self, number: int) -> None:
        self.register_buffer("speeds", torch.zeros(number, self.rotary_dim // 2, dtype=torch.int64))
        if not self.speeds.is_meta:
            start = [_plain(self, self.speeds), _linear(self, self.speeds)]
            self.set_speeds(torch.stack(start[:number]))

    @torch.no_grad()
    def set_speeds(self, speeds: Tensor) -> None:
        """Sets the tables of `table` or `longrope` to [tables, pairs] radians per position."""
        if self.scaling not in TABLES:
            raise ValueError(f"{self} has no table of speeds; build it with scaling=table or scaling=longrope")
        if speeds.shape != self.speeds.shape or not bool((speeds.double().abs() < 8).all()):
            raise ValueError(
                f"{self}: speeds must be finite numbers between -8 and 8 of shape {list(self.speeds.shape)}, got "
                f"{list(speeds.shape)}, largest {float(speeds.double().abs().max()):g}"
            )
        self.speeds.copy_((speeds.double() / SPEED_UNIT).round().long())

    def frequencies(self, length: Tensor) -> Tensor:
        """Returns radians per position for each pair: [pairs], or [B or 1, 1, pairs] if they depend on the length."""
        return SCALINGS[self.scaling](self, length)

    def magnitude(self) -> float:
        """Returns the factor on q and on k. It is 1, except for YaRN, which also sharpens attention."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" and self.factor > 1 else 1.0

    def rotate(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        length = torch.maximum(q_pos.amax(-1), k_pos.amax(-1)) + 1  # [B or 1]
        speed = self.frequencies(length)
        return (
            rotated(q, exact(q_pos)[..., None] * speed, self.layout, self.magnitude(), self.first),
            rotated(k, exact(k_pos)[..., None] * speed, self.layout, self.magnitude(), self.first),
        )


def _planes(layout: str, first: int, rotary_dim: int) -> tuple[str, int]:
    """The pairs of coordinates: t and t + d/2 from `first` on, or neighbours, the first of which is odd or even."""
    if layout == "interleaved":
        return layout, first % 2
    return layout if first == 0 else f"{layout} from {first}", rotary_dim


def rotated(x: Tensor, angle: Tensor, layout: str, magnitude: Tensor | float = 1.0, begin: int = 0) -> Tensor:
    """Rotates 2·pairs coordinates of x [B, H, L, D], from `begin` on, by angle [B or 1, L, pairs], and scales them."""
    pairs = angle.shape[-1]
    before, after = x[..., :begin], x[..., begin + 2 * pairs :]
    turned = wide(x[..., begin : begin + 2 * pairs])
    cos = (angle.cos() * magnitude).unsqueeze(1).to(turned.dtype)  # [B or 1, 1, L, pairs]
    sin = (angle.sin() * magnitude).unsqueeze(1).to(turned.dtype)
    if layout == "half":
        first, second = turned[..., :pairs], turned[..., pairs:]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([before, turned.to(x.dtype), after], dim=-1)


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

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    ramp = (exact(torch.arange(d // 2, device=length.device)) - first) / (last - first or 0.001)
    slow = ramp.clamp(0, 1)
    fast = _plain(rope, length)
    return fast / rope.factor * slow + fast * (1 - slow)


def _llama3(rope: Rope, length: Tensor) -> Tensor:
    fast = _plain(rope, length)
    turns = rope.original * fast / (2 * math.pi)  # over the original length
    kept = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return fast / rope.factor * (1 - kept) + fast * kept


def _table(rope: Rope, length: Tensor) -> Tensor:
    return exact(rope.speeds[0].to(length.device)) * SPEED_UNIT


def _longrope(rope: Rope, length: Tensor) -> Tensor:
    short, long = exact(rope.speeds.to(length.device)) * SPEED_UNIT
    return torch.where((length > rope.original)[:, None, None], long, short)


SCALINGS: dict[str, Callable[[Rope, Tensor], Tensor]] = {
    "none": _plain,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "table": _table,
    "longrope": _longrope,
}
