"""PyTorch's `scaled_dot_product_attention`, with the terms in its mask.

The mask holds everything that is added to the logits: bias, query and key vectors, levels, pair. Temperatures multiply
the queries and the mask. A mask cannot hold a gain, which multiplies the content product, or a value term, which
changes the sum over values; and the kernel does not return weights.

A bias alone, over consecutive positions, is a Toeplitz matrix, b[j − i + Lq − 1], and needs no memory of its own: with
the queries in reverse order it is b[i' + j], which is a view of b with strides (1, 1). The kernel reads the view
directly. Causality is −∞ in b; padding removes keys. The kernel has no gradient for a mask, and PyTorch falls back to
its slowest implementation if a mask requires one. So the kernel gets b detached, and `BiasGradient` computes the
gradient of b.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from locant.attention.eager import added_logits, in_full
from locant.attention.request import Request
from locant.attention.sizes import decided, same
from locant.schemes.base import readable

ROWS = 2**22
"""The gradient of a bias is computed from at most this many logits at a time."""


def attend(request: Request) -> tuple[Tensor, None]:
    """The output [B, H, Lq, Dv] in the dtype of q, and None: the kernel returns no weights."""
    dtype = request.content_dtype
    q, k, v = (x if x.dtype == dtype else x.to(dtype) for x in (*request.rotated, request.v))
    band, spans = _band(request), _spans(request)
    if band is not None and spans is not None:
        return _attend_band(request, q, k, v, *band, spans), None
    return _attend_dense(request, q, k, v), None


def _attend_dense(request: Request, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With a mask that has a number for every pair, [B, H, Lq, Lk]."""
    lq, lk = q.shape[2], k.shape[2]
    added, temperature = None, request.sides.temperature
    if request.terms.used() or request.sides.used():
        needs_keys = request.terms.pair is not None or (request.terms.key is not None and request.sides.key is None)
        needs_queries = request.terms.query is not None and request.sides.query is None
        full_q, full_k = request.q, request.k
        if needs_keys:
            full_q, full_k, _ = in_full(request)
        elif needs_queries:
            full_q = request.q.to(request.wide)
        added = added_logits(request, slice(None), full_q, full_k)
    if temperature is not None:
        wide = torch.promote_types(q.dtype, request.wide)  # a rotation may have widened the queries beyond float32
        q = (q.to(wide) * temperature[..., None].to(wide)).to(q.dtype)
        added = None if added is None else added * temperature[..., None].to(added.dtype)
    if request.additive is not None:
        added = request.additive if added is None else added + request.additive
    if added is not None and q.dtype == torch.float64:
        added = added.double()  # the kernel takes float32 masks for every dtype except float64

    # The kernel's own causal mask counts from the first key: right only where query i and key i are the same token.
    # It multiplies −∞ by the scale: NaN unless the scale is above 0.
    by_index = request.causal and request.consecutive and same(lq, lk) and not request.limited and added is None
    by_index = decided(by_index and request.scale > 0)
    visible = None if by_index else request.visible()
    nothing = None
    if visible is not None:
        nothing = ~visible.any(-1, keepdim=True)  # a query that may attend to no key gets zeros
        visible = visible | nothing
        q = q.masked_fill(nothing, 0.0)  # its logits could be so large that the kernel's backward pass overflows
        if added is not None and request.additive is not None:
            added = added.masked_fill(nothing, 0.0)  # all −∞ would give NaN gradients
    if added is not None:
        mask: Tensor | None = added if visible is None else added.masked_fill(~visible, -torch.inf)
    else:
        mask = visible
    if mask is not None and (mask.shape[2] != lq or mask.shape[3] != lk):
        mask = mask.expand(-1, -1, lq, lk)
    out = _kernel(request, q, k, v, mask, causal=by_index)
    out = out if nothing is None else out.masked_fill(nothing, 0.0)
    return out if out.dtype == request.q.dtype else out.to(request.q.dtype)


def _attend_band(
    request: Request, q: Tensor, k: Tensor, v: Tensor, band: Tensor, start: int, spans: list[tuple[slice, int, int]]
) -> Tensor:
    """With a mask that is a strided view of `band`, [H, Lq + Lk − 1] from column `start` on.

    `spans` are (sequences, first, end): these sequences of the batch may attend to the keys first … end − 1.
    """
    (b, h, lq, _), outs = q.shape, []
    q = q.flip(2) if lq > 1 else q
    band = band.double() if q.dtype == torch.float64 else band
    trained = band.requires_grad and torch.is_grad_enabled()
    plain = band.detach() if trained else band
    strides = (0, plain.stride(0) if plain.shape[0] > 1 else 0, plain.stride(1), plain.stride(1))
    for rows, first, end in spans:
        mask = plain.as_strided(
            (rows.stop - rows.start, h, lq, end - first),
            strides,
            plain.storage_offset() + (start + first) * strides[-1],
        )
        part_q, part_k, part_v = q, k, v
        if (rows, first, end) != (slice(0, b), 0, k.shape[2]):
            part_q, part_k, part_v = q[rows], k[rows, :, first:end], v[rows, :, first:end]
        out = _kernel(request, part_q, part_k, part_v, mask, causal=False)
        if trained:
            part = band[:, start + first : start + end + lq - 1]
            out = BiasGradient.apply(out, part, part_q, part_k, part_v, request.scale)
        outs.append(out)
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    out = out.flip(2) if lq > 1 else out
    return out if out.dtype == request.q.dtype else out.to(request.q.dtype)


class BiasGradient(torch.autograd.Function):
    """Returns the output of attention unchanged; its backward adds the gradient of the bias, which the kernel lacks.

    With logits S_ij = scale · q_i·k_j + b[i + j] (queries in reverse order), weights P, output O and its gradient G:

        dS = P · (G vᵀ − rowsum(G · O))        db[c] = Σ_{i + j = c} dS_ij

    It is computed for a slice of the rows at a time, so memory stays linear in the length.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, band: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(out, band, q, k, v)
        ctx.scale = scale
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, band, q, k, v = ctx.saved_tensors
        wide, groups = band.dtype, q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1).to(wide) if groups > 1 else x.to(wide) for x in (k, v))
        (b, h, lq, _), n = q.shape, k.shape[2]
        total = band.new_zeros(h, lq + n - 1)
        step = max(1, ROWS // (b * h * n))
        for start in range(0, lq, step):
            rows = slice(start, min(start + step, lq))
            length = rows.stop - start
            g = grad[:, :, rows].to(wide)
            logits = (q[:, :, rows].to(wide) * ctx.scale) @ k.mT
            logits += band[:, start : rows.stop + n - 1].unfold(1, n, 1)
            weights = torch.softmax(logits, dim=-1)
            pull = g @ v.mT  # [B, H, rows, keys]
            pull -= (g * out[:, :, rows].to(wide)).sum(-1, keepdim=True)
            change = pull.mul_(weights).sum(0)  # [H, rows, keys]
            # The stored row stride is one more than the row length, so each row is shifted by one.
            skewed = F.pad(change, (0, length)).flatten(1)[:, : length * (n + length - 1)]
            total[:, start : rows.stop + n - 1] += skewed.view(h, length, n + length - 1).sum(1)
        if band.shape[0] == 1:
            total = total.sum(0, keepdim=True)
        return grad, total, None, None, None, None


def _kernel(request: Request, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=request.dropout,
        is_causal=causal,
        scale=request.scale,
        enable_gqa=decided(k.shape[1] != q.shape[1]),
    )
    if torch.compiler.is_compiling():
        return out
    node = out.grad_fn
    if node is not None and "FlashAttentionForCpu" in node.name():
        node.register_hook(_explain_second_derivatives)
    return out


def _explain_second_derivatives(grads: Any, _: Any) -> Any:
    """Called after the backward pass of the kernel, with its gradients; `create_graph=True` enables gradients there."""
    if not torch.is_grad_enabled():
        return None
    return tuple(grad if grad is None else _NoSecondDerivative.apply(grad) for grad in grads)


class _NoSecondDerivative(torch.autograd.Function):
    """Returns a gradient unchanged; its backward raises before torch does, and states what to do."""

    @staticmethod
    def forward(grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Stores nothing."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise NotImplementedError(
            "PyTorch's kernel for CPUs, which impl='sdpa' and often impl='auto' use, has no second derivative; call "
            "locant.attend with impl='fused' or impl='eager'"
        )


def _band(request: Request) -> tuple[Tensor, int] | None:
    """The bias over j − i + Lq − 1, −∞ in the future if causal, and its first column in the tensor returned.

    None if a view of it cannot be the whole mask.
    """
    bias = request.terms.bias
    if bias is None or request.terms.used() != ("bias",) or request.sides.used():
        return None
    if request.additive is not None or request.window != (None, None):
        return None
    if torch.compiler.is_compiling():
        return None  # `unfold` would fix the length of the graph, and loops over a symbolic length do not compile
    if request.dropout and bias.requires_grad and torch.is_grad_enabled():
        return None  # the gradient would need the dropped weights
    if not request.consecutive and not _in_step(request):
        return None
    lq, lk = request.q.shape[2], request.k.shape[2]
    first = 1 - lk if request.consecutive else int(request.k_pos[0, 0] - request.q_pos[0, -1])  # r of column 0
    n = lq + lk - 1
    lo, hi = request.offsets.lo, request.offsets.lo + bias.shape[1] - 1
    start = first - lo
    if lo > first or hi < first + n - 1:  # beyond the scheme's reach the last column repeats
        before, after = min(max(lo - first, 0), n), min(max(first + n - 1 - hi, 0), n)
        within = bias[:, max(first - lo, 0) : max(first + n - lo, 0)]
        bias = torch.cat([bias[:, :1].expand(-1, before), within, bias[:, -1:].expand(-1, after)], dim=1)[:, :n]
        start = 0
    if request.causal and first + n - 1 > 0:  # some key is later than some query
        if first + lq - 1 > 0:  # the first query could attend to no key
            return None
        future = torch.arange(first, first + n, device=bias.device) > 0
        bias, start = bias.narrow(1, start, n).masked_fill(future, -torch.inf), 0
    return bias, start


def _in_step(request: Request) -> bool:
    """Whether positions go up by one, and the distance of keys and queries is the same in every sequence."""
    q_pos, k_pos = request.q_pos, request.k_pos
    if request.offsets.inverse is not None or not (readable(q_pos) and readable(k_pos)):
        return False
    apart = k_pos[:, 0] - q_pos[:, 0]
    return bool((q_pos.diff(dim=-1) == 1).all() and (k_pos.diff(dim=-1) == 1).all() and (apart == apart[0]).all())


def _spans(request: Request) -> list[tuple[slice, int, int]] | None:
    """Groups of sequences with the keys they see, first … end − 1; None if the mask is not padding at the ends."""
    b, lk = request.q.shape[0], request.k.shape[2]
    mask = request.mask
    if mask is None:
        return [(slice(0, b), 0, lk)]
    if not readable(mask) or mask.shape[1] != 1 or not (mask == mask[:, :, :1]).all():
        return None
    spans = []
    keys = mask[:, 0, 0].expand(b, lk)
    counts, firsts = keys.sum(-1).tolist(), keys.int().argmax(-1).tolist()
    for row, (count, first) in enumerate(zip(counts, firsts, strict=True)):
        if count == 0 or not bool(keys[row, first : first + count].all()):  # only padding, or a gap
            return None
        if request.causal and first > 0:  # queries before the first key would see no key
            return None
        spans.append((slice(row, row + 1), first, first + count))
    if all(span[1:] == spans[0][1:] for span in spans):
        return [(slice(0, b), *spans[0][1:])]
    return spans
