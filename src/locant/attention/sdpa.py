"""PyTorch's `scaled_dot_product_attention`, with the terms folded into its mask.

It takes whatever is added to the logits (bias, query, key, pair) and refuses, by name, what is not: a gain multiplies
the content product, a value term changes what is summed, and the kernel does not return weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.attention.eager import added_logits, in_full
from locant.attention.request import Request


def unsupported(request: Request) -> str | None:
    cannot = [name for name in ("gain", "value") if name in request.terms.used()]
    if cannot:
        return f"{request.scheme} uses {' and '.join(cannot)}, which do not fit into a mask"
    if request.need_weights:
        return "it does not return weights (need_weights=True)"
    return None


def attend(request: Request) -> tuple[Tensor, None]:
    q, k = request.scheme.rotate(request.q, request.k, request.q_pos, request.k_pos)
    v = request.v.to(q.dtype)  # rotate may widen
    lq, lk = q.shape[2], k.shape[2]
    added = None
    if request.terms.used():
        full_q, full_k, _ = in_full(request)
        added = added_logits(request, slice(None), full_q, full_k)
        if added is not None and q.dtype == torch.float64:
            added = added.double()  # the kernel takes float32 masks for every dtype but this

    # The kernel's own causal mask counts from the first key: right only where query i and key i are the same token.
    by_index = request.causal and request.consecutive and lq == lk and request.mask is None and added is None
    visible = None if by_index else request.visible()
    nothing = None
    if visible is not None:
        nothing = ~visible.any(-1, keepdim=True)  # a query that sees no key gets zeros, not NaN
        visible = visible | nothing
    if added is not None:
        mask: Tensor | None = added if visible is None else added.masked_fill(~visible, -torch.inf)
    else:
        mask = visible
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if mask is None else mask.expand(-1, -1, lq, lk),
        dropout_p=request.dropout,
        is_causal=by_index,
        scale=request.scale,
        enable_gqa=True if k.shape[1] != q.shape[1] else False,  # noqa: SIM210 - a bool, also of symbolic sizes
    )
    out = out if nothing is None else out.masked_fill(nothing, 0.0)
    return out.to(request.q.dtype), None
