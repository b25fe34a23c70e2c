"""PyTorch's FlexAttention, with a `score_mod` made from the terms: the fused path on GPUs.

    score  →  score · gain[r] + QA[i, r] + KC[j, r] + bias[r]         QA = scale · p queryᵀ,  KC = scale · t keyᵀ
    score  →  τ[i] · ( score + level[r] · (e[i] + d[j]) )             with the sides of the request, as in `terms.py`

A softcap follows in the same function. A sink is the first key of the padding: its score is the sink of the head, every
query sees it, and its value is 0.

The tables are captured tensors. Products of queries or keys with a table are computed before the kernel, one column
per offset within the scheme's reach; so a query or key term needs a reach. Lengths are padded to that of a bucket, and
masked, so one compiled kernel serves every length of the bucket.

On a CPU it serves for comparison: forward only, because FlexAttention has no backward there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.attention.request import Request

BLOCK = 128
KERNELS = 64
"""Dynamo may compile this many kernels: one per kind of scheme and bucket."""


def bucket(length: int) -> int:
    """The length that a sequence is padded to: BLOCK times 1, 2, 3, 4, 6, 8, 12, 16, …"""
    blocks = max(1, -(-length // BLOCK))
    power = 1 << (blocks - 1).bit_length()  # the power of two at or above
    return BLOCK * (3 * power // 4 if power >= 4 and blocks <= 3 * power // 4 else power)


def attend(request: Request) -> tuple[Tensor, None]:
    """The output [B, H, Lq, Dv] in the dtype of q, and None: FlexAttention returns no weights."""
    q, k, v = (x.to(request.content_dtype) for x in (*request.rotated, request.v))
    lq, lk = q.shape[2], k.shape[2]
    more_q, more_k = bucket(lq) - lq, bucket(lk + (request.sinks is not None)) - lk
    terms, lo, b = request.terms, request.offsets.lo, q.shape[0]
    # Columns for the offsets of any length in the bucket, which repeat the last one, as beyond the reach.
    columns = max(bucket(lq) + bucket(lk), bucket(request.offsets.count))
    if request.scheme.reach is not None:
        # Tables cached for decoding steps may extend further than the reach.
        columns = max(2 * request.scheme.reach + 1, request.offsets.count)
    bias, gain = (None if x is None else _longer(x, columns) for x in (terms.bias, terms.gain))
    by_query = by_key = None
    if terms.query is not None:
        p = request.q if request.sides.query is None else request.sides.query
        by_query = F.pad(_products(request, p, terms.query, columns), (0, 0, 0, more_q))
    if terms.key is not None:
        t = request.k if request.sides.key is None else request.sides.key
        by_key = F.pad(_products(request, t, terms.key, columns), (0, 0, 0, more_k))
    sides = _sides(request, more_q, more_k, columns)
    q_pos = F.pad(request.q_pos, (0, more_q)).expand(b, -1).contiguous()
    k_pos = F.pad(request.k_pos, (0, more_k)).expand(b, -1).contiguous()
    q = F.pad(q, (0, 0, 0, more_q))
    k, v = (F.pad(x, (0, 0, 0, more_k)) for x in (k, v))
    places = torch.arange(lk + more_k, device=q.device)
    exists, is_sink = places < lk, None if request.sinks is None else places == lk
    mask = None if request.mask is None else F.pad(request.mask.expand(-1, -1, lq, lk), (0, more_k, 0, more_q))
    block_mask = _block_mask(request, q.shape, k.shape[2], exists, is_sink, mask, q_pos, k_pos)
    inputs = (q, k, v, bias, gain, by_query, by_key, sides, q_pos + lo, k_pos, block_mask, request.scale,
              request.softcap, request.sinks, is_sink)  # fmt: skip
    out = _run(*inputs) if torch.compiler.is_compiling() else _run_compiled(*inputs)
    return out[:, :, :lq].to(request.q.dtype), None


def _run(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, gain: Tensor | None, by_query: Tensor | None,
    by_key: Tensor | None, sides: dict[str, Tensor], first: Tensor, k_pos: Tensor, block_mask: Any, scale: float,
    softcap: float | None, sinks: Tensor | None, is_sink: Tensor | None,
) -> Tensor:  # fmt: skip
    """FlexAttention on padded tensors. `first` [B, Lq] is the key position of each query's column 0.

    No number here may depend on the length of a sequence, or Dynamo would compile again for each length.
    """
    from torch.nn.attention.flex_attention import flex_attention

    level, of_query, of_key, temperature = map(sides.get, ("level", "query_level", "key_level", "temperature"))
    tables = [x for x in (bias, gain, level) if x is not None]
    products = [x for x in (by_query, by_key) if x is not None]
    last = tables[0].shape[1] - 1 if tables else products[0].shape[-1] - 1 if products else 0

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        column = (k_pos[b, j] - first[b, i]).clamp(0, last)
        if gain is not None:
            score = score * gain[h if gain.shape[0] > 1 else 0, column]
        if by_query is not None:
            score = score + by_query[b, h, i, column]
        if by_key is not None:
            score = score + by_key[b, h, j, column]
        if bias is not None:
            score = score + bias[h if bias.shape[0] > 1 else 0, column]
        if of_query is not None or of_key is not None:
            added = of_query[b, h, i] if of_query is not None else 0.0
            added = added + of_key[b, h, j] if of_key is not None else added
            score = score + (added if level is None else level[h if level.shape[0] > 1 else 0, column] * added)
        if temperature is not None:
            score = score * temperature[b, h, i]
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if sinks is not None and is_sink is not None:
            score = torch.where(is_sink[j], sinks[h], score)
        return score

    changes = tables or products or sides or sinks is not None or softcap is not None
    mod: Callable[..., Tensor] | None = score_mod if changes else None
    out = flex_attention(
        q, k, v, score_mod=mod, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    assert isinstance(out, Tensor)
    return out


@cache
def _compiled() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(_run, dynamic=False)
    return compiled


def _run_compiled(*inputs: Any) -> Tensor:
    # By default Dynamo stops compiling after a few kernels.
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    with torch._dynamo.config.patch({limit: KERNELS}):
        return _compiled()(*inputs)


def _block_mask(
    request: Request, q_shape: torch.Size, keys: int, exists: Tensor, is_sink: Tensor | None, mask: Tensor | None,
    q_pos: Tensor, k_pos: Tensor,
) -> Any:  # fmt: skip
    """The blocks of queries and keys with a visible pair, and the pairs that are visible in them."""
    from torch.nn.attention.flex_attention import create_block_mask

    b, h, queries, _ = q_shape
    mask_b, mask_h = (1, 1) if mask is None else mask.shape[:2]
    lowest, highest = request.limits
    by_position = lowest is not None or highest is not None
    rows = b if mask_b > 1 or (by_position and not request.consecutive) else 1

    def mask_mod(bb: Tensor, hh: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = exists[j]
        if highest is not None:
            visible = visible & (k_pos[bb, j] - q_pos[bb, i] <= highest)
        if lowest is not None:
            visible = visible & (k_pos[bb, j] - q_pos[bb, i] >= lowest)
        if mask is not None:
            visible = visible & mask[bb if mask_b > 1 else 0, hh if mask_h > 1 else 0, i, j]
        return visible if is_sink is None else visible | is_sink[j]

    return create_block_mask(mask_mod, rows, h if mask_h > 1 else 1, queries, keys, device=q_pos.device)


def _longer(table: Tensor, columns: int) -> Tensor:
    """The table [H, R] with its last column repeated: contiguous, [H, columns]."""
    return torch.cat([table, table[:, -1:].expand(-1, columns - table.shape[1])], dim=1)


def _sides(request: Request, more_q: int, more_k: int, columns: int) -> dict[str, Tensor]:
    """Levels and temperatures, [B, H, padded length], in float32.

    Levels may be large. What is subtracted from those of a sequence's keys is added to its queries'.
    """
    found = {name: x for name, x in request.sides.used().items() if name not in ("query", "key")}
    if request.terms.level is not None:
        found["level"] = request.terms.level
    if {"query_level", "key_level"} <= found.keys():
        middle = found["key_level"].detach().mean(-1, keepdim=True)
        found["key_level"], found["query_level"] = found["key_level"] - middle, found["query_level"] + middle
    b, h = request.q.shape[:2]
    for name, x in found.items():
        if name == "level":
            found[name] = _longer(x, columns)
            continue
        found[name] = F.pad(x.float().expand(b, h, -1), (0, more_k if name == "key_level" else more_q)).contiguous()
    return found


def _products(request: Request, x: Tensor, table: Tensor, columns: int) -> Tensor:
    """The scaled product of every row of x with every column of the table, [B, H, L, columns]."""
    x = x.to(request.wide).repeat_interleave(request.q.shape[1] // x.shape[1], dim=1)
    product = request.scale * (x @ table.mT)
    return torch.cat([product, product[..., -1:].expand(*product.shape[:3], columns - product.shape[3])], dim=-1)
