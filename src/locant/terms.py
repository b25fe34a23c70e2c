"""`Terms`: the tables over offsets that a position scheme adds to attention.

Sign convention, everywhere in locant: **r = key position − query position** (r = j − i).

For one head, with query q_i, key k_j, value v_j and the offset r between them:

    logit_ij = scale · ( (R_i q_i)ᵀ G_r (R_j k_j)  +  q_i·a_r  +  k_j·c_r  +  s_r )  +  b_r
    out_i    = Σ_j softmax(logit)_ij · (v_j + u_r)

`Terms` holds G (gain), a (query), c (key), s (score), b (bias) and u (value). R is `Scheme.rotate`.
A term that a scheme leaves out is neutral: gain 1, everything else 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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


TABLES = ("bias", "score", "gain", "query", "key", "value")


@dataclass(frozen=True)
class Terms:
    """Tables with one column for each of R offsets. H is the number of heads, or 1 if shared; D is the head size."""

    bias: Tensor | None = None  # [H, R]               added to the logit, after scaling
    score: Tensor | None = None  # [H, R]              added to the logit, before scaling
    gain: Tensor | None = None  # [H, R] or [H, R, D]  multiplies the content product
    query: Tensor | None = None  # [H, R, D]           scale · q·query[r]
    key: Tensor | None = None  # [H, R, D]             scale · k·key[r]
    value: Tensor | None = None  # [H, R, D]           added to v under the softmax
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
        return self._each(lambda table: table[:, first : first + count])

    def to(self, dtype: torch.dtype) -> Terms:
        """The same terms with all tables in `dtype`."""
        if all(table.dtype == dtype for table in self.tables().values()):
            return self
        return self._each(lambda table: table.to(dtype))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Terms:
        changed: dict[str, Any] = {name: change(table) for name, table in self.tables().items()}
        return replace(self, **changed)

    def __add__(self, other: Terms) -> Terms:
        """The terms of two schemes used together: gains multiply, everything else adds."""
        return Terms(
            bias=_add(self.bias, other.bias),
            score=_add(self.score, other.score),
            gain=_multiply(self.gain, other.gain),
            query=_add(self.query, other.query),
            key=_add(self.key, other.key),
            value=_add(self.value, other.value),
            pair=_add_pairs(self.pair, other.pair),
        )


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


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
