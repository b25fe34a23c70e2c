"""BART's relatives that write attention out: softmax((s·q)·k + mask)·v, with the heads in the batch.

XGLM, MVP, TrOCR, FSMT and the decoders of CLVP and LED. One class serves self-attention and cross-attention.
Cross-attention goes through the interface too, where it has no scheme and stays as it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.hf.call import AttentionFunction
from locant.hf.family import Seam
from locant.hf.seams.opening import Opening, additive, always, call, if_decoder, is_swapped, never, seam


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
    lowest: bool = False, hidden: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What all these classes compute, in their order, so that a model that is not swapped has the same outputs.

    lowest   logits are at least the lowest number of their dtype (XGLM).
    hidden   keys that no query may attend to, bool [B, Lk] (FSMT).
    """
    flat = [x.reshape(-1, *x.shape[2:]) for x in (query * scaling, key, value)]  # [B·H, L, D]
    logits = torch.bmm(flat[0], flat[1].transpose(1, 2)).view(*query.shape[:3], -1)
    logits = logits if mask is None else logits + mask
    if lowest and mask is not None:
        logits = logits.clamp(min=torch.finfo(logits.dtype).min)
    if hidden is not None:
        logits = logits.masked_fill(hidden[:, None, None], torch.finfo(logits.dtype).min)
    upcast = torch.float32 if lowest and logits.dtype == torch.float16 else None
    weights = F.softmax(logits, dim=-1, dtype=upcast).to(logits.dtype)
    dropped = F.dropout(weights, p=module.dropout, training=module.training)
    out = torch.bmm(dropped.flatten(0, 1), flat[2]).view(query.shape)
    return out.transpose(1, 2), weights


def _heads(module: Any, states: Tensor) -> Tensor:
    """[B, L, width] as [B, H, L, D]."""
    return states.view(*states.shape[:-1], module.num_heads, module.head_dim).transpose(1, 2)


def _keys_and_values(module: Any, states: Tensor, cache: Any, cross: bool) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, L, D] of states [B, L, width], with those in the cache."""
    cache_of_both = hasattr(cache, "is_updated")
    part = cache
    if cache_of_both:
        part = cache.cross_attention_cache if cross else cache.self_attention_cache
        if cross and cache.is_updated.get(module.layer_idx):
            layer = part.layers[module.layer_idx]
            return layer.keys, layer.values
    key, value = _heads(module, module.k_proj(states)), _heads(module, module.v_proj(states))
    if cache is not None:
        key, value = part.update(key, value, module.layer_idx)
        if cross and cache_of_both:
            cache.is_updated[module.layer_idx] = True
    return key, value


def bart_attention(
    self: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    output_attentions: bool | None = False,
    own: AttentionFunction = _attention,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The forward of BART's attention, over its own states or those of an encoder."""
    states, cross = (hidden_states, False) if key_value_states is None else (key_value_states, True)
    query = _heads(self, self.q_proj(hidden_states))
    key, value = _keys_and_values(self, states, past_key_values, cross)
    mask = attention_mask if is_swapped(self) else additive(attention_mask, query)
    out, weights = call(
        self, query, key, value, mask, scaling=self.scaling, dropout=float(self.dropout), own=own,
        output_attentions=bool(output_attentions),
    )  # fmt: skip
    return self.out_proj(out.flatten(2)), weights


def _xglm(self: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    return bart_attention(self, hidden_states, own=partial(_attention, lowest=True), **kwargs)


def _mvp(self: Any, hidden_states: Tensor, attn_prompt: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    if attn_prompt is not None:
        raise NotImplementedError(
            "locant cannot run an MVP model with prompts (use_prompt=True): prompts are keys without a position. Open "
            "the model with use_prompt=False"
        )
    return _trocr(self, hidden_states, **kwargs)


def _trocr(self: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Returns weights only where they are wanted."""
    out, weights = bart_attention(self, hidden_states, **kwargs)
    return out, weights if kwargs.get("output_attentions") else None


def _clvp(
    self: Any,
    hidden_states: Tensor,
    rotary_pos_emb: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """CLVP's decoder. Its encoders use the same class with rotary positions; they have no seam."""
    if rotary_pos_emb is not None:
        raise NotImplementedError("locant cannot run CLVP's encoders, which rotate values too; use its decoder alone")
    query = _heads(self, self.q_proj(hidden_states))
    key, value = _keys_and_values(self, hidden_states, past_key_values, cross=False)
    out, weights = call(
        self, query, key, value, attention_mask, scaling=self.scale, dropout=float(self.dropout), own=_own_clvp,
        output_attentions=bool(kwargs.get("output_attentions")),
    )  # fmt: skip
    return self.out_proj(out.flatten(2)), weights


def _own_clvp(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float, **others: Any
) -> tuple[Tensor, Tensor]:
    logits = query.contiguous() * scaling @ key.contiguous().transpose(2, 3)
    weights = (logits if mask is None else logits + mask).softmax(-1)
    dropped = F.dropout(weights, p=module.dropout, training=module.training)
    return (dropped @ value.contiguous()).transpose(1, 2), weights


def _fsmt(
    self: Any,
    query: Tensor,
    key: Tensor | None,
    key_padding_mask: Tensor | None = None,
    layer_state: Any = None,
    attn_mask: Tensor | None = None,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """FSMT: states are [L, B, width]. It has two masks, of the future and of padding (True = may not attend)."""
    cross = self.encoder_decoder_attention
    states = key if cross and key is not None else query
    queries = _heads(self, self.q_proj(query).transpose(0, 1))
    keys, values = _keys_and_values(self, states.transpose(0, 1), layer_state, cross)
    hidden = None if key_padding_mask is None or key_padding_mask.ndim == 0 else key_padding_mask
    mask = attn_mask
    if is_swapped(self):
        shown = [] if attn_mask is None else [attn_mask[None, None] == 0]
        shown += [] if hidden is None else [~hidden[:, None, None]]
        mask = shown[0] & shown[-1] if shown else None
    out, weights = call(
        self, queries, keys, values, mask, scaling=self.scaling, dropout=float(self.dropout),
        own=partial(_attention, hidden=hidden), output_attentions=bool(output_attentions),
        own_logits=hidden is not None,
    )  # fmt: skip
    return self.out_proj(out.transpose(0, 1).flatten(2)), weights if output_attentions else None


def _open_fsmt(base: Any) -> None:
    """Also gives the stacks of an FSMT model, which are no models of transformers, its config."""
    _FSMT.open(base)
    for stack in (base.encoder, base.decoder):
        stack.__dict__["config"] = base.config


def _close_fsmt(base: Any) -> None:
    _FSMT.close(base)
    for stack in (base.encoder, base.decoder):
        stack.__dict__.pop("config", None)


XGLM = seam(Opening("xglm.modeling_xglm.XGLMAttention", {"forward": _xglm}, if_decoder))
MVP = seam(Opening("mvp.modeling_mvp.MvpAttention", {"forward": _mvp}, if_decoder))
CLVP = seam(Opening("clvp.modeling_clvp.ClvpSelfAttention", {"forward": _clvp}, always))
TROCR = seam(Opening("trocr.modeling_trocr.TrOCRAttention", {"forward": _trocr}, if_decoder))
# Not causal: FSMT makes a mask of the future, except where it has a cache. There every token sees all that it is given.
_FSMT = seam(Opening("fsmt.modeling_fsmt.Attention", {"forward": _fsmt}, never))
FSMT = Seam(_open_fsmt, _close_fsmt)
