"""XLM and Flaubert: softmax((q/√d)·k)·v in float32, with masks that are 1 where attention is allowed."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.hf.seams.opening import Opening, call, is_swapped, never, seam


def _xlm(
    self: Any,
    input: Tensor,
    mask: Tensor,
    kv: Tensor | None = None,
    cache: Any = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor | None, ...]:
    """The forward of self-attention. The model makes a cache in every pass, and fills it."""
    shape = (*input.shape[:2], self.n_heads, self.head_dim)
    query, key, value = (layer(input).view(shape).transpose(1, 2) for layer in (self.q_lin, self.k_lin, self.v_lin))
    if cache is not None:
        key, value = getattr(cache, "self_attention_cache", cache).update(key, value, self.layer_id)
    if is_swapped(self) and query.shape[2] != key.shape[2]:
        raise NotImplementedError(
            f"a swapped XLM or Flaubert model cannot use a cache: it got {query.shape[2]} tokens and "
            f"{key.shape[2] - query.shape[2]} states of earlier ones, whose positions it does not know. Call it with "
            f"the whole text and no cache"
        )
    shown = mask[:, None] if mask.ndim == 3 else mask[:, None, None]
    out, weights = call(
        self, query, key, value, shown != 0, scaling=self.head_dim**-0.5, dropout=float(self.dropout), own=_own,
        output_attentions=output_attentions, own_logits=True,
    )  # fmt: skip
    found = self.out_lin(out.flatten(2))
    return (found, weights) if output_attentions else (found,)


def _own(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    logits = query / math.sqrt(module.head_dim) @ key.transpose(2, 3)
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    weights = F.softmax(logits.float(), dim=-1).type_as(logits)
    weights = F.dropout(weights, p=module.dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


XLM = seam(Opening("xlm.modeling_xlm.MultiHeadAttention", {"forward": _xlm}, never))
FLAUBERT = seam(Opening("flaubert.modeling_flaubert.MultiHeadAttention", {"forward": _xlm}, never))
