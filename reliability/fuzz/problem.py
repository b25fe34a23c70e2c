"""What the reference computes: a call with every default filled in, and how the computation rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]
Options = dict[str, Any]


@dataclass(frozen=True)
class Arithmetic:
    """How a computation rounds."""

    dtype: torch.dtype = torch.float64  # of every operation
    stored: torch.dtype = torch.float64  # of rotated queries and keys, of weights and of results
    jitter: torch.Generator | None = None  # of the random roundings; None for none
    steep: bool = True  # whether the slope of tanh keeps its digits where tanh is flat
    coarse: bool = True  # whether weights are rounded to `stored`

    def moved(self, x: Tensor) -> Tensor:
        """x in `dtype`, each number moved at random by at most one unit in its last place."""
        x = x.to(self.dtype)
        if self.jitter is None:
            return x
        return x * (1 + torch.finfo(self.dtype).eps * (torch.rand(x.shape, generator=self.jitter).to(x) - 0.5))

    def noise(self, x: Tensor) -> Tensor:
        """Standard normal numbers in the shape of x."""
        return torch.randn(x.shape, generator=self.jitter).to(x.dtype)

    def constant(self, x: Tensor) -> Tensor:
        """A float64 tensor that follows from positions and options alone, such as an angle, moved likewise."""
        if self.jitter is None:
            return x
        return x * (1 + torch.finfo(x.dtype).eps * (2 * torch.rand(x.shape, generator=self.jitter, dtype=x.dtype) - 1))

    def store(self, x: Tensor) -> Tensor:
        """x rounded to `stored`; autograd rounds its gradient too."""
        return x if self.stored in (x.dtype, torch.float64) else x.to(self.stored).to(x.dtype)


@dataclass(frozen=True)
class Part:
    """One scheme of a sum."""

    name: str
    params: Params
    options: Options
    map: tuple[str, Options] | None = None  # of its positions and offsets, with the options of the map


@dataclass(frozen=True)
class Problem:
    """One call, with every default filled in."""

    parts: tuple[Part, ...]
    q: Tensor  # [B, H, Lq, D]
    k: Tensor  # [B, Hkv, Lk, D]
    v: Tensor  # [B, Hkv, Lk, Dv]
    q_pos: Tensor  # [B or 1, Lq]
    k_pos: Tensor  # [B or 1, Lk]
    visible: Tensor  # [B, H, Lq, Lk], bool
    scale: float
    softcap: float | None = None
    additive: Tensor | None = None  # broadcasts to [B, H, Lq, Lk]; added after the softcap
    sinks: Tensor | None = None  # [H]
    keep: Tensor | None = None  # [B, H, Lq, Lk], the factors of the dropout
    x_q: Tensor | None = None  # [B, Lq, d_model], the hidden states of the queries
    x_k: Tensor | None = None  # [B, Lk, d_model], … and of the keys
    hidden: Tensor | None = None  # [B or 1, Lk], bool: keys that the mask hides from all queries
    offsets: Tensor | None = None  # [B or 1, Lq, Lk], in place of those that follow from the positions

    @property
    def n_heads(self) -> int:
        return self.q.shape[1]

    @property
    def r(self) -> Tensor:
        """The offset of every pair, [B or 1, Lq, Lk]."""
        if self.offsets is not None:
            return self.offsets
        return self.k_pos[:, None, :] - self.q_pos[:, :, None]

    def all_heads(self, x: Tensor) -> Tensor:
        """Keys or values with one head per query head."""
        return x.repeat_interleave(self.n_heads // x.shape[1], dim=1)
