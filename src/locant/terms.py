"""`Terms`, `Sides` and `Far`: everything that a position scheme adds to attention.

Sign convention, everywhere in locant: **r = key position − query position** (r = j − i).

For one head, with query q_i, key k_j, value v_j and the offset r between them:

    logit_ij = τ_i · ( scale · ( (R_i q_i)ᵀ G_r (R_j k_j) + q_i·a_r + k_j·c_r + p_i·α_r + t_j·γ_r + s_r )
                       + b_r + m_r · (e_i + d_j) + pair_ij )
    out_i    = Σ_j softmax(logit)_ij · (v_j + u_r)

`Terms` holds the tables over offsets: G (gain), a (query), c (key), α (query_side), γ (key_side), s (score), b (bias),
m (level) and u (value). `Sides` holds what a scheme computes for each token of a call: vectors p and t of any width,
levels e and d, and temperatures τ. R is `Scheme.rotate`; for keys at a distance, `Far` can have other queries and keys
in place of R_i q_i and R_j k_j. `pair` is any other function of a pair.

A part that a scheme leaves out is neutral: gain, level and temperature 1, everything else 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Pair(Protocol):
    """A logit that is not a function of the offset alone (FIRE, CoPE)."""

    def __call__(
        self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float, visible: Tensor | None
    ) -> Tensor:
        """The value added to the logit, after scaling.

        q [B, H, Lq, D] and k [B, H, Lk, D] are unrotated and in float32 or wider; positions are [B or 1, L].
        `visible` is None or a bool tensor that broadcasts to [B, H, Lq, Lk]; True where a query may attend to a key.
        The result has four dimensions that broadcast to [B, H, Lq, Lk]. It must not depend on the other queries in
        `q`: attention calls this function on slices of the rows, and again in the backward pass. A scheme therefore
        reads its parameters in `terms` and not here (see `fire.py`).
        """
        ...


TABLES = ("bias", "score", "gain", "query", "key", "value", "query_side", "key_side", "level")
VECTORS = ("query", "key", "value", "query_side", "key_side")
"""Tables of vectors, [H, R, width]. A gain may be one too."""


@dataclass(frozen=True)
class Terms:
    """Tables with one column for each of R offsets. H is the number of heads, or 1 if shared; D is the head size."""

    bias: Tensor | None = None  # [H, R]               added to the logit, after scaling
    score: Tensor | None = None  # [H, R]              added to the logit, before scaling
    gain: Tensor | None = None  # [H, R] or [H, R, D]  multiplies the content product
    query: Tensor | None = None  # [H, R, D]           scale · q·query[r]
    key: Tensor | None = None  # [H, R, D]             scale · k·key[r]
    value: Tensor | None = None  # [H, R, Dv]          added to v under the softmax
    query_side: Tensor | None = None  # [H, R, P]      scale · p·query_side[r], with p of `Sides`
    key_side: Tensor | None = None  # [H, R, T]        scale · t·key_side[r], with t of `Sides`
    level: Tensor | None = None  # [H, R]              multiplies the levels of `Sides`
    pair: Pair | None = None  #                        added to the logit, after scaling

    def tables(self) -> dict[str, Tensor]:
        """The tables that are not None, by name."""
        return {name: x for name in TABLES if (x := getattr(self, name)) is not None}

    def used(self) -> tuple[str, ...]:
        """Names of the fields that are not neutral."""
        return (*self.tables(), *(("pair",) if self.pair is not None else ()))

    def columns(self, index: Tensor) -> Terms:
        """The same terms for some of the offsets."""
        return self._each(lambda table: table[:, index])

    def narrow(self, first: int, count: int) -> Terms:
        """The same terms for consecutive columns, as views."""
        if first == 0 and all(table.shape[1] == count for table in self.tables().values()):
            return self
        return self._each(lambda table: table.narrow(1, first, count))

    def to(self, dtype: torch.dtype) -> Terms:
        """The same terms with all tables in `dtype`."""
        if all(table.dtype == dtype for table in self.tables().values()):
            return self
        return self._each(lambda table: table.to(dtype))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Terms:
        changed: dict[str, Any] = {name: change(table) for name, table in self.tables().items()}
        return Terms(**changed, pair=self.pair)

    def __add__(self, other: Terms) -> Terms:
        """The terms of two schemes used together: gains multiply, side vectors join, everything else adds."""
        if self.level is not None and other.level is not None:
            raise ValueError("a sum can have one scheme with levels, got two; leave one out")
        return Terms(
            bias=_add(self.bias, other.bias),
            score=_add(self.score, other.score),
            gain=_multiply(self.gain, other.gain),
            query=_add(self.query, other.query),
            key=_add(self.key, other.key),
            value=_add(self.value, other.value),
            query_side=_join(self.query_side, other.query_side),
            key_side=_join(self.key_side, other.key_side),
            level=_add(self.level, other.level),
            pair=_add_pairs(self.pair, other.pair),
        )


@dataclass(frozen=True)
class Sides:
    """What a scheme computes for each token of a call, from its hidden state, query, key and position.

    B is the batch size or 1, H the number of query heads or 1. Everything is float32 or wider. Levels are best in
    float64: back ends then compute the difference of two large levels accurately, whatever the dtype of the queries.
    """

    query: Tensor | None = None  # [B, H, Lq, P], p: with the table `query_side`
    key: Tensor | None = None  # [B, H, Lk, T], t: with the table `key_side`
    query_level: Tensor | None = None  # [B, H, Lq], e: added to the logit, after scaling, times the table `level`
    key_level: Tensor | None = None  # [B, H, Lk], d: as e
    temperature: Tensor | None = None  # [B, H, Lq], τ: multiplies the logit

    def used(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name."""
        return {name: x for name in SIDES if (x := getattr(self, name)) is not None}

    def __add__(self, other: Sides) -> Sides:
        """The sides of two schemes used together: vectors join, temperatures multiply."""
        levels = [each for each in (self, other) if each.query_level is not None or each.key_level is not None]
        if len(levels) > 1:
            raise ValueError("a sum can have one scheme with levels, got two; leave one out")
        return Sides(
            query=_join(self.query, other.query),
            key=_join(self.key, other.key),
            query_level=_add(self.query_level, other.query_level),
            key_level=_add(self.key_level, other.key_level),
            temperature=_multiply(self.temperature, other.temperature),
        )


SIDES = ("query", "key", "query_level", "key_level", "temperature")


@dataclass(frozen=True)
class Tokens:
    """The tokens of a call, from which a scheme computes its `Sides`."""

    q: Tensor  # [B, H, Lq, D], unrotated
    k: Tensor  # [B, Hkv, Lk, D], unrotated
    positions: tuple[Tensor, Tensor] | None  # of queries and keys; None if keys are 0 … Lk−1, queries the last Lq
    read_q: Tensor | None  # [B, H, Lq, W], what `Scheme.read` made of the hidden states of the queries
    read_k: Tensor | None  # [B, H, Lk, W], … and of the keys
    scale: float
    hidden: Tensor | None = None  # [B or 1, Lk], bool: keys that the mask hides from all queries, such as padding

    @property
    def q_pos(self) -> Tensor:
        """[B or 1, Lq]"""
        return default_positions(self.q, self.k)[0] if self.positions is None else self.positions[0]

    @property
    def k_pos(self) -> Tensor:
        """[B or 1, Lk]"""
        return default_positions(self.q, self.k)[1] if self.positions is None else self.positions[1]


def default_positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the positions of queries and keys in decoding with a cache: keys are 0 … Lk−1, queries the last Lq."""
    lk = k.shape[2]
    k_pos = torch.arange(lk, device=k.device)[None]
    return k_pos[:, lk - q.shape[2] :], k_pos


@dataclass(frozen=True)
class Far:
    """Other rotations for keys at a distance: SelfExtend. The content product of a pair depends on r.

    r < −window: left · keys.  r > window: right · keys.  Otherwise the queries and keys of `Scheme.rotate`.
    """

    window: int
    left: Tensor  # [B, H, Lq, D]
    right: Tensor  # [B, H, Lq, D]
    keys: Tensor  # [B, Hkv, Lk, D]


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _join(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Both along the last dimension; a size of 1 in another dimension stands for any."""
    if a is None or b is None:
        return b if a is None else a
    shape = torch.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    return torch.cat([x.expand(*shape, -1) for x in (a, b)], dim=-1)


def _multiply(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    if a.ndim != b.ndim:  # a scalar gain [H, R] scales every coordinate of a vector gain [H, R, D]
        a, b = (x.unsqueeze(-1) if x.ndim == 2 else x for x in (a, b))
    return a * b


def _add_pairs(a: Pair | None, b: Pair | None) -> Pair | None:
    if a is None or b is None:
        return b if a is None else a
    first, second = a, b

    def both(q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float, visible: Tensor | None) -> Tensor:
        return first(q, k, q_pos, k_pos, scale=scale, visible=visible) + second(
            q, k, q_pos, k_pos, scale=scale, visible=visible
        )

    return both
