"""`Call`: the arguments of our kernels, `fused` and `triton`, as one record, made from a request.

Operators of `torch.library` take flat arguments. So a call is written `forward(*call)` and read back as
`Call(*arguments)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from locant.attention.request import Request


class Call(NamedTuple):
    """The arguments of the kernel. B sequences, H query heads, Hkv key/value heads, R columns of the tables.

    Tables are for one head, shared by all, or for H. A table that is None is not used.
    """

    q: Tensor  # [B, H, Lq, D], rotated, as are the keys
    k: Tensor  # [B, Hkv, Lk, D]
    v: Tensor  # [B, Hkv, Lk, Dv]
    raw_q: Tensor | None  # [B, H, Lq, P], multiplied by the table `query`; None: q
    raw_k: Tensor | None  # [B, Hkv, Lk, T], multiplied by the table `key`; None: k
    left: Tensor | None  # [B, H, Lq, D], the queries and keys of the content product at a distance (`terms.Far`)
    right: Tensor | None  # [B, H, Lq, D]
    distant: Tensor | None  # [B, Hkv, Lk, D]
    query_level: Tensor | None  # [B, H, Lq], float64, as are the next two
    key_level: Tensor | None  # [B, H, Lk]
    temperature: Tensor | None  # [B, H, Lq]
    bias: Tensor | None  # [1 or H, R]
    gain: Tensor | None  # [1 or H, R] or [1 or H, R, D]
    query: Tensor | None  # [1 or H, R, P]
    key: Tensor | None  # [1 or H, R, T]
    value: Tensor | None  # [1 or H, R, Dv]
    level: Tensor | None  # [1 or H, R]
    sinks: Tensor | None  # [H], one more logit per head, without a value
    q_pos: Tensor  # [B, Lq], int64
    k_pos: Tensor  # [B, Lk], int64
    mask: Tensor | None  # bool, broadcasts to [B, H, Lq, Lk]
    seed: Tensor  # [1], int64; of the dropout
    consecutive: bool  # keys are 0 … Lk−1 and the queries the last of them, as q_pos and k_pos also state
    first_offset: int  # the offset of column 0
    distance: int  # beyond it the content product is that of left, right and distant
    scale: float
    softcap: float | None
    lowest: int | None  # the offsets that are visible, from lowest to highest; None: no limit
    highest: int | None
    dropout: float


FIELD_TYPES = get_type_hints(Call)
SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int: "SymInt", int | None: "SymInt?",
                float: "float", float | None: "float?"}  # fmt: skip
SCHEMA = ", ".join(f"{SCHEMA_TYPES[kind]} {name}" for name, kind in FIELD_TYPES.items())
"""The fields of `Call` in the language of torch.library."""

TENSORS = tuple(name for name, kind in FIELD_TYPES.items() if kind in (Tensor, Tensor | None))
TABLES = ("bias", "gain", "query", "key", "value", "level")
NUMBERS = ("query_level", "key_level", "temperature")
CONTENT = ("q", "k", "v", "raw_q", "raw_k", "left", "right", "distant", *NUMBERS)
IF_WANTED = (*TABLES, "sinks")
WITH_GRADIENT = (*CONTENT, *IF_WANTED)
"""The order of the gradients that `backward` returns."""
NO_GRADIENTS = Call(*(None for _ in Call._fields))  # type: ignore[arg-type]


def make_call(request: Request) -> Call:
    """The call that computes a request."""
    b, h = request.q.shape[:2]
    numbers: dict[str, Any] = {
        name: None if (x := getattr(request.sides, name)) is None else x.double().expand(b, h, -1) for name in NUMBERS
    }
    return Call(
        **_content(request),
        **numbers,
        **{name: getattr(request.terms, name) for name in TABLES},
        sinks=request.sinks,
        q_pos=request.q_pos.expand(b, -1),
        k_pos=request.k_pos.expand(b, -1),
        mask=request.mask,
        seed=torch.randint(2**62, (1,)) if request.dropout else torch.zeros(1, dtype=torch.int64),
        consecutive=request.consecutive,
        first_offset=request.offsets.lo,
        distance=0 if request.far is None else request.far.window,
        scale=request.scale,
        softcap=request.softcap,
        lowest=request.limits[0],
        highest=request.limits[1],
        dropout=request.dropout,
    )


def _content(request: Request) -> dict[str, Any]:
    """The queries, keys and values of a call, by name.

    They have one dtype, that of the widest rotation: not beyond float32, see `choice.fused_unsupported`. Side vectors
    are in float32.
    """
    (q, k), far, sides, terms = request.rotated, request.far, request.sides, request.terms
    rotated = q is not request.q or k is not request.k
    found: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": request.v,
        "raw_q": request.q if rotated and terms.query is not None else None,
        "raw_k": request.k if rotated and terms.key is not None else None,
        "left": None if far is None else far.left,
        "right": None if far is None else far.right,
        "distant": None if far is None else far.keys,
    }
    dtype = request.content_dtype
    found = {name: None if x is None else x.to(dtype) for name, x in found.items()}
    if sides.query is not None:
        found["raw_q"] = sides.query.float()
    if sides.key is not None:  # it has all heads
        groups = q.shape[1] // k.shape[1]
        found |= {
            name: x.repeat_interleave(groups, dim=1) for name in ("k", "v", "distant") if (x := found[name]) is not None
        }
        found["raw_k"] = sides.key.float()
    return found
