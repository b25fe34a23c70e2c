"""`Request`: one call of `attend`, checked once. Every back end computes from it.

Shapes: q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], positions [B or 1, L].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from locant.attention.offsets import FARTHEST, Offsets, find_offsets
from locant.attention.sides import States, check_causal, find_sides, joined
from locant.attention.sizes import always, same
from locant.attention.tables import tables
from locant.schemes.base import Scheme
from locant.schemes.nope import Nope
from locant.terms import VECTORS, Far, Sides, Terms, default_positions

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SOFTCAPS = (1e-30, 1e30)
"""The smallest and the largest softcap: back ends compute its reciprocal in float32."""
Window = tuple["int | None", "int | None"]
DECODING_QUERIES = 32
"""A call with at most this many queries, and more keys, counts as decoding."""


@dataclass(frozen=True)
class Request:
    """Checked arguments of `attend`, with the terms of the scheme for their offsets."""

    q: Tensor
    k: Tensor
    v: Tensor
    scheme: Scheme
    terms: Terms  # one column for each of `offsets`; score is already added to bias
    offsets: Offsets  # all of the call that are within the reach of the scheme, and perhaps others
    sides: Sides  # `query` and `key` are multiplied by the tables of that name; None: q and k themselves are
    rotated: tuple[Tensor, Tensor]  # q and k of the content product, perhaps in a wider dtype than q
    far: Far | None  # other queries and keys of the content product, at a distance
    positions: tuple[Tensor, Tensor] | None  # of queries and keys; None if keys are 0 … Lk−1, queries the last Lq
    mask: Tensor | None  # bool, broadcasts to [B, H, Lq, Lk]; True = may attend
    additive: Tensor | None  # in the dtype `wide`, broadcasts to [B, H, Lq, Lk]: added after the softcap
    causal: bool
    window: Window  # how far before and after its own position a query may attend; None: no limit
    limits: Window  # the smallest and the largest visible offset, by `causal` and `window`
    scale: float
    softcap: float | None  # logits become softcap · tanh(logit / softcap), before the mask
    sinks: Tensor | None  # [H], in the dtype `wide`: a logit per head that takes part in the softmax, without a value
    dropout: float
    need_weights: bool

    @property
    def consecutive(self) -> bool:
        """Whether the caller gave no positions: keys are 0 … Lk−1 and queries the last Lq of them."""
        return self.positions is None

    @property
    def decoding(self) -> bool:
        """Whether there are few queries, and more keys: a step with a cache."""
        return _decoding(self.q.shape[2], self.k.shape[2])

    @property
    def k_pos(self) -> Tensor:
        """[B or 1, Lk]"""
        return default_positions(self.q, self.k)[1] if self.positions is None else self.positions[1]

    @property
    def q_pos(self) -> Tensor:
        """[B or 1, Lq]"""
        return default_positions(self.q, self.k)[0] if self.positions is None else self.positions[0]

    @property
    def content_dtype(self) -> torch.dtype:
        """The dtype that holds all rotated queries and keys: that of q, or a wider one if a rotation widens."""
        if self.far is None and self.rotated[0].dtype == self.rotated[1].dtype:
            return self.rotated[0].dtype
        far = () if self.far is None else (self.far.left, self.far.right, self.far.keys)
        found: torch.dtype = reduce(torch.promote_types, (x.dtype for x in (*self.rotated, *far)))
        return found

    @property
    def wide(self) -> torch.dtype:
        """The dtype of tables and softmax."""
        return _wide(self.q.dtype)

    @property
    def limited(self) -> bool:
        """Whether a mask, numbers added to the logits, or a window restrict attention in other ways than `causal`."""
        return self.mask is not None or self.additive is not None or self.window != (None, None)

    def added(self, rows: slice) -> Tensor | None:
        """The numbers that are added to the logits of some queries, after the softcap."""
        if self.additive is None or self.additive.shape[2] == 1:
            return self.additive
        return self.additive[:, :, rows]

    def visible(self, rows: slice = slice(None)) -> Tensor | None:
        """Bool, broadcasts to [B, H, rows, Lk]: the mask, offsets within `limits`, and no −∞ added to the logit."""
        found = []
        if self.mask is not None:
            found.append(self.mask[:, :, rows] if self.mask.shape[2] > 1 else self.mask)
        lowest, highest = self.limits
        if highest == 0 and self.consecutive and always(self.q.shape[2] == 1):
            highest = None  # no key is after the last
        if lowest is not None or highest is not None:
            r = (self.k_pos[:, None, :] - self.q_pos[:, rows, None])[:, None]  # [B or 1, 1, rows, Lk]
            found += [] if lowest is None else [r >= lowest]
            found += [] if highest is None else [r <= highest]
        added = self.added(rows)
        if added is not None:
            found.append(added != -torch.inf)
        return reduce(torch.logical_and, found) if found else None


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scheme: Scheme | None,
    *,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    mask: Tensor | None = None,
    additive_mask: Tensor | None = None,
    causal: bool = False,
    window: int | Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    x: States | None = None,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> Request:
    """The request for a call of `attend`: checks the arguments and computes the terms of the scheme."""
    if scheme is None:
        scheme = Nope()
    if not isinstance(scheme, Scheme):
        remedy = f"; build it once with locant.scheme({scheme!r}, …)" if isinstance(scheme, str) else ""
        raise TypeError(f"scheme must be a locant Scheme or None, got {type(scheme).__name__}{remedy}")
    _check_tensors(q, k, v)
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    if scale is not None and (not isinstance(scale, (int, float)) or not abs(scale) < math.inf):
        raise TypeError(f"scale must be a finite number, got {scale!r}; multiply q by a scale that is learned")
    softcap = None if softcap is None else _softcap(softcap, scheme)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout!r}")
    left, right = (None, None) if window is None else _window(window)
    b, _, lq, d = q.shape
    lk = k.shape[2]
    _check_dimensions(scheme, q)
    positions = _positions(q_pos, k_pos, b, lq, lk, q.device)
    offsets = find_offsets(positions, lq, lk, q.device, scheme.reach)
    scale = scheme.scale(d) if scale is None else float(scale)
    wide = _wide(q.dtype)
    terms, offsets = tables(scheme, offsets, wide, decoding=_decoding(lq, lk))
    terms = _check_terms(terms, scheme, q, v, offsets.count).to(wide)
    if terms.score is not None:
        inside = scale * terms.score
        terms = replace(terms, bias=inside if terms.bias is None else terms.bias + inside, score=None)
    limits = (None if left is None else -left, 0 if causal else right)
    mask = None if mask is None else _mask(mask, q, lk)
    check_causal(scheme, q, k, positions, limits[1], mask)
    terms, sides = joined(terms, find_sides(scheme, q, k, positions, x, scale, mask), q, k, scheme)
    return Request(
        q=q, k=k, v=v, scheme=scheme, terms=terms, offsets=offsets, sides=sides,
        rotated=_rotate(scheme, q, k, positions), far=_rotate_far(scheme, q, k, positions, terms),
        positions=positions, mask=mask,
        additive=None if additive_mask is None else _additive(additive_mask, q, lk, wide), causal=causal,
        window=(left, right), limits=limits, scale=scale, softcap=softcap,
        sinks=None if sinks is None else _sinks(sinks, q, wide), dropout=dropout, need_weights=need_weights,
    )  # fmt: skip


def _wide(dtype: torch.dtype) -> torch.dtype:
    """One of `FLOATS` as float32 or wider."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _decoding(lq: int, lk: int) -> bool:
    return always(lq < lk) and always(lq <= DECODING_QUERIES)


def _softcap(softcap: float, scheme: Scheme) -> float:
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap must be a number or None, got {softcap!r}")
    low, high = SOFTCAPS
    if not low <= softcap <= high:  # NaN is not either
        raise ValueError(f"softcap must be from {low:g} to {high:g}, got {softcap!r}; pass None for no cap")
    if scheme.hides:
        raise ValueError(
            f"{scheme} hides keys by their logits, and a softcap of {softcap:g} would show them again; leave one out, "
            f"or pass window= to attend"
        )
    return float(softcap)


def _window(window: int | Window) -> Window:
    """The window as (left, right)."""
    pair = (window, window) if isinstance(window, int) else window
    if (
        not isinstance(pair, (tuple, list))
        or len(pair) != 2
        or not all(x is None or (isinstance(x, int) and not isinstance(x, bool) and x >= 0) for x in pair)
    ):
        raise ValueError(
            f"window must be a whole number ≥ 0, or (left, right) with whole numbers ≥ 0 or None for no limit; "
            f"got {window!r}"
        )
    # No two positions are farther apart.
    left, right = (None if x is None or x >= FARTHEST else x for x in pair)
    return left, right


def _sinks(sinks: Tensor, q: Tensor, wide: torch.dtype) -> Tensor:
    """The sinks in the dtype of the softmax."""
    if not isinstance(sinks, Tensor) or sinks.dtype not in FLOATS:
        got = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"sinks must be a tensor of floating-point numbers, one per query head; got {got}")
    if sinks.ndim != 1 or sinks.shape[0] != q.shape[1]:
        raise ValueError(f"sinks must be [{q.shape[1]}], one number per query head; got {_shape(sinks)}")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on the device of q, {q.device}; got {sinks.device}")
    return sinks.to(wide)


def _check_dimensions(scheme: Scheme, q: Tensor) -> None:
    """ValueError if the scheme was built for another model: its tables could broadcast without an error."""
    for dim, what, size in (("n_heads", "{} heads", q.shape[1]), ("head_dim", "head size {}", q.shape[3])):
        # A module takes long to find that it has no such attribute.
        built = getattr(scheme, dim) if dim in scheme.__dict__ or dim in scheme.dims_of_class else size
        if built != size:
            raise ValueError(f"{scheme} was built for {what.format(built)}, q has {size}; build it with {dim}={size}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise ValueError(f"q, k and v must be [batch, heads, length, head size]; {_shapes(q, k, v)}")
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in FLOATS:
        known = ", ".join(str(x).removeprefix("torch.") for x in FLOATS)
        raise TypeError(f"q, k and v must have one dtype out of {known}; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device}, {v.device}")
    (b, h, _, d), (b_k, h_k, lk, d_k), (b_v, h_v, lv, _) = q.shape, k.shape, v.shape
    if b != b_k or b_k != b_v or h_k != h_v or lk != lv:
        raise ValueError(
            f"q, k and v must have one batch size, and k and v one length and head count; {_shapes(q, k, v)}"
        )
    if d != d_k:
        raise ValueError(f"q and k must have one head size; {_shapes(q, k, v)}")
    if h_k and h % h_k:
        raise ValueError(f"the query heads must be a multiple of the key/value heads; {_shapes(q, k, v)}")
    if h_k == 0 or h == 0 or d == 0:  # `in` does not work on symbolic sizes
        raise ValueError(f"there must be at least one head, of at least one dimension; {_shapes(q, k, v)}")
    if lk == 0:
        raise ValueError(f"there are no keys to attend to; {_shapes(q, k, v)}")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"got q {_shape(q)}, k {_shape(k)}, v {_shape(v)}"


def _positions(
    q_pos: Tensor | None, k_pos: Tensor | None, b: int, lq: int, lk: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    if q_pos is None and lq > lk:
        raise ValueError(f"cannot infer positions for {lq} queries over {lk} keys; pass q_pos and k_pos")
    if q_pos is None and k_pos is None:
        return None
    if q_pos is not None:
        q_pos = _check_positions("q_pos", q_pos, b, lq, device)
    if k_pos is not None:
        k_pos = _check_positions("k_pos", k_pos, b, lk, device)
    if k_pos is None:
        assert q_pos is not None
        if lq != lk:
            raise ValueError(f"cannot infer positions of {lk} keys from q_pos for {lq} queries; pass k_pos as well")
        k_pos = q_pos
    if q_pos is None:
        q_pos = k_pos[:, lk - lq :]  # the queries are the last of the keys, as in decoding with a cache
    return q_pos, k_pos


def _rotate(scheme: Scheme, q: Tensor, k: Tensor, positions: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """The queries and keys of the content product. TypeError if the scheme returns them in a narrower dtype."""
    if not scheme.rotates or q.shape[0] == 0 or q.shape[2] == 0:  # nothing to rotate
        return q, k
    rotated = scheme.rotate(q, k, *(default_positions(q, k) if positions is None else positions))
    for name, x in zip(("queries", "keys"), rotated, strict=True):
        if x.dtype not in FLOATS or torch.promote_types(x.dtype, q.dtype) != x.dtype:
            raise TypeError(f"{scheme}.rotate must return {name} in {q.dtype} or a wider dtype, got {x.dtype}")
    return rotated


def _rotate_far(
    scheme: Scheme, q: Tensor, k: Tensor, positions: tuple[Tensor, Tensor] | None, terms: Terms
) -> Far | None:
    """The queries and keys of the content product at a distance; None if the scheme has none."""
    if not scheme.has_far or q.shape[0] == 0 or q.shape[2] == 0:  # nothing to rotate
        return None
    if terms.gain is not None and terms.gain.ndim == 3:
        raise ValueError(f"{scheme} rotates far keys differently, and its gain must be [H, R]; got one per coordinate")
    return scheme.rotate_far(q, k, *(default_positions(q, k) if positions is None else positions))


def _check_positions(name: str, pos: Tensor, b: int, length: int, device: torch.device) -> Tensor:
    if not isinstance(pos, Tensor):
        raise TypeError(f"{name} must be a tensor of integers, got {type(pos).__name__}")
    if pos.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"{name} must hold integers, got {pos.dtype}; use {name}.long()")
    if pos.ndim not in (1, 2) or pos.shape[-1] != length or (pos.ndim == 2 and pos.shape[0] != 1 and pos.shape[0] != b):
        raise ValueError(f"{name} must be [{length}], or [{b}, {length}] with a row per sequence; got {_shape(pos)}")
    if pos.device != device:
        raise ValueError(f"{name} must be on the device of q, {device}; got {pos.device}")
    return (pos[None] if pos.ndim == 1 else pos).long()


def _check_terms(terms: Terms, scheme: Scheme, q: Tensor, v: Tensor, n: int) -> Terms:
    h, d = q.shape[1], q.shape[3]
    if not isinstance(terms, Terms):
        raise TypeError(f"{scheme}.terms must return Terms, got {type(terms).__name__}")
    for name, table in terms.tables().items():
        size = v.shape[3] if name == "value" else d
        if table.ndim < 2 or table.shape[1] != n:
            raise ValueError(f"{scheme}: {name} must have a column for each of the {n} offsets, got {_shape(table)}")
        if table.shape[0] != 1 and table.shape[0] != h:
            raise ValueError(f"{scheme}: {name} must be for 1 head (shared) or {h}, got {_shape(table)}")
        vector = name in VECTORS or (name == "gain" and table.ndim == 3)
        if table.ndim != (3 if vector else 2):
            raise ValueError(f"{scheme}: {name} must be {'[H, R, D]' if vector else '[H, R]'}, got {_shape(table)}")
        if vector and not name.endswith("_side") and table.shape[2] != size:
            whose = "v" if name == "value" else "q"
            raise ValueError(f"{scheme}: {name} must have the head size of {whose}, {size}; got {_shape(table)}")
        if table.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"{scheme}: {name} is {table.dtype} but must be float32 or wider; use locant.schemes.base.wide"
            )
    return terms


def _mask(mask: Tensor, q: Tensor, lk: int) -> Tensor:
    """The mask as [B or 1, H or 1, Lq or 1, Lk]."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"mask must be bool, True where attention is allowed, got {got}; use mask.bool() for 0/1 masks, and "
            f"additive_mask= for numbers that are added to the logits"
        )
    return _for_pairs("mask", mask, q, lk)


def _additive(additive: Tensor, q: Tensor, lk: int, wide: torch.dtype) -> Tensor:
    """The numbers to add to the logits, as [B or 1, H or 1, Lq or 1, Lk], in the dtype of the softmax."""
    if not isinstance(additive, Tensor) or additive.dtype not in FLOATS:
        got = additive.dtype if isinstance(additive, Tensor) else type(additive).__name__
        raise TypeError(
            f"additive_mask must hold floating-point numbers to add to the logits, −∞ where attention is not allowed; "
            f"got {got}. Pass bool masks as mask="
        )
    return _for_pairs("additive_mask", additive, q, lk).to(wide)


def _for_pairs(name: str, x: Tensor, q: Tensor, lk: int) -> Tensor:
    """A mask as [B or 1, H or 1, Lq or 1, Lk]."""
    b, h, lq, _ = q.shape

    def wrong(x: Tensor) -> ValueError:  # a function, because sizes are symbols while torch.compile traces
        expected = f"[{b}, {lk}] (keys that exist), [{lq}, {lk}], or 4-D and broadcast to [{b}, {h}, {lq}, {lk}]"
        return ValueError(f"{name} must be {expected}; got {_shape(x)}")

    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}; got {x.device}")
    if x.ndim == 2:
        rows = x.shape[0]
        per_key = x.shape[1] == lk and (rows == b or rows == 1)
        per_query = x.shape[1] == lk and (rows == 1 or (same(rows, lq) if per_key else rows == lq))
        if per_key and per_query and rows > 1:
            raise ValueError(
                f"a mask of shape {_shape(x)} could be [batch, keys] or [queries, keys], as both are {b}; "
                f"write mask[:, None, None, :] or mask[None, None]"
            )
        if not (per_key or per_query):
            raise wrong(x)
        x = x[:, None, None, :] if per_key else x[None, None]
    if x.ndim != 4:
        raise wrong(x)
    for size, full in zip(x.shape, (b, h, lq, lk), strict=True):
        if size != full and size != 1:
            raise wrong(x)
    return x.expand(-1, -1, -1, lk)


def _shape(x: Tensor) -> str:
    return f"{list(x.shape)}"  # torch.compile does not trace str()
