"""DeBERTa and DeBERTa-v2: q·k + q·K + k·Q, all divided by √(d·(1 + the number of position products)).

The products with positions are the scheme's; the scale of q·k stays what it was. A mask is 1 where attention is
allowed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from locant.hf.seams.opening import Opening, call, is_swapped, never, seam


def _v1(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None, output_attentions: bool = False, **positions: Any
) -> tuple[Tensor, Tensor | None]:
    _no_second_pass(positions.pop("query_states", None))
    if is_swapped(self) and self.talking_head:
        raise NotImplementedError(
            "this DeBERTa model mixes the logits of its heads (talking_head=True), which locant cannot combine with "
            "a scheme"
        )
    query, key, value = self.transpose_for_scores(self.in_proj(hidden_states)).chunk(3, dim=-1)
    query = query + self.transpose_for_scores(self.q_bias[None, None, :])
    value = value + self.transpose_for_scores(self.v_bias[None, None, :])
    products = 1 + len(self.pos_att_type)
    return _through(self, query, key, value, attention_mask, products, output_attentions,
                    partial(_own_v1, products=products, **positions))  # fmt: skip


def _own_v1(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, products: int,
    relative_pos: Tensor | None = None, rel_embeddings: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    query = query / _root(query, products)
    logits = query @ key.transpose(-1, -2)
    if module.relative_attention and rel_embeddings is not None and relative_pos is not None:
        vectors = module.pos_dropout(rel_embeddings)
        logits = logits + module.disentangled_att_bias(query, key, relative_pos, vectors, products)
    if module.head_logits_proj is not None:
        logits = module.head_logits_proj(logits.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    weights = module.dropout(_softmax(logits, mask, query))
    if module.head_weights_proj is not None:
        weights = module.head_weights_proj(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return (weights @ value).transpose(1, 2), weights


def _v2(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None, output_attentions: bool = False, **positions: Any
) -> tuple[Tensor, Tensor | None]:
    _no_second_pass(positions.pop("query_states", None))
    states = (layer(hidden_states) for layer in (self.query_proj, self.key_proj, self.value_proj))
    query, key, value = (x.view(*x.shape[:-1], self.num_attention_heads, -1).transpose(1, 2) for x in states)
    products = 1 + sum(kind in self.pos_att_type for kind in ("c2p", "p2c"))
    return _through(self, query, key, value, attention_mask, products, output_attentions,
                    partial(_own_v2, products=products, **positions))  # fmt: skip


def _own_v2(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, products: int,
    relative_pos: Tensor | None = None, rel_embeddings: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    flat = [x.contiguous().flatten(0, 1) for x in (query, key, value)]  # [B·H, L, D]
    logits = torch.bmm(flat[0], flat[1].transpose(-1, -2) / _root(query, products))
    if module.relative_attention:
        vectors = module.pos_dropout(rel_embeddings)
        logits = logits + module.disentangled_attention_bias(flat[0], flat[1], relative_pos, vectors, products)
    weights = module.dropout(_softmax(logits.view(*query.shape[:3], -1), mask, query))
    out = torch.bmm(weights.flatten(0, 1), flat[2])
    return out.view(query.shape).transpose(1, 2), weights


def _through(
    self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, products: int, output_attentions: bool,
    own: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    scaling = 1 / math.sqrt(products * query.shape[-1])
    out, weights = call(
        self, query, key, value, mask, scaling=scaling, dropout=self.dropout, own=own,
        output_attentions=output_attentions, own_logits=True,
    )  # fmt: skip
    return out.flatten(2), weights if output_attentions else None


def _root(query: Tensor, products: int) -> Tensor:
    """√(d·products), rounded as in transformers."""
    return torch.sqrt(torch.tensor(query.shape[-1], dtype=torch.float) * products).to(query.dtype)


def _softmax(logits: Tensor, mask: Tensor, query: Tensor) -> Tensor:
    return logits.masked_fill(~mask.bool(), torch.finfo(query.dtype).min).softmax(-1)


def _no_second_pass(query_states: Tensor | None) -> None:
    if query_states is not None:
        raise NotImplementedError(
            "locant cannot run DeBERTa with query_states, which are other tokens than its keys (z_steps > 1)"
        )


V1 = seam(Opening("deberta.modeling_deberta.DisentangledSelfAttention", {"forward": _v1}, never))
V2 = seam(Opening("deberta_v2.modeling_deberta_v2.DisentangledSelfAttention", {"forward": _v2}, never))
