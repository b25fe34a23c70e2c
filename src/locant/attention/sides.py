"""Computes and checks the `Sides` of a call: vectors, levels and temperatures of its tokens.

A caller passes hidden states as x, one of

    [B, Lk, d_model]      of the keys; the queries are the last Lq of them, as in decoding with a cache
    [B, Lq, d_model]      of the queries, for a scheme that reads no keys
    a pair of tensors     of the queries, and of the keys; either may be None if the scheme does not read it
    `Remembered`          outputs of `Scheme.read`, which a model caches with its keys
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locant.schemes.base import Scheme, readable
from locant.terms import Sides, Terms, Tokens

WIDE = (torch.float32, torch.float64)
NO_SIDES = Sides()


class NotCausal(ValueError):
    """A scheme for causal attention would see a key after its query."""

    def __init__(self, scheme: Scheme, message: str) -> None:
        super().__init__(message)
        self.scheme = scheme


@dataclass(frozen=True)
class Remembered:
    """What `Scheme.read` made of hidden states: of the queries, and of the keys. [B, H, L, W]"""

    queries: Tensor | None
    keys: Tensor | None


States = Tensor | tuple[Tensor | None, Tensor | None] | Remembered
"""What `attend` takes as x."""


def find_sides(
    scheme: Scheme, q: Tensor, k: Tensor, positions: tuple[Tensor, Tensor] | None, x: States | None, scale: float,
    mask: Tensor | None,
) -> Sides:  # fmt: skip
    """The sides of a call. Positions that are None are consecutive: keys 0 … Lk−1, queries the last Lq."""
    if not scheme.has_sides:
        if x is not None:
            _check_states(scheme, q, k, x)
        return NO_SIDES
    if positions is not None and scheme.reads_queries and isinstance(x, Tensor):
        _check_in_step(q, k, positions)
    read_q, read_k = _read(scheme, q, k, x) if scheme.reads else (None, None)
    hidden = None if mask is None or not scheme.reads_keys else ~mask.any(2).any(1)
    sides = scheme.sides(Tokens(q, k, positions, read_q, read_k, scale, hidden))
    if not isinstance(sides, Sides):
        raise TypeError(f"{scheme}.sides must return Sides, got {type(sides).__name__}")
    _check_sides(scheme, sides, q, k)
    return sides


def joined(terms: Terms, sides: Sides, q: Tensor, k: Tensor, scheme: Scheme) -> tuple[Terms, Sides]:
    """The same with one query table and one key table, which `sides.query` and `sides.key` are multiplied by.

    None there stands for q and k themselves. The tables `query_side` and `key_side` are None afterwards.
    """
    if terms.query_side is terms.key_side is terms.level is sides.query is sides.key is None:
        return terms, sides
    for name, x in (("query", q), ("key", k)):
        table, vectors = getattr(terms, f"{name}_side"), getattr(sides, name)
        if (table is None) != (vectors is None):
            missing = f"Terms.{name}_side" if table is None else f"Sides.{name}"
            raise ValueError(
                f"{scheme}: Terms.{name}_side and Sides.{name} belong together, and {missing} is missing; return both "
                f"or neither"
            )
        if table is None or vectors is None:
            continue
        if table.shape[-1] != vectors.shape[-1]:
            raise ValueError(
                f"{scheme}: Terms.{name}_side has vectors of {table.shape[-1]} numbers and Sides.{name} of "
                f"{vectors.shape[-1]}; they must be equal"
            )
        b, h = q.shape[:2]
        if vectors.shape[0] != b or vectors.shape[1] != h:
            vectors = vectors.expand(b, h, -1, -1)
        own = getattr(terms, name)
        if own is not None:  # q·a + p·α is one product of longer vectors
            content = x.to(vectors.dtype).repeat_interleave(h // x.shape[1], dim=1)
            vectors = torch.cat([content, vectors], dim=-1)
            heads = max(own.shape[0], table.shape[0])
            table = torch.cat([part.expand(heads, -1, -1) for part in (own, table.to(own.dtype))], dim=-1)
        # dataclasses.replace would take as long as a small operator
        terms = Terms(**{**vars(terms), name: table, f"{name}_side": None})
        sides = Sides(**{**vars(sides), name: vectors})
    if terms.level is not None and sides.query_level is None and sides.key_level is None:
        raise ValueError(
            f"{scheme} returned Terms.level, and no levels in Sides; return query_level or key_level, or no level"
        )
    return terms, sides


def _read(scheme: Scheme, q: Tensor, k: Tensor, x: States | None) -> tuple[Tensor | None, Tensor | None]:
    """What the scheme reads from the hidden states of the queries, and of the keys; None for what it does not need."""
    if x is None:
        raise ValueError(
            f"{scheme} reads hidden states: pass x=…, the input of the attention layer, [{q.shape[0]}, {k.shape[2]}, "
            f"d_model]"
        )
    if isinstance(x, Remembered):
        _check_remembered(scheme, x, q, k)
        return x.queries, x.keys
    of_queries, of_keys = _check_states(scheme, q, k, x)
    if scheme.reads_keys:
        assert of_keys is not None
        keys = _checked_read(scheme, of_keys, q)
        if of_queries is None:  # the last of the keys
            return keys[:, :, keys.shape[2] - q.shape[2] :], keys
        return _checked_read(scheme, of_queries, q), keys
    assert of_queries is not None
    return _checked_read(scheme, of_queries, q), None


def _check_remembered(scheme: Scheme, x: Remembered, q: Tensor, k: Tensor) -> None:
    """ValueError unless what a model remembers has one row for each query and key of the call."""
    for what, read, length, needed in (
        ("queries", x.queries, q.shape[2], scheme.reads_queries), ("keys", x.keys, k.shape[2], scheme.reads_keys),
    ):  # fmt: skip
        if not needed:
            continue
        expected = (q.shape[0], q.shape[1], length, scheme.read_width)
        got = None if read is None else tuple(read.shape)
        if got is None or len(got) != 4 or any(size != full for size, full in zip(got, expected, strict=True)):
            found = "nothing" if got is None else list(got)
            raise ValueError(
                f"{scheme} needs what it read of the {what}, {list(expected)} (batch, heads, tokens, read_width); got "
                f"{found}. A cache of another number of keys must be filled anew"
            )


def _checked_read(scheme: Scheme, x: Tensor, q: Tensor) -> Tensor:
    found = scheme.read(x)
    expected = [x.shape[0], q.shape[1], x.shape[1], scheme.read_width]
    if list(found.shape) != expected or found.dtype not in WIDE:
        raise ValueError(
            f"{scheme}.read must return {expected} (batch, heads, tokens, read_width) in float32 or wider, got "
            f"{list(found.shape)} in {found.dtype}"
        )
    return found


def _check_states(scheme: Scheme, q: Tensor, k: Tensor, x: States) -> tuple[Tensor | None, Tensor | None]:
    """The hidden states of the queries and of the keys. The first is None if the queries are the last of the keys."""
    if isinstance(x, Remembered):
        return None, None
    lq, lk = q.shape[2], k.shape[2]
    if isinstance(x, tuple):
        if len(x) != 2:
            raise ValueError(f"x must be a tensor or (states of queries, states of keys); got a tuple of {len(x)}")
        queries, keys = x
        for what, states, length, needed in (
            ("queries", queries, lq, scheme.reads_queries), ("keys", keys, lk, scheme.reads_keys),
        ):  # fmt: skip
            if states is None and needed:
                raise ValueError(f"{scheme} reads the hidden states of the {what}, which are None in x; pass a tensor")
            if states is not None:
                _check_one(scheme, states, q, (length,))
        return queries, keys
    _check_one(scheme, x, q, (lk,) if scheme.reads_keys else (lk, lq))
    if lq > lk and (scheme.reads_keys or x.shape[1] != lq):
        raise ValueError(f"x has {lk} keys, and there are {lq} queries; pass x=(states of queries, states of keys)")
    if scheme.reads_keys:
        return None, x
    return (x if x.shape[1] == lq else x[:, lk - lq :]), None


def _check_in_step(q: Tensor, k: Tensor, positions: tuple[Tensor, Tensor]) -> None:
    """ValueError if positions say that the queries are not the last of the keys, as one tensor x assumes."""
    (q_pos, k_pos), lq, lk = positions, q.shape[2], k.shape[2]
    if torch.compiler.is_compiling() or not (readable(q_pos) and readable(k_pos)) or lq > lk:
        return
    if not torch.equal(*torch.broadcast_tensors(q_pos, k_pos[:, lk - lq :])):
        raise ValueError(
            "x as one tensor is for queries that are the last of the keys, and q_pos has other positions than the last "
            "of k_pos; pass x=(states of queries, states of keys)"
        )


def _check_one(scheme: Scheme, x: Tensor, q: Tensor, lengths: tuple[int, ...]) -> None:
    """ValueError unless x is the hidden states of as many tokens as one of `lengths`."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a tensor of floating-point numbers, the hidden states of the tokens; got {got}")
    width = getattr(scheme, "d_model", None) if scheme.reads else None
    if (
        x.ndim != 3
        or x.shape[0] != q.shape[0]
        or all(x.shape[1] != length for length in lengths)
        or (width is not None and x.shape[2] != width)
    ):
        wide = "d_model" if width is None else width
        expected = " or ".join(f"[{q.shape[0]}, {length}, {wide}]" for length in dict.fromkeys(lengths))
        raise ValueError(f"x must be {expected}, the hidden states of the tokens; got {list(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"x must be on the device of q, {q.device}; got {x.device}")


def _check_sides(scheme: Scheme, sides: Sides, q: Tensor, k: Tensor) -> None:
    b, h, lq, _ = q.shape
    for name, x in sides.used().items():
        length = k.shape[2] if name in ("key", "key_level") else lq
        dims = 4 if name in ("query", "key") else 3
        # `in` does not work on symbolic sizes
        fits = x.ndim == dims and all(x.shape[at] == size or x.shape[at] == 1 for at, size in enumerate((b, h)))
        if not fits or x.shape[2] != length:
            shape = f"[{b} or 1, {h} or 1, {length}{', width' if dims == 4 else ''}]"
            raise ValueError(f"{scheme}: Sides.{name} must be {shape}, got {list(x.shape)}")
        if x.dtype not in WIDE:
            raise TypeError(f"{scheme}: Sides.{name} is {x.dtype} but must be float32 or wider")


def check_causal(
    scheme: Scheme, q: Tensor, k: Tensor, positions: tuple[Tensor, Tensor] | None, highest: int | None,
    mask: Tensor | None,
) -> None:  # fmt: skip
    """NotCausal if a scheme for causal attention would see a key after its query."""
    if not scheme.causal_only or (highest is not None and highest <= 0):
        return
    lq, lk = q.shape[2], k.shape[2]
    if positions is None:
        if lq == 1:  # the query is the last token
            return
        positions = torch.arange(lk - lq, lk, device=q.device)[None], torch.arange(lk, device=q.device)[None]
    if torch.compiler.is_compiling() or not all(readable(x) for x in (*positions, mask) if x is not None):
        if mask is None:
            raise NotCausal(scheme, f"{scheme} is for causal attention; pass causal=True, or a causal mask")
        return  # masks cannot be read while a graph is traced
    later = (positions[1][:, None, :] > positions[0][:, :, None])[:, None]
    if bool((later if mask is None else later & mask).any()):
        raise NotCausal(
            scheme,
            f"{scheme} is for causal attention, and a query sees a key after it; pass causal=True, or a causal mask",
        )
