"""Bloom, MPT and Falcon: decoders that add ALiBi to their logits, or rotate, in an attention class of their own.

One layer makes queries, keys and values together. A swapped module ignores the bias that the model still passes to it;
the scheme has it.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locant.hf import interface
from locant.hf.seams.opening import Opening, always, call, is_swapped, seam


def _bloom(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if self.pretraining_tp > 1 and self.slow_but_exact:
        raise NotImplementedError(
            "locant cannot run a Bloom model with slow_but_exact=True, which splits the output projection; set "
            "config.slow_but_exact = False: the results differ by rounding alone"
        )
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    out, weights = call(
        self, query, key, value, attention_mask, scaling=self.inv_norm_factor, dropout=self.attention_dropout,
        own=partial(_own_bloom, alibi=alibi), output_attentions=output_attentions, own_logits=True,
    )  # fmt: skip
    found = self.dense(out.flatten(2))
    return residual + F.dropout(found, p=self.hidden_dropout, training=self.training), weights


def _own_bloom(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, alibi: Tensor, **others: Any
) -> tuple[Tensor, Tensor]:
    flat = [x.reshape(-1, *x.shape[2:]) for x in (query, key, value)]  # [B·H, L, D]
    logits = alibi.baddbmm(flat[0], flat[1].transpose(-1, -2), beta=module.beta, alpha=module.inv_norm_factor)
    logits = logits.view(*query.shape[:3], -1)
    logits = logits if mask is None else logits + mask
    weights = module.attention_dropout(F.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype))
    out = torch.bmm(weights.view(-1, *weights.shape[2:]), flat[2])
    return out.view(query.shape).transpose(1, 2), weights


def _mpt(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """MPT: masks are True where attention is not allowed."""
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    shape = (*hidden_states.shape[:2], self.n_heads, self.head_dim)
    query, key, value = (part.reshape(shape).transpose(1, 2) for part in mixed.chunk(3, dim=2))
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    mask = ~attention_mask if attention_mask is not None and is_swapped(self) else attention_mask
    out, weights = call(
        self, query, key, value, mask, scaling=self.softmax_scale, dropout=float(self.attn_dropout_p),
        own=partial(_own_mpt, alibi=position_bias), own_logits=True,
    )  # fmt: skip
    return self.out_proj(out.flatten(2)), weights


def _own_mpt(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, alibi: Tensor, **others: Any
) -> tuple[Tensor, Tensor]:
    logits = query @ key.transpose(-1, -2) * module.softmax_scale
    logits = logits + alibi[:, :, max(0, alibi.shape[2] - key.shape[2]) :]
    logits = logits if mask is None else logits.masked_fill(mask, torch.finfo(query.dtype).min)
    weights = F.softmax(logits.float(), dim=-1).to(value.dtype)
    weights = F.dropout(weights, p=module.attn_dropout_p, training=module.training)
    return (weights @ value).transpose(1, 2), weights


def _falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] = (),  # type: ignore[assignment]
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Falcon: ALiBi or rotary by its config. Only with ALiBi are attention weights dropped out."""
    parts = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (part.transpose(1, 2) for part in parts)
    if not self.config.alibi:
        rotate = vars(sys.modules["transformers.models.falcon.modeling_falcon"])["apply_rotary_pos_emb"]
        query, key = rotate(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    out, weights = call(
        self, query, key, value, attention_mask, scaling=self.inv_norm_factor,
        dropout=self.attention_dropout if self.config.alibi else 0.0, own=partial(_own_falcon, alibi=alibi),
        output_attentions=output_attentions, own_logits=alibi is not None,
    )  # fmt: skip
    return self.dense(out.flatten(2)), weights


def _own_falcon(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, alibi: Tensor | None,
    dropout: float, output_attentions: bool = False, **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if interface.original(module.config._attn_implementation) == "sdpa" and not output_attentions:
        causal = module.is_causal and mask is None and query.shape[2] > 1
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        return out.transpose(1, 2), None
    logits = query @ key.transpose(-1, -2)
    if alibi is None:
        logits /= math.sqrt(module.head_dim)
        weights = F.softmax(logits + mask, dim=-1, dtype=query.dtype)
    else:
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        logits = logits + alibi.view(query.shape[0], module.num_heads, 1, -1)
        logits *= module.inv_norm_factor
        weights = module.attention_dropout(F.softmax(logits + mask, dim=-1, dtype=query.dtype))
    return (weights @ value).transpose(1, 2), weights


def two_dimensional_masks(stack: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a swapped MPT model: refuses masks that the model would read as the opposite of bool masks."""
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.ndim != 2:
        raise TypeError(
            f"a swapped MPT model takes attention masks [batch, length] of 0 and 1; got {list(mask.shape)} in "
            f"{mask.dtype}, which MPT would read as True = may not attend"
        )
    return type(stack).forward(stack, *args, **kwargs)


BLOOM = seam(Opening("bloom.modeling_bloom.BloomAttention", {"forward": _bloom}, always))
MPT = seam(Opening("mpt.modeling_mpt.MptAttention", {"forward": _mpt}, always))
FALCON = seam(Opening("falcon.modeling_falcon.FalconAttention", {"forward": _falcon}))
