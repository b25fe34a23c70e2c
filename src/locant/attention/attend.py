"""`attend`: attention with a position scheme, on the first back end that can do it."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Literal, overload

import torch
from torch import Tensor

from locant.attention import eager, flex, fused, sdpa
from locant.attention.request import Request, prepare
from locant.attention.tables import transforming
from locant.schemes.base import Scheme

BACKENDS: dict[str, ModuleType] = {"fused": fused, "sdpa": sdpa, "flex": flex, "eager": eager}
"""Each has attend(request) and unsupported(request) -> reason or None."""

AUTO: dict[str, tuple[str, ...]] = {
    "cpu": ("fused", "sdpa", "eager"),
    "cuda": ("flex", "sdpa", "eager"),
}
"""What `impl="auto"` tries, in this order, after `sdpa` where positions cost it nothing (`sdpa.for_free`)."""
OTHERWISE = ("sdpa", "eager")


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, scheme: Scheme | None = None, *, q_pos: Tensor | None = None,
    k_pos: Tensor | None = None, mask: Tensor | None = None, causal: bool = False, scale: float | None = None,
    dropout: float = 0.0, impl: str = "auto", need_weights: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, scheme: Scheme | None = None, *, q_pos: Tensor | None = None,
    k_pos: Tensor | None = None, mask: Tensor | None = None, causal: bool = False, scale: float | None = None,
    dropout: float = 0.0, impl: str = "auto", need_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scheme: Scheme | None = None,
    *,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
    need_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q [B, H, Lq, D] over k [B, Hkv, Lk, D] and v [B, Hkv, Lk, Dv], with positions by `scheme`.

    scheme        a `Scheme`; None for no positions. What it adds to the token embeddings (`scheme.embed`) is not
                  done here but where the model embeds its tokens.
    q_pos, k_pos  integer positions, [L] or [B, L], in any order, with gaps, restarts or repeats. Without them the
                  keys are 0 … Lk−1 and the queries the last Lq of the keys, as in decoding with a cache.
    mask          bool, True where attention is allowed: [B, Lk] for padding, [Lq, Lk], or anything that broadcasts
                  to [B, H, Lq, Lk]. Packed sequences need one: positions alone do not keep them apart.
    causal        a query sees the keys at its own position and before: k_pos ≤ q_pos.
    scale         of the logits; by default the scheme's own, 1/√D for nearly all.
    dropout       on the attention weights, active whenever it is above 0.
    impl          "auto", or a back end by name: that one or an error, never another.
    need_weights  also return the weights [B, H, Lq, Lk].

    Tables and softmax are computed in float32 or wider. A query that may see no key gets zeros. Keys and values must be
    finite where they are masked too: 0 · NaN is NaN, here as in PyTorch.
    """
    # Under autocast tables and the reference would drop to half precision.
    kind = q.device.type if isinstance(q, Tensor) else "cpu"
    lower = torch.autocast(kind, enabled=False) if _autocasts(kind) else nullcontext()
    with lower:
        request = prepare(
            q, k, v, scheme, q_pos=q_pos, k_pos=k_pos, mask=mask, causal=causal, scale=scale, dropout=dropout,
            need_weights=need_weights,
        )  # fmt: skip
        backend = choose(request, impl)
        if request.q.shape[0] == 0 or request.q.shape[2] == 0:  # nobody asks anything
            nothing = q.new_zeros(*q.shape[:3], v.shape[3])
            return (nothing, q.new_zeros(*q.shape[:3], k.shape[2])) if need_weights else nothing
        out, weights = backend.attend(request)
    return (out, weights) if need_weights else out


def _autocasts(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def choose(request: Request, impl: str) -> ModuleType:
    """The back end for a request; an error, with the reason, if the one that was named cannot do it."""
    if impl == "auto":
        if not torch.compiler.is_compiling() and transforming():
            return eager  # which is made of what torch.func has rules for
        if sdpa.for_free(request):
            return sdpa
        order = AUTO.get(request.q.device.type, OTHERWISE)
        return next(BACKENDS[name] for name in order if BACKENDS[name].unsupported(request) is None)
    if impl not in BACKENDS:
        raise ValueError(f"unknown impl {impl!r}; there is: auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[impl].unsupported(request)
    if reason is not None:
        able = [repr(name) for name, backend in BACKENDS.items() if backend.unsupported(request) is None]
        raise ValueError(f"impl={impl!r} cannot do this: {reason}; use impl='auto' or {' or '.join(able)}")
    return BACKENDS[impl]
