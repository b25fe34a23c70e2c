"""`attend`: attention with a position scheme."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from locant.attention.choice import choose
from locant.attention.request import Window, prepare
from locant.attention.sides import States
from locant.schemes.base import Scheme


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, scheme: Scheme | None = None, *, q_pos: Tensor | None = None,
    k_pos: Tensor | None = None, mask: Tensor | None = None, additive_mask: Tensor | None = None, causal: bool = False,
    window: int | Window | None = None, scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, x: States | None = None, dropout: float = 0.0,
    impl: str = "auto", need_weights: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, scheme: Scheme | None = None, *, q_pos: Tensor | None = None,
    k_pos: Tensor | None = None, mask: Tensor | None = None, additive_mask: Tensor | None = None, causal: bool = False,
    window: int | Window | None = None, scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, x: States | None = None, dropout: float = 0.0,
    impl: str = "auto", need_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def attend(
    q: Tensor, k: Tensor, v: Tensor, scheme: Scheme | None = None, *, q_pos: Tensor | None = None,
    k_pos: Tensor | None = None, mask: Tensor | None = None, additive_mask: Tensor | None = None, causal: bool = False,
    window: int | Window | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, x: States | None = None, dropout: float = 0.0, impl: str = "auto",
    need_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The output [B, H, Lq, Dv] of attention with positions by `scheme`; with the weights if `need_weights`.

    q, k, v       [B, H, Lq, D], [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv], of one dtype and device.
    scheme        a `Scheme`; None for no positions. The model itself adds `scheme.embed` to its token embeddings;
                  `attend` does not.
    q_pos, k_pos  integer positions, [L] or [B, L], in any order, with gaps, restarts or repeats. Without them the
                  keys are 0 … Lk−1 and the queries the last Lq of the keys, as in decoding with a cache.
    mask          bool, True where attention is allowed: [B, Lk] for padding, [Lq, Lk], or anything that broadcasts
                  to [B, H, Lq, Lk]. Packed sequences need one: positions alone do not keep them apart.
    additive_mask floating-point numbers in the same shapes, added to the logits after the softcap; −∞ hides a key. It
                  gets a gradient. `eager` and `sdpa` compute it.
    causal        a query may attend to keys at its own position and before: k_pos ≤ q_pos.
    window        (left, right): a query may attend to keys from `left` positions before its own to `right` after it,
                  −left ≤ k_pos − q_pos ≤ right; None for no limit. A number stands for both sides. Together with
                  `causal` and `mask`, a key must be allowed by all.
    scale         of the logits; by default the scheme's own, 1/√D for nearly all.
    softcap       a number above 0: every logit, all terms of the scheme included, becomes softcap · tanh(logit /
                  softcap) before the mask is applied (Gemma 2). A bias of −∞ becomes −softcap: it hides no key.
    sinks         [H], one more logit per head: it takes part in the softmax and has no value (gpt-oss). `softcap` does
                  not apply to it. It gets a gradient.
    x             hidden states, for a scheme that reads them (`Scheme.reads`); for others only the shape is checked.
                  [B, Lk, d_model], the input of the layer that made q, k and v; the queries are the last Lq. A scheme
                  that reads queries alone takes [B, Lq, d_model] as well. (x of queries, x of keys) serves where
                  neither fits.
    dropout       on the attention weights, active whenever it is above 0.
    impl          "auto" (the rules are in `locant.attention.choice`), or the name of a back end: `attend` uses that
                  back end or raises an error.
    need_weights  also return the weights [B, H, Lq, Lk]. With `sinks` a row sums to less than 1: the rest is the
                  weight of the sink.

    Tables and softmax are computed in float32 or wider. A query that may attend to no key gets zeros. Keys and values
    must be finite where they are masked too: 0 · NaN is NaN, here as in PyTorch.
    """
    how: dict[str, Any] = {
        "q_pos": q_pos, "k_pos": k_pos, "mask": mask, "additive_mask": additive_mask, "causal": causal,
        "window": window, "scale": scale, "softcap": softcap, "sinks": sinks, "x": x, "dropout": dropout,
        "need_weights": need_weights,
    }  # fmt: skip
    if not _autocasts(q):
        return _attend(q, k, v, scheme, impl, how)
    with torch.autocast(q.device.type, enabled=False):  # it would lower tables and the reference to half precision
        return _attend(q, k, v, scheme, impl, how)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scheme: Scheme | None, impl: str, how: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    request = prepare(q, k, v, scheme, **how)
    backend = choose(request, impl)
    if q.shape[0] == 0 or q.shape[2] == 0:  # no queries
        nothing = q.new_zeros(*q.shape[:3], v.shape[3])
        return (nothing, q.new_zeros(*q.shape[:3], k.shape[2])) if request.need_weights else nothing
    out, weights = backend.attend(request)
    if weights is None or not request.need_weights:
        return out
    return out, weights


def _autocasts(q: Tensor) -> bool:
    if not torch._C._is_any_autocast_enabled() or not isinstance(q, Tensor):
        return False
    kind = q.device.type
    known = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    return known and torch.is_autocast_enabled(kind)
