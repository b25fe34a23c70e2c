"""XLNet: ((q + u)·k + (q + v)·a_r + segments)/√d, with tensors [L, B, H, D].

u (`r_w_bias`) does not depend on positions. It stays with a swapped model: its queries are q + u. The scheme has the
second product.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from locant.hf.seams.opening import Opening, call, is_swapped, never, seam


def _core(
    self: Any,
    q_head: Tensor,
    k_head_h: Tensor,
    v_head_h: Tensor,
    k_head_r: Tensor,
    seg_mat: Tensor | None = None,
    attn_mask: Tensor | None = None,
    output_attentions: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    swapped, mask = is_swapped(self), attn_mask
    if swapped:
        _check_memory(q_head, k_head_h)
        _check_segments(seg_mat)
        q_head = q_head + self.r_w_bias
        mask = None if attn_mask is None else (attn_mask == 0).permute(2, 3, 0, 1)
    query, key, value = (x.permute(1, 2, 0, 3) for x in (q_head, k_head_h, v_head_h))
    out, weights = call(
        self, query, key, value, mask, scaling=self.scale, dropout=self.dropout,
        own=partial(_own, k_head_r=k_head_r, seg_mat=seg_mat), output_attentions=output_attentions, own_logits=True,
    )  # fmt: skip
    out = out.transpose(0, 1)  # [L, B, H, D]
    return (out, weights.permute(2, 3, 0, 1)) if output_attentions and weights is not None else out


def _own(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, k_head_r: Tensor,
    seg_mat: Tensor | None, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads = (x.permute(2, 0, 1, 3) for x in (query, key, value))
    out, weights = type(module).rel_attn_core(module, *heads, k_head_r, seg_mat, mask, output_attentions=True)
    return out.transpose(0, 1), weights.permute(2, 3, 0, 1)


def _check_memory(query: Tensor, key: Tensor) -> None:
    if query.shape[0] != key.shape[0]:
        raise NotImplementedError(
            f"a swapped XLNet model cannot use mems: it got {query.shape[0]} tokens and "
            f"{key.shape[0] - query.shape[0]} states of earlier ones, whose positions it does not know. Call it with "
            f"the whole text and use_mems=False"
        )


def _check_segments(segments: Tensor | None) -> None:
    """Within one segment the segment term is the same for all keys, and softmax ignores it."""
    if segments is None:
        return
    if torch.compiler.is_compiling() or bool(segments[..., 1].any()):
        raise NotImplementedError(
            "a swapped XLNet model reads one segment: locant cannot combine XLNet's segment logits with a scheme. Call "
            "it without token_type_ids, or with the same one for all tokens (XLNet's tokenizer gives its last token "
            "another one)"
        )


XLNET = seam(Opening("xlnet.modeling_xlnet.XLNetRelativeAttention", {"rel_attn_core": _core}, never))
