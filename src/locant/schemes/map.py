"""`Map`: a scheme that evaluates another at mapped positions or offsets. Written SCHEME@MAP, as rope@grouped:size=4.

One rule: a map changes positions where the scheme embeds or rotates, or has a `pair`:

    embed(f(p))        R_f(i) q_i        R_f(j) k_j

Where the scheme has tables, it changes the offset r = j − i, by an odd function:

    terms(f(r))        f(−r) = −f(r), by default f(r) = sign(r)·f(|r|)

A bias therefore stays a function of r, and the map adds no cost. Mapping positions instead would give
f(j) − f(i). For `grouped` the two differ by at most one, and for f(p) = p / factor they are equal. `recurrent` is
the exception: positions start again inside a text, offsets do not. Numbers that a scheme computes for each token
(`Scheme.sides`) keep the true positions.

Some maps give real numbers. A scheme that is a formula is evaluated there (`Scheme.takes_reals`). Tables are
interpolated linearly between the two nearest rows. In a table of `length` positions, those between `length` − 1 and
`length` use the last row.

Masks and causal attention always use true positions. Mapped positions may therefore decrease, unless the scheme is
`ordered`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from locant.schemes.base import DIMS, Scheme, exact, readable, wide
from locant.terms import Far, Pair, Sides, Terms, Tokens

FARTHEST = 2**50
"""A monotone map that stays below a limit up to here is taken to stay below it."""
SCANNED = 2**16
"""Positions at which a map that is not monotone is compared with a limit, at least."""


class Map(Scheme):
    """Base class of maps. A subclass defines `positions`, and `offsets` if that is not sign(r)·positions(|r|).

    Parameters: those of the scheme. They are saved as `scheme.NAME`; `load_state_dict` also takes the names of the
    scheme without the map.
    """

    monotone: bool = False
    """Neither `positions` nor `offsets` ever decreases. Schemes that are `ordered` require it."""
    linear: bool = False
    """f(i + c) − f(j + c) does not depend on c, so rotations stay shift-invariant."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if {"positions", "offsets"} & cls.__dict__.keys():  # what the parent declares holds for its own map only
            for name in ("monotone", "linear", "takes_reals", "first_at"):
                if name not in cls.__dict__:
                    setattr(cls, name, getattr(Map, name))

    def __init__(self, scheme: Scheme, /) -> None:
        super().__init__()
        if not isinstance(scheme, Scheme):
            raise TypeError(f"{self.name()} maps the positions of a scheme, got {type(scheme).__name__}: {scheme!r}")
        parts = scheme.parts_of_sum()
        if len(parts) > 1:
            mapped = "+".join(f"{part}@{self.name()}:…" for part in parts)
            raise ValueError(f"{self.name()} maps one scheme, not the sum {scheme}; map its parts: {mapped}")
        (self.scheme,) = parts
        if not self.scheme.mappable:
            raise ValueError(
                f"{self.scheme} goes by the order and the number of tokens, which {self.name()} does not change; leave "
                f"out @{self.name()}"
            )
        if self.scheme.has_far:
            raise ValueError(
                f"{self.scheme} has far rotations, which go by the true distance; write @{self.name()} before "
                f"@{self.scheme.name()}"
            )
        if self.scheme.ordered and not self.monotone:
            raise ValueError(
                f"{self.scheme} needs positions in the order of the tokens, and {self.name()} is not monotone; use "
                f"another map, or declare monotone = True in {type(self).__name__} if it never decreases"
            )
        for dim in DIMS:
            if hasattr(self.scheme, dim):
                setattr(self, dim, getattr(self.scheme, dim))
        self.has_pair = probed(self.scheme).pair is not None
        for name in ("pairwise", "incremental", "causal_only", "ordered", "planes", "grows", "widens", "own_keys"):
            setattr(self, name, getattr(self.scheme, name))
        for name in ("reads_queries", "reads_keys", "read_width", "has_levels"):
            setattr(self, name, getattr(self.scheme, name))

    # ---- the map -----------------------------------------------------------------------------------

    def positions(self, pos: Tensor) -> Tensor:
        """Returns the positions that the scheme reads, integers or float64, from positions of any shape."""
        raise NotImplementedError(f"{self.name()} does not map positions; define {type(self).__name__}.positions")

    def offsets(self, r: Tensor) -> Tensor:
        """Returns the offsets that the scheme reads, integers or float64, from offsets [R]. It must be odd."""
        return r.sign() * self.positions(r.abs())

    def first_at(self, limit: int) -> int | None:
        """Returns the smallest offset from which on the map gives `limit` or more; None if there is none.

        Attention calls it often, through `reach`. A formula is faster than this search.
        """
        if not self.monotone or torch.compiler.is_compiling():
            return None
        return _first(self.offsets, limit)

    # ---- declarations ------------------------------------------------------------------------------

    @property
    def shift_invariant(self) -> bool:  # type: ignore[override]
        """As the scheme, where it has tables alone; rotations also need a linear map."""
        return self.scheme.shift_invariant and (self.linear or not (self.scheme.rotates or self.has_pair))

    @property
    def max_length(self) -> int | None:  # type: ignore[override]
        """The number of positions before the first that the scheme cannot read."""
        limit = self.scheme.max_length
        if limit is None:
            return None
        return _first(self.positions, limit) if self.monotone else _first_scanned(self.positions, limit)

    @property
    def reach(self) -> int | None:
        reach = self.scheme.reach
        return None if reach is None else self.first_at(reach)

    @property
    def embeds(self) -> bool:
        return self.scheme.embeds

    @property
    def rotates(self) -> bool:
        return self.scheme.rotates

    @property
    def has_terms(self) -> bool:
        return self.scheme.has_terms

    @property
    def has_sides(self) -> bool:
        return self.scheme.has_sides

    @property
    def has_far(self) -> bool:
        return False

    @property
    def position_table(self) -> Tensor | None:
        """The rows that the model adds at every position; None if positions have no end."""
        table, length = self.scheme.position_table, self.max_length
        return None if table is None or length is None else self.embed(torch.arange(length, device=table.device))

    # ---- mathematics -------------------------------------------------------------------------------

    def embed(self, pos: Tensor) -> Tensor | None:
        if not self.scheme.embeds:
            return None
        at, limit = self.positions(pos), self.scheme.max_length
        if limit is not None and at.numel() and readable(at):
            low, high = float(at.min()), float(at.max())
            if low < 0 or high >= limit:
                raise ValueError(
                    f"{self}: the positions {int(pos.min())} … {int(pos.max())} are mapped to {low:g} … {high:g}, and "
                    f"{self.scheme} has 0 … {limit - 1}; use at most {self.max_length} positions, or another map"
                )
        if not at.is_floating_point() or self.scheme.takes_reals:
            return self.scheme.embed(at)
        below = at.floor().long()
        above = below + 1 if limit is None else (below + 1).clamp(max=limit - 1)
        both = self.scheme.embed(torch.stack([below, above]))
        assert both is not None
        return _between(wide(both[0]), wide(both[1]), (at - below)[..., None]).to(both.dtype)

    def rotate(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        if not self.scheme.rotates:
            return q, k
        return self.scheme.rotate(q, k, *map(self._at, (q_pos, k_pos)))

    def rotate_far(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> Far | None:
        return None

    def terms(self, r: Tensor) -> Terms:
        if not self.scheme.has_terms:
            return Terms()
        at = self.offsets(r)
        at = self._readable(at) if self.has_pair else at
        if not at.is_floating_point() or self.scheme.takes_reals:
            terms = self.scheme.terms(at)
            return terms if terms.pair is None else Terms(**terms.tables(), pair=self._mapped(terms.pair))
        below = at.floor().long()
        # In one call: the gradient of a parameter is rounded to its dtype once.
        both = self.scheme.terms(torch.cat([below, below + 1]))
        tables: dict[str, Any] = {}
        for name, table in both.tables().items():
            share = (at - below)[None, :, None] if table.ndim == 3 else (at - below)[None, :]
            tables[name] = _between(table[:, : len(r)], table[:, len(r) :], share)
        return Terms(**tables)

    def _mapped(self, pair: Pair) -> Pair:
        def mapped(
            q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float, visible: Tensor | None
        ) -> Tensor:
            return pair(q, k, *map(self._at, (q_pos, k_pos)), scale=scale, visible=visible)

        return mapped

    def _at(self, pos: Tensor) -> Tensor:
        return self._readable(self.positions(pos))

    def _readable(self, at: Tensor) -> Tensor:
        """Mapped positions or offsets, for a method that cannot be interpolated."""
        if at.is_floating_point() and not self.scheme.takes_reals:
            raise TypeError(
                f"{self}: the map gives real positions, and {self.scheme} takes whole ones; use grouped, or declare "
                f"takes_reals = True in {type(self.scheme).__name__} if its formula holds for reals"
            )
        return at

    def read(self, x: Tensor) -> Tensor:
        return self.scheme.read(x)

    def sides(self, tokens: Tokens) -> Sides:
        return self.scheme.sides(tokens)

    def scale(self, head_dim: int) -> float:
        return self.scheme.scale(head_dim)

    def parameter_count(self) -> int:
        return self.scheme.parameter_count()

    def start_from_table(self, first: Tensor, rest: Tensor) -> None:
        self.scheme.start_from_table(first, rest)

    def clear_values(self) -> None:
        self.scheme.clear_values()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Takes a state that was saved without the map, too: NAME becomes scheme.NAME."""
        own = {*self._parameters, *self._buffers, *self._modules}
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name = key.removeprefix(prefix)
            if name.partition(".")[0] not in own:
                state_dict[f"{prefix}scheme.{name}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # ---- spelling ----------------------------------------------------------------------------------

    @classmethod
    def arguments(cls) -> dict[str, inspect.Parameter]:
        """Returns the arguments of the constructor after the scheme."""
        return dict(list(super().arguments().items())[1:])

    def options(self) -> dict[str, Any]:
        return {key: value for key, value in super().options().items() if not isinstance(value, Scheme)}

    def __str__(self) -> str:
        return f"{self.scheme}@{super().__str__()}"


def floor_divided(x: Tensor, size: int) -> Tensor:
    """Returns ⌊x / size⌋ as integers, of integers or reals."""
    return torch.div(x, size, rounding_mode="floor").long()


def probed(scheme: Scheme) -> Terms:
    """Returns the terms at r = 0: which tables a scheme has."""
    here = next(scheme.parameters(), torch.empty(0)).device
    with torch.no_grad():
        return scheme.terms(torch.zeros(1, dtype=torch.long, device=here))


def _between(lower: Tensor, upper: Tensor, share: Tensor) -> Tensor:
    """Linear interpolation. Exactly `lower` where both are equal, which the law of `reach` requires."""
    return lower + share.to(lower.dtype) * (upper - lower)


def _first(f: Callable[[Tensor], Tensor], limit: int) -> int | None:
    """The smallest n ≥ 0 with f(n) ≥ limit, by bisection; f does not decrease."""

    def there(n: int) -> bool:
        return float(exact(f(torch.tensor([n], device="cpu")))) >= limit  # models are opened on "meta"

    if there(0):
        return 0
    below, above = 0, 1
    while not there(above):
        below, above = above, 2 * above
        if above > FARTHEST:
            return None
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if there(middle) else (middle, above)
    return above


def _first_scanned(f: Callable[[Tensor], Tensor], limit: int) -> int | None:
    """The smallest n ≥ 0 with f(n) ≥ limit among the first positions."""
    found = (f(torch.arange(max(2 * limit, SCANNED), device="cpu")) >= limit).nonzero()
    return int(found[0]) if len(found) else None
