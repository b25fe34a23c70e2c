"""BERT's relatives that write attention out: softmax(q·k/√d + mask)·v.

Rembert, Megatron-BERT, RoFormer, BigBird without sparse attention, BLIP's text model, TAPAS, VisualBERT, I-BERT without
quantization, SqueezeBERT, LUKE and MPNet. `_attention` is what all of them compute; what remains
for each is where its queries, keys and values come from.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor, nn

from locant.hf.call import AttentionFunction
from locant.hf.carrying import carried
from locant.hf.seams.opening import Opening, additive, call, if_decoder, is_swapped, never, seam


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *,
    position_bias: Tensor | None = None, logits_wanted: bool = False, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What all these classes compute, in their order, so that a model that is not swapped has the same outputs."""
    logits = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    for part in (position_bias, mask):
        logits = logits if part is None else logits + part
    weights = module.dropout(logits.softmax(-1))  # type: ignore[operator]
    return (weights @ value).transpose(1, 2), logits if logits_wanted else weights


def _heads(module: Any, states: Tensor) -> Tensor:
    """[B, L, width] as [B, H, L, D]."""
    return states.view(*states.shape[:-1], -1, module.attention_head_size).transpose(1, 2)


def _through(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output_attentions: bool,
    own: AttentionFunction = _attention, position_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    current = carried(module)
    return call(
        module, query, key, value, mask, scaling=module.attention_head_size**-0.5, dropout=module.dropout, own=own,
        output_attentions=output_attentions, position_bias=position_bias,
        is_causal=None if current is None else current.causal,
    )  # fmt: skip


def _bert(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    sinusoidal_pos: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    past_key_values: Any = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The forward of a BERT-like self-attention, with a cache, and with RoFormer's rotation."""
    if encoder_hidden_states is not None:  # cross-attention has no scheme
        if is_swapped(self):
            raise NotImplementedError(
                f"{type(self).__name__} got states of an encoder in its self-attention, where no position scheme can "
                f"act: transformers' BigBird does this in a decoder with cross-attention. Restore the model with "
                f"swap(model, 'native'), or call it without encoder_hidden_states"
            )
        if "encoder_attention_mask" in kwargs:  # BigBird
            kwargs["encoder_attention_mask"] = additive(kwargs["encoder_attention_mask"], hidden_states)
        rotation = {} if sinusoidal_pos is None else {"sinusoidal_pos": sinusoidal_pos}
        found: tuple[Tensor, Tensor] = type(self).forward(
            self, hidden_states, additive(attention_mask, hidden_states), encoder_hidden_states=encoder_hidden_states,
            past_key_values=past_key_values, output_attentions=output_attentions, **rotation, **kwargs,
        )  # fmt: skip
        return found
    query, key, value = (_heads(self, layer(hidden_states)) for layer in (self.query, self.key, self.value))
    if sinusoidal_pos is not None and not is_swapped(self):
        turned = (query, key, value) if self.rotary_value else (query, key)
        query, key, *values = self.apply_rotary_position_embeddings(sinusoidal_pos, *turned)
        value = values[0] if values else value
    if past_key_values is not None:
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        key, value = cache.update(key, value, self.layer_idx)
    out, weights = _through(self, query, key, value, attention_mask, output_attentions)
    return out.flatten(2), weights


def _blip_text_model(self: Any, *args: Any, is_decoder: bool | None = False, **kwargs: Any) -> Any:
    """The forward of BLIP's text model: whether attention is causal is an argument of every call."""
    current = carried(self)
    if current is not None:
        current.causal = bool(is_decoder)
    return type(self).forward(self, *args, is_decoder=is_decoder, **kwargs)


def _tapas(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """TAPAS: a decoder returns its cache too."""
    out, weights = _bert(self, hidden_states, *args, **kwargs)[:2]
    found = (out, weights) if kwargs.get("output_attentions") else (out,)
    return (*found, kwargs.get("past_key_values")) if self.is_decoder else found


def _visual_bert(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
) -> tuple[Tensor | None, ...]:
    """VisualBERT over its words. The parts of an image have a position table of their own."""
    current = carried(self)
    if current is not None and current.places is not None and current.places.shape[-1] != hidden_states.shape[1]:
        raise NotImplementedError(
            "a swapped VisualBERT model reads words alone: the parts of an image have a position table of their own, "
            "which locant does not replace. Call it without visual_embeds, or restore it with swap(model, 'native')"
        )
    query, key, value = (_heads(self, layer(hidden_states)) for layer in (self.query, self.key, self.value))
    out, weights = _through(self, query, key, value, attention_mask, output_attentions)
    return (out.flatten(2), weights) if output_attentions else (out.flatten(2),)


def _ibert(
    self: Any,
    hidden_states: Tensor,
    hidden_states_scaling_factor: Tensor | None,
    attention_mask: Tensor | None = None,
    output_attentions: bool = False,
) -> tuple[tuple[Tensor | None, ...], tuple[None, ...]]:
    """I-BERT with quant_mode=False: its layers return numbers without scaling factors."""
    query, key, value = (
        _heads(self, activation(*layer(hidden_states, hidden_states_scaling_factor))[0])
        for layer, activation in (
            (self.query, self.query_activation),
            (self.key, self.key_activation),
            (self.value, self.value_activation),
        )
    )
    out, weights = _through(self, query, key, value, attention_mask, output_attentions)
    found = self.output_activation(out.flatten(2), None)[0]
    return ((found, weights), (None, None)) if output_attentions else ((found,), (None,))


def _squeezebert(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None, output_attentions: bool
) -> dict[str, Tensor | None]:
    """SqueezeBERT: states are [B, width, L]. Its `attentions` are logits; those of a swapped model are weights."""
    parts = (layer(hidden_states).transpose(1, 2) for layer in (self.query, self.key, self.value))
    query, key, value = (_heads(self, part) for part in parts)
    own = partial(_attention, logits_wanted=True)
    out, weights = _through(self, query, key, value, attention_mask, output_attentions, own)
    found: dict[str, Tensor | None] = {"context_layer": out.flatten(2).transpose(1, 2).contiguous()}
    return {**found, "attention_score": weights} if output_attentions else found


def _luke(
    self: Any,
    word_hidden_states: Tensor,
    entity_hidden_states: Tensor | None,
    attention_mask: Tensor | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor | None, ...]:
    """LUKE over its words. Entities have positions of their own, in another table."""
    if entity_hidden_states is not None:
        if is_swapped(self):
            raise NotImplementedError(
                "a swapped LUKE model reads words alone: its entities have a position table of their own, which locant "
                "does not replace. Call it without entity_ids, or restore it with swap(model, 'native')"
            )
        found: tuple[Tensor | None, ...] = type(self).forward(
            self, word_hidden_states, entity_hidden_states, attention_mask, output_attentions
        )
        return found
    query, key, value = (_heads(self, layer(word_hidden_states)) for layer in (self.query, self.key, self.value))
    out, weights = _through(self, query, key, value, attention_mask, output_attentions)
    return (out.flatten(2), None, weights) if output_attentions else (out.flatten(2), None)


def _mpnet(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor | None, ...]:
    """MPNet: a bias for all layers, computed once, and the output projection in the same class."""
    query, key, value = (_heads(self, layer(hidden_states)) for layer in (self.q, self.k, self.v))
    out, weights = _through(self, query, key, value, attention_mask, output_attentions, position_bias=position_bias)
    found: Tensor = self.o(out.flatten(2))
    return (found, weights) if output_attentions else (found,)


REMBERT = seam(Opening("rembert.modeling_rembert.RemBertSelfAttention", {"forward": _bert}, if_decoder))
MEGATRON_BERT = seam(
    Opening("megatron_bert.modeling_megatron_bert.MegatronBertSelfAttention", {"forward": _bert}, if_decoder)
)
ROFORMER = seam(Opening("roformer.modeling_roformer.RoFormerSelfAttention", {"forward": _bert}, if_decoder))
SQUEEZEBERT = seam(
    Opening("squeezebert.modeling_squeezebert.SqueezeBertSelfAttention", {"forward": _squeezebert}, never)
)
LUKE = seam(Opening("luke.modeling_luke.LukeSelfAttention", {"forward": _luke}, never))
MPNET = seam(Opening("mpnet.modeling_mpnet.MPNetSelfAttention", {"forward": _mpnet}, never))
BIG_BIRD = seam(Opening("big_bird.modeling_big_bird.BigBirdSelfAttention", {"forward": _bert}, if_decoder))
BIGBIRD_PEGASUS = seam(
    Opening("bigbird_pegasus.modeling_bigbird_pegasus.BigBirdPegasusSelfAttention", {"forward": _bert}, never)
)
BLIP_TEXT = seam(
    Opening("blip.modeling_blip_text.BlipTextSelfAttention", {"forward": _bert}, never),
    Opening("blip.modeling_blip_text.BlipTextModel", {"forward": _blip_text_model}),
)
TAPAS = seam(Opening("tapas.modeling_tapas.TapasSelfAttention", {"forward": _tapas}, if_decoder))
VISUAL_BERT = seam(
    Opening("visual_bert.modeling_visual_bert.VisualBertSelfAttention", {"forward": _visual_bert}, never)
)
IBERT = seam(Opening("ibert.modeling_ibert.IBertSelfAttention", {"forward": _ibert}, never))
