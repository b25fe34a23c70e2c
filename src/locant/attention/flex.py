"""PyTorch's FlexAttention, with a `score_mod` made from the terms: the fused path on GPUs.

    score  →  score · gain[r] + QA[i, r] + KC[j, r] + bias[r]         QA = scale · q queryᵀ,  KC = scale · k keyᵀ

The tables enter as captured tensors. Products of queries or keys with a table are made beside it, one column per offset
within the scheme's reach; so a query or key term needs a reach. Lengths are filled up to a bucket, masked, so that the
same compiled kernel serves every length of the bucket.

On a CPU it is there to be compared with: forward only, because FlexAttention has no backward there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.attention.request import Request
from locant.attention.tables import transforming

BLOCK = 128
KERNELS = 64


def unsupported(request: Request) -> str | None:
    terms = request.terms
    if terms.pair is not None or terms.value is not None:
        which = "pair" if terms.pair is not None else "value"
        return f"{request.scheme} uses {which}, which a score_mod cannot express"
    if terms.gain is not None and terms.gain.ndim == 3:
        return f"{request.scheme} uses a vector gain, which a score_mod cannot express"
    if (terms.query is not None or terms.key is not None) and request.scheme.reach is None:
        return f"{request.scheme} has query or key vectors without a reach: as many products as pairs"
    if request.need_weights:
        return "it does not return weights (need_weights=True)"
    if not torch.compiler.is_compiling() and transforming():
        return "it has no rule for torch.func and forward-mode derivatives"
    if request.dropout:
        return "FlexAttention has no dropout"
    if request.offsets.inverse is not None:
        return "positions with large gaps have no table over consecutive offsets"
    if request.q.dtype == torch.float64:
        return "FlexAttention does not compute in float64"
    if request.q.device.type == "cpu":
        tensors = [request.q, request.k, request.v, *terms.tables().values()]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return "FlexAttention has no backward pass on CPUs"
    if find_spec("torch.nn.attention.flex_attention") is None:
        return f"torch {torch.__version__} has no FlexAttention"
    return None


def bucket(length: int) -> int:
    """The length a sequence is filled up to: BLOCK times 1, 2, 3, 4, 6, 8, 12, 16, …"""
    blocks = max(1, -(-length // BLOCK))
    power = 1 << (blocks - 1).bit_length()  # the power of two at or above
    return BLOCK * (3 * power // 4 if power >= 4 and blocks <= 3 * power // 4 else power)


def attend(request: Request) -> tuple[Tensor, None]:
    q, k = request.turned()
    v = request.v.to(q.dtype)
    lq, lk = q.shape[2], k.shape[2]
    more_q, more_k = bucket(lq) - lq, bucket(lk) - lk
    terms, lo, b = request.terms, request.offsets.lo, q.shape[0]
    # Room for the offsets of any length in the bucket; the last column goes on, as it does beyond the reach.
    columns = max(bucket(lq) + bucket(lk), bucket(request.offsets.count))
    if request.scheme.reach is not None:
        columns = 2 * request.scheme.reach + 1
    bias, gain = (None if x is None else _longer(x, columns) for x in (terms.bias, terms.gain))
    by_query = by_key = None
    if terms.query is not None:
        by_query = F.pad(_products(request, request.q, terms.query, columns), (0, 0, 0, more_q))
    if terms.key is not None:
        by_key = F.pad(_products(request, request.k, terms.key, columns), (0, 0, 0, more_k))
    q_pos = F.pad(request.q_pos, (0, more_q)).expand(b, -1).contiguous()
    k_pos = F.pad(request.k_pos, (0, more_k)).expand(b, -1).contiguous()
    q = F.pad(q, (0, 0, 0, more_q))
    k, v = (F.pad(x, (0, 0, 0, more_k)) for x in (k, v))
    there = torch.arange(lk + more_k, device=q.device) < lk
    mask = None if request.mask is None else F.pad(request.mask.expand(-1, -1, lq, lk), (0, more_k, 0, more_q))
    block_mask = _block_mask(request, q.shape, k.shape[2], there, mask, q_pos, k_pos)
    inputs = (q, k, v, bias, gain, by_query, by_key, q_pos + lo, k_pos, block_mask, request.scale)
    out = _run(*inputs) if torch.compiler.is_compiling() else _run_compiled(*inputs)
    return out[:, :, :lq].to(request.q.dtype), None


def _run(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, gain: Tensor | None, by_query: Tensor | None,
    by_key: Tensor | None, first: Tensor, k_pos: Tensor, block_mask: Any, scale: float,
) -> Tensor:  # fmt: skip
    """`first` is the key position that a query's column 0 is for. No number here depends on a sequence's length."""
    from torch.nn.attention.flex_attention import flex_attention

    tables = [x for x in (bias, gain) if x is not None]
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
        return score

    mod: Callable[..., Tensor] | None = score_mod if tables or products else None
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
    # One kernel per kind of scheme and bucket: more than the few after which Dynamo gives up compiling by default.
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    with torch._dynamo.config.patch({limit: KERNELS}):
        return _compiled()(*inputs)


def _block_mask(
    request: Request, q_shape: torch.Size, keys: int, there: Tensor, mask: Tensor | None, q_pos: Tensor, k_pos: Tensor,
) -> Any:  # fmt: skip
    """Which blocks of queries and keys have to be looked at, and what of them is visible."""
    from torch.nn.attention.flex_attention import create_block_mask

    b, h, queries, _ = q_shape
    mask_b, mask_h = (1, 1) if mask is None else mask.shape[:2]
    rows = b if mask_b > 1 or (request.causal and not request.consecutive) else 1
    causal = request.causal

    def mask_mod(bb: Tensor, hh: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = there[j]
        if causal:
            seen = seen & (k_pos[bb, j] <= q_pos[bb, i])
        if mask is not None:
            seen = seen & mask[bb if mask_b > 1 else 0, hh if mask_h > 1 else 0, i, j]
        return seen

    return create_block_mask(mask_mod, rows, h if mask_h > 1 else 1, queries, keys, device=q_pos.device)


def _longer(table: Tensor, columns: int) -> Tensor:
    """Contiguous [H, columns], the last column repeated."""
    return torch.cat([table, table[:, -1:].expand(-1, columns - table.shape[1])], dim=1)


def _products(request: Request, x: Tensor, table: Tensor, columns: int) -> Tensor:
    """[B, H, L, columns]: every row with every column of the table, scaled."""
    x = x.to(request.wide).repeat_interleave(request.q.shape[1] // x.shape[1], dim=1)
    product = request.scale * (x @ table.mT)
    return torch.cat([product, product[..., -1:].expand(*product.shape[:3], columns - product.shape[3])], dim=-1)
