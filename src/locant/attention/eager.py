"""The reference back end: every term as the equation writes it, in float32 or wider.

    logit_ij = τ_i · ( scale · ( (R_i q_i)ᵀ G_r (R_j k_j) + p_i·a_r + t_j·c_r ) + b_r + m_r · (e_i + d_j) + pair_ij )
    logit_ij → cap · tanh(logit_ij / cap)                                                    with a softcap
    logit_ij → logit_ij + additive_ij                                                        with an additive mask
    w_ij     = exp(logit_ij) / ( exp(sink) + Σ_l exp(logit_il) )                             exp(sink) = 0 without sinks
    out_i    = Σ_j w_ij · (v_j + u_r)

Symbols are those of `terms.py`. `prepare` has added scale · s to b, and joined q·a + p·α to p·a, and k·c + t·γ to t·c,
so p and t are q and k, side vectors, or both in a row.

In float64 it defines the correct result; other back ends are compared with it. It computes slices of the queries one
after another, so only a bounded part of a [B, H, Lq, Lk, D] tensor exists at a time, forward or backward. A compiled
graph that serves several lengths computes all queries at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locant.attention.request import Request
from locant.attention.sizes import always
from locant.attention.tables import transforming
from locant.terms import Far

CHUNK = 2**24
"""A slice of [B, H, rows, Lk, D] has at most this many elements."""


def attend(request: Request) -> tuple[Tensor, Tensor | None]:
    """The output [B, H, Lq, Dv], and the weights [B, H, Lq, Lk] if the request needs them; in the dtype of q."""
    q, k, v = in_full(request)
    content = _content(request, q, k)
    slices = list(_slices(request))
    # Transforms of torch.func do not allow the hooks of `checkpoint`: under them every slice is stored. The compiler
    # decides itself what to compute again.
    traced = torch.compiler.is_compiling()
    recompute = len(slices) > 1 and torch.is_grad_enabled() and not traced and not transforming()
    if recompute:
        # The backward pass recomputes each slice: storing all of them would take the memory of the whole tensor. It
        # must find the same inputs: masks and positions are copied here, and a change of any other raises an error.
        mask = None if request.mask is None else request.mask.clone()
        request = replace(request, mask=mask, positions=(request.q_pos.clone(), request.k_pos.clone()))
        tensors = [q, k, v, content.q, content.k, *request.terms.tables().values(), *request.scheme.parameters()]
        tensors += [*request.sides.used().values(), *(x for x in (request.sinks, request.additive) if x is not None)]
        versions = [(tensor, tensor._version) for tensor in tensors]
    outs, weights = [], []
    for rows in slices:
        if recompute:
            out, weight = checkpoint(_attend_unchanged, versions, request, rows, q, k, v, content, use_reentrant=False)
        else:
            out, weight = attend_rows(request, rows, q, k, v, content)
        outs.append(out)
        if request.need_weights:
            weights.append(weight)
    joined = torch.cat(weights, dim=2).to(request.q.dtype) if request.need_weights else None
    return torch.cat(outs, dim=2).to(request.q.dtype), joined


def _attend_unchanged(versions: list[tuple[Tensor, int]], *args: Any) -> tuple[Tensor, Tensor]:
    if any(tensor._version != version for tensor, version in versions):
        raise RuntimeError(
            "q, k, v, the sinks, the additive mask or a parameter of the scheme was changed in place between the "
            "forward and the backward pass; change it after the backward pass, or pass a copy"
        )
    return attend_rows(*args)


def logits(request: Request) -> Tensor:
    """The logits [B, H, Lq, Lk] of a request, before masking; after the softcap, if there is one."""
    q, k, _ = in_full(request)
    return _logits(request, slice(None), q, k, _content(request, q, k))


def in_full(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the dtype `request.wide`, with the key/value heads repeated for each group of query heads."""
    groups = request.q.shape[1] // request.k.shape[1]
    q, k, v = (x.to(request.wide) for x in (request.q, request.k, request.v))
    if groups == 1:
        return q, k, v
    return q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


@dataclass(frozen=True)
class Content:
    """Queries and keys of the content product, wide, with all heads and in one dtype."""

    q: Tensor
    k: Tensor
    far: Far | None = None


def _content(request: Request, q: Tensor, k: Tensor) -> Content:
    """The content of a request, from the queries and keys of `in_full`; `rotate` may widen either."""
    where = request.q_pos, request.k_pos
    rotated_q, rotated_k = request.scheme.rotate(q, k, *where)
    far = request.scheme.rotate_far(q, k, *where) if request.far is not None else None
    dtype = torch.promote_types(rotated_q.dtype, rotated_k.dtype)
    if far is not None:
        far = replace(far, left=far.left.to(dtype), right=far.right.to(dtype), keys=far.keys.to(dtype))
    return Content(rotated_q.to(dtype), rotated_k.to(dtype), far)


def attend_rows(
    request: Request, rows: slice, q: Tensor, k: Tensor, v: Tensor, content: Content, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output and the weights of some queries. Tensors are wide, with all heads, as `in_full` returns them.

    `kept` are the factors of dropout, [B, H, rows, Lk], in place of random ones.
    """
    logit = _logits(request, rows, q, k, content)
    added = request.added(rows)
    logit = logit if added is None else logit + added
    visible = request.visible(rows)
    if visible is not None:
        logit = logit.masked_fill(~visible, -torch.inf)
    # A query that may attend to no key, because of a mask or a bias of −∞, gets zeros, not NaN.
    nothing = (logit == -torch.inf).all(-1, keepdim=True)
    weight = softmax(request, logit.masked_fill(nothing, 0.0)).masked_fill(nothing, 0.0)
    weight = F.dropout(weight, request.dropout) if request.dropout else weight
    weight = weight if kept is None else weight * kept
    out = weight @ v.to(weight.dtype)
    if request.terms.value is not None:
        # Σ_j p_ij u_r: first sum the weights of each offset, then one product with the table.
        value = request.terms.value.to(weight.dtype)
        column = _columns(request, rows, weight)
        if request.offsets.inverse is not None:  # nearly as many offsets as pairs
            out = out + torch.einsum("bhij,bhijd->bhid", weight, _by_pair(request, value, rows, weight))
        else:
            by_offset = weight.new_zeros(*weight.shape[:3], value.shape[1]).scatter_add(-1, column, weight)
            out = out + by_offset @ value
    return out.masked_fill(nothing, 0.0), weight


def softmax(request: Request, logit: Tensor) -> Tensor:
    """The softmax of logits [B, H, rows, Lk], over the keys and the sink of a head; without the weight of the sink."""
    if request.sinks is None:
        return logit.softmax(-1)
    sink = request.sinks.to(logit.dtype)[:, None, None].expand(*logit.shape[:3], 1)
    return torch.cat([logit, sink], dim=-1).softmax(-1)[..., :-1]


def _logits(request: Request, rows: slice, q: Tensor, k: Tensor, content: Content) -> Tensor:
    queries, gain = content.q[:, :, rows], request.terms.gain
    by_pair = None if gain is None else _by_pair(request, gain.to(queries.dtype), rows, queries)
    if by_pair is not None and by_pair.ndim == 5:
        product = torch.einsum("bhid,bhjd,bhijd->bhij", queries, content.k, by_pair)
    else:
        product = _products(request, rows, content)
        product = product if by_pair is None else product * by_pair
    added = added_logits(request, rows, q, k)
    logit = request.scale * product if added is None else request.scale * product + added
    if request.sides.temperature is not None:
        logit = logit * request.sides.temperature[:, :, rows, None].to(logit.dtype)
    return logit if request.softcap is None else request.softcap * torch.tanh(logit / request.softcap)


def _products(request: Request, rows: slice, content: Content) -> Tensor:
    """The products of queries and keys, [B, H, rows, Lk]."""
    near, far = content.q[:, :, rows] @ content.k.mT, content.far
    if far is None:
        return near
    r = (request.k_pos[:, None, :] - request.q_pos[:, rows, None])[:, None]
    near = torch.where(r < -far.window, far.left[:, :, rows] @ far.keys.mT, near)
    return torch.where(r > far.window, far.right[:, :, rows] @ far.keys.mT, near)


def added_logits(request: Request, rows: slice, q: Tensor, k: Tensor) -> Tensor | None:
    """The sum of all that is added to the scaled content product, before the temperature; None if there is nothing.

    It broadcasts to [B, H, rows, Lk]. q and k are those of `in_full`: unrotated, wide, with all heads.
    """
    terms, sides, total = request.terms, request.sides, None
    p = q if sides.query is None else _cast(sides.query, request.wide)
    t = k if sides.key is None else _cast(sides.key, request.wide)
    if terms.bias is not None:
        column = request.offsets.columns(request.q_pos, request.k_pos, rows)
        total = _plus(total, terms.bias[:, column].transpose(0, 1))  # [B or 1, H or 1, rows, Lk]
    if request.offsets.inverse is not None:  # nearly as many offsets as pairs: a product for each pair
        if terms.query is not None:
            by_pair = _by_pair(request, terms.query, rows, q)
            total = _plus(total, request.scale * torch.einsum("bhid,bhijd->bhij", p[:, :, rows], by_pair))
        if terms.key is not None:
            by_pair = _by_pair(request, terms.key, rows, q)
            total = _plus(total, request.scale * torch.einsum("bhjd,bhijd->bhij", t, by_pair))
    elif terms.query is not None or terms.key is not None:
        total = _plus(total, _vector_logits(request, rows, p, t))
    levels = _levels(request, rows)
    if levels is not None:
        total = _plus(total, levels)
    if terms.pair is not None:
        pair = terms.pair(
            q[:, :, rows], k, request.q_pos[:, rows], request.k_pos, scale=request.scale, visible=request.visible(rows)
        )
        if pair.ndim != 4:
            raise ValueError(
                f"{request.scheme}: pair must have four dimensions, [B, H, Lq, Lk]; got {list(pair.shape)}"
            )
        total = _plus(total, pair.to(request.wide))
    return total


def _levels(request: Request, rows: slice) -> Tensor | None:
    """m_r · (e_i + d_j), [B, H, rows, Lk] or sizes of 1; None if there are no levels.

    The sum is computed in the dtype of the levels: two large ones may nearly cancel.
    """
    of_queries, of_keys, level = request.sides.query_level, request.sides.key_level, request.terms.level
    if of_queries is None and of_keys is None:
        return None
    total = None if of_queries is None else _take(of_queries, rows).unsqueeze(3)
    if of_keys is not None:
        total = _plus(total, of_keys.unsqueeze(2))
    assert total is not None
    total = total.to(request.wide)
    if level is None:
        return total
    return total * level[:, request.offsets.columns(request.q_pos, request.k_pos, rows)].transpose(0, 1)


def _vector_logits(request: Request, rows: slice, q: Tensor, k: Tensor) -> Tensor:
    """scale · (q·a_r + k·c_r), [B, H, rows, Lk]: products with every offset, then that of each pair's own offset."""
    terms, total = request.terms, None
    if terms.query is not None:
        by_offset = _products_with(terms.query, request.scale * _take(q, rows))  # [B, H, rows, R]
        if request.consecutive and request.q.shape[2] == 1:  # decoding: the keys are in the order of the offsets
            beyond = by_offset[..., :1].expand(*by_offset.shape[:3], request.k.shape[2] - by_offset.shape[3])
            total = _plus(total, torch.cat([beyond, by_offset], dim=-1))
        else:
            total = _plus(total, by_offset.gather(-1, _columns(request, rows, by_offset)))
    if terms.key is not None:
        by_offset = terms.key @ (request.scale * k).mT  # [B, H, R, Lk]
        total = _plus(total, by_offset.gather(-2, _columns(request, rows, by_offset)))
    assert total is not None
    return total


def _products_with(table: Tensor, x: Tensor) -> Tensor:
    """The products of x [B, H, rows, D] with a table [H or 1, R, D]: [B, H, rows, R]."""
    return F.linear(x, table[0]) if table.shape[0] == 1 else x @ table.mT


def _take(x: Tensor, rows: slice) -> Tensor:
    """Some rows of x [B, H, Lq, …]."""
    return x if rows == slice(None) else x[:, :, rows]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _by_pair(request: Request, table: Tensor, rows: slice, like: Tensor) -> Tensor:
    """A table [H, R(, D)] for every pair: [B, H, rows, Lk(, D)], with the batch and heads of `like`."""
    column = request.offsets.columns(request.q_pos, request.k_pos, rows)
    by_pair = table[:, column].transpose(0, 1)
    return by_pair.expand(like.shape[0], like.shape[1], *by_pair.shape[2:])


def _columns(request: Request, rows: slice, like: Tensor) -> Tensor:
    """The column of every pair, [B, H, rows, Lk], as an index into a tensor with the batch and heads of `like`."""
    column = request.offsets.columns(request.q_pos, request.k_pos, rows)
    return column[:, None].expand(like.shape[0], like.shape[1], -1, -1)


def _plus(total: Tensor | None, added: Tensor) -> Tensor:
    return added if total is None else total + added


def _slices(request: Request) -> Iterator[slice]:
    b, h, lq, d = request.q.shape
    terms = request.terms
    by_pair = any(table.ndim == 3 for table in terms.tables().values()) and request.offsets.inverse is not None
    vectors = by_pair or terms.pair is not None or (terms.gain is not None and terms.gain.ndim == 3)
    per_row = b * h * request.k.shape[2] * (d if vectors else 1)
    if torch.compiler.is_compiling() and not always(lq * per_row > CHUNK):
        yield slice(None)  # a loop over a symbolic number of rows would make a graph for every length
        return
    step = max(1, CHUNK // per_row)
    yield from (slice(start, min(start + step, lq)) for start in range(0, lq, step))
