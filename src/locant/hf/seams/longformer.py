"""Longformer and LED: encoders that attend to a window of tokens and to global tokens. LED's decoder is like BART's.

Token i of an encoder attends to the tokens j with |i − j| ≤ w, and to all global tokens, by softmax(q·k/√d)·v. A
global token attends to all tokens, by queries, keys and values that have weights of their own. transformers computes
the window in blocks; here it is a mask, so a sequence needs no padding to a multiple of the window. Beltagy, Peters &
Cohan 2020, arXiv 2004.05150.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from locant.hf.carrying import carried
from locant.hf.seams.bart import bart_attention
from locant.hf.seams.opening import Opening, always, call, never, seam


def _window(self: Any, hidden_states: Tensor, is_index_masked: Tensor, is_index_global_attn: Tensor) -> Tensor:
    """What tokens that are not global may attend to, bool [B, 1, L, L]."""
    place = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    near: Tensor = (place[:, None] - place).abs() <= self.one_sided_attn_window_size
    reached = near | is_index_global_attn[:, None, :]
    return (reached & ~is_index_masked[:, None, :])[:, None]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaling: float, dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the original computes, with every pair of tokens written out."""
    logits = (query * scaling) @ key.transpose(-1, -2)
    hidden = torch.finfo(logits.dtype).min
    weights = logits.masked_fill(~mask, hidden).softmax(-1, dtype=torch.float32).to(logits.dtype)
    return (torch.dropout(weights, dropout, module.training) @ value).transpose(1, 2), weights


def _encoder(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    is_index_masked: Tensor | None = None,
    is_index_global_attn: Tensor | None = None,
    is_global_attn: bool | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor | None, ...]:
    """The forward of the encoder's attention. `encoder_attentions` are [B, H, L, L] then, not the window alone."""
    assert is_index_masked is not None
    assert is_index_global_attn is not None

    def attend(suffix: str, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        layers = (getattr(self, name + suffix) for name in ("query", "key", "value"))
        query, key, value = (layer(hidden_states).unflatten(-1, (self.num_heads, -1)) for layer in layers)
        return call(
            self, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask,
            scaling=self.head_dim**-0.5, dropout=float(self.dropout), own=_attention,
            output_attentions=output_attentions,
        )  # fmt: skip

    out, weights = attend("", _window(self, hidden_states, is_index_masked, is_index_global_attn))
    if is_global_attn:
        everything, global_weights = attend("_global", ~is_index_masked[:, None, None, :])
        out = torch.where(is_index_global_attn[:, :, None, None], everything, out)
        if weights is not None and global_weights is not None:
            weights = torch.where(is_index_global_attn[:, None, :, None], global_weights, weights)
    out = out.masked_fill(is_index_masked[:, :, None, None], 0.0).flatten(2)
    if weights is None:
        return (out,)
    weights = weights.transpose(1, 2)  # [B, L, H, L]; the encoder turns it back
    return (out, weights, weights) if is_global_attn else (out, weights)


def _unpadded(
    self: Any, input_ids: Tensor | None, attention_mask: Tensor, inputs_embeds: Tensor | None, pad_token_id: int
) -> tuple[int, Tensor | None, Tensor, Tensor | None]:
    """Takes the place of the padding to a multiple of the window, whose tokens would have no positions."""
    return 0, input_ids, attention_mask, inputs_embeds


def _kinds(
    self: Any,
    input_ids: Tensor | None,
    attention_mask: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    pad_token_id: int,
) -> tuple[Any, ...]:
    """The same in Longformer. It keeps the mask, of which the bool mask of a swapped model would lose global tokens."""
    current = carried(self)
    if current is not None:
        current.kinds = attention_mask
    return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds


def _layers(self: Any, hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any) -> Any:
    """The forward of Longformer's encoder: its mask is below 0 for padding and above 0 for global tokens."""
    current = carried(self)
    if current is not None and current.kinds is not None:
        attention_mask = current.kinds.to(hidden_states.dtype) - 1
    return type(self).forward(self, hidden_states, attention_mask=attention_mask, **kwargs)


def _decoder(self: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Any, ...]:
    return (*bart_attention(self, hidden_states, **kwargs), kwargs.get("past_key_values"))


LED = seam(
    Opening("led.modeling_led.LEDEncoderSelfAttention", {"forward": _encoder}, never),
    Opening("led.modeling_led.LEDEncoder", {"_pad_to_window_size": _unpadded}),
    Opening("led.modeling_led.LEDDecoderAttention", {"forward": _decoder}, always),
)
LONGFORMER = seam(
    Opening("longformer.modeling_longformer.LongformerSelfAttention", {"forward": _encoder}, never),
    Opening("longformer.modeling_longformer.LongformerEncoder", {"forward": _layers}),
    Opening("longformer.modeling_longformer.LongformerModel", {"_pad_to_window_size": _kinds}),
)
