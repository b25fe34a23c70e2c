"""Attention classes with a method `_attn(query, key, value, attention_mask)`: the seam replaces this method.

GPT-Neo, GPT-J, CodeGen, GPT-NeoX-Japanese, ImageGPT, OpenAI GPT and Bark. The rest of the class, with its cache and its
projections, runs as transformers wrote it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf import interface
from locant.hf.carrying import carried
from locant.hf.seams.opening import Opening, additive, always, call, is_swapped, seam


def _through(
    module: Any, name: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
    dropout: nn.Dropout, masks_itself: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Does what the method `name` does, through the interface: output [B, H, Lq, D], and weights."""
    out, weights = call(
        module, query, key, value, mask, scaling=scaling, dropout=dropout, own=partial(_original, name),
        own_logits=masks_itself,
    )  # fmt: skip
    return out.transpose(1, 2), weights


def _original(
    name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any
) -> tuple[Tensor, Tensor]:
    out, weights = getattr(type(module), name)(module, query, key, value, mask)
    return out.transpose(1, 2), weights


def _gpt_neo(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """GPT-Neo does not scale its logits. Its local layers see the last `window_size` tokens."""
    local = self.attention_type == "local"
    if is_swapped(self) and local:
        attention_mask = _with(_visible(self, query, key, self.config.window_size), attention_mask)
    return _through(
        self, "_attn", query, key, value, attention_mask, scaling=1.0, dropout=self.attn_dropout, masks_itself=local
    )


def _gptj(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    scaling = 1 / self.scale_attn
    return _through(self, "_attn", query, key, value, attention_mask, scaling=scaling, dropout=self.attn_dropout)


def _gpt_neox_japanese(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    scaling = 1 / self.norm_factor
    return _through(self, "_attn", query, key, value, attention_mask, scaling=scaling, dropout=self.attention_dropout)


def _imagegpt(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    return _of_imagegpt(self, "_attn", query, key, value, attention_mask)


def _imagegpt_upcast(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    return _of_imagegpt(self, "_upcast_and_reordered_attn", query, key, value, attention_mask)


def _of_imagegpt(
    self: Any, name: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """ImageGPT masks the future itself, whatever mask the model makes."""
    if self.is_cross_attention:
        mask = additive(mask, query)
        found: tuple[Tensor, Tensor] = getattr(type(self), name)(self, query, key, value, mask)
        return found
    if is_swapped(self) and not (mask is None and query.shape[2] == key.shape[2]):
        mask = _with(_visible(self, query, key, None), mask)
    scaling = value.shape[-1] ** -0.5 if self.scale_attn_weights else 1.0
    if self.scale_attn_by_inverse_layer_idx:
        scaling /= self.layer_idx + 1
    return _through(self, name, query, key, value, mask, scaling=scaling, dropout=self.attn_dropout, masks_itself=True)


def _openai(
    self: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
) -> list[Tensor | None]:
    """OpenAI GPT: keys are [B, H, D, L], and it masks the future itself."""
    key, mask = k.transpose(-1, -2), attention_mask
    if is_swapped(self) and mask is not None:
        mask = _with(_visible(self, q, key, None), mask)
    scaling = v.shape[-1] ** -0.5 if self.scale else 1.0
    out, weights = call(
        self, q, key, v, mask, scaling=scaling, dropout=self.attn_dropout, own=_own_openai,
        output_attentions=output_attentions, own_logits=True,
    )  # fmt: skip
    return [out.transpose(1, 2), weights] if output_attentions else [out.transpose(1, 2)]


def _own_openai(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any
) -> tuple[Tensor, Tensor]:
    found: Any = type(module)
    out, weights = found._attn(module, query, key.transpose(-1, -2), value, mask, output_attentions=True)
    return out.transpose(1, 2), weights


def _bark(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Bark's causal models mask the future themselves; the model makes masks of padding alone."""
    mask = attention_mask
    if is_swapped(self) and self.is_causal and not (mask is None and query.shape[2] == key.shape[2]):
        mask = _with(_visible(self, query, key, None), mask)
    scaling = self.head_dim**-0.5
    return _through(
        self, "_attn", query, key, value, mask, scaling=scaling, dropout=self.attn_dropout, masks_itself=self.is_causal
    )


def _visible(module: nn.Module, query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Which keys come before each query, and at most window − 1 tokens before it: bool [Lq, Lk]."""
    lq, lk, here = query.shape[2], key.shape[2], query.device
    current = carried(module)
    past: Any = lk - lq
    if current is not None:  # a static cache has empty places at its end
        positions = current.positions
        past = positions.past if positions.k is None else positions.k.shape[-1] - lq
        past = past if positions.cached is None else positions.cached
    back: Tensor = (torch.arange(lq, device=here) + past)[:, None] - torch.arange(lk, device=here)
    return back >= 0 if window is None else (back >= 0) & (back < window)


def _with(visible: Tensor, mask: Tensor | None) -> Tensor:
    """Both masks. A mask of numbers for the logits becomes bool, as the interface would make it."""
    shown = interface._bool_mask(mask)
    return visible[None, None] if shown is None else visible & shown


GPT_NEO = seam(Opening("gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention", {"_attn": _gpt_neo}))
GPTJ = seam(Opening("gptj.modeling_gptj.GPTJAttention", {"_attn": _gptj}))
CODEGEN = seam(Opening("codegen.modeling_codegen.CodeGenAttention", {"_attn": _gptj}, always))
GPT_NEOX_JAPANESE = seam(
    Opening(
        "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention", {"_attn": _gpt_neox_japanese}, always
    )
)
IMAGEGPT = seam(
    Opening(
        "imagegpt.modeling_imagegpt.ImageGPTAttention",
        {"_attn": _imagegpt, "_upcast_and_reordered_attn": _imagegpt_upcast},
        always,
    )
)
OPENAI_GPT = seam(Opening("openai.modeling_openai.Attention", {"_attn": _openai}, always))
BARK = seam(Opening("bark.modeling_bark.BarkSelfAttention", {"_attn": _bark}))
