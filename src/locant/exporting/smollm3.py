"""Llama with NoPE in some layers is SmolLM3: `no_rope_layers` has 1 for a layer with RoPE and 0 for one without."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import SmolLM3Config

from locant.exporting.refusal import CannotExport
from locant.exporting.rotary_settings import rope_parameters
from locant.exporting.source import Source
from locant.exporting.stock import Stock, build

FAMILIES = ("llama", "mistral", "qwen2", "smollm3")
HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def smollm3(source: Source, length: int | None) -> Stock:
    """Returns a swapped Llama as SmolLM3; CannotExport if SmolLM3 cannot hold it."""
    if source.kind not in FAMILIES:
        raise CannotExport(f"SmolLM3 has the layers of Llama; this is {source.kind} (possible: {', '.join(FAMILIES)})")
    stack, old = source.only_stack(), source.config()
    if stack.embed is not None:
        raise CannotExport(f"SmolLM3 adds nothing to the token embeddings, and this model adds {stack.embed}")
    if getattr(old, "sliding_window", None) is not None and getattr(old, "use_sliding_window", True):
        raise CannotExport("it attends within a sliding window, and SmolLM3 would do so in its NoPE layers alone")
    layers = source.layers()
    other = [scheme for scheme in layers if not scheme.silent and not str(scheme).startswith("rope")]
    if other:
        raise CannotExport(f"a layer of SmolLM3 has RoPE or no positions, and a layer of this model has {other[0]}")
    turning = {str(scheme) for scheme in layers if not scheme.silent}
    if len(turning) > 1:
        raise CannotExport(f"SmolLM3 has one RoPE for all layers, and this model has {', '.join(sorted(turning))}")
    config = _config(source, old, layers, turning)
    name = type(source.model).__name__
    end = next((end for end in HEADS if name.endswith(end)), None)
    if end is None:
        raise CannotExport(f"SmolLM3 has no class for the head of {name}; export its base model: model.base_model")
    cls = getattr(transformers, f"SmolLM3{end}")
    config.architectures = [cls.__name__]
    weights = source.weights()
    for number in range(config.num_hidden_layers) if config.attention_bias else ():
        for key in [key for key in weights if key.endswith(f"layers.{number}.self_attn.o_proj.weight")]:
            bias = f"{key.removesuffix('weight')}bias"  # Qwen 2 has none here
            weights.setdefault(bias, weights[key].new_zeros(len(weights[key])))
    return Stock(build(cls, config, weights), source.tokenizer, length, rounded_angles=True)


def _config(source: Source, old: Any, layers: list[Any], turning: set[str]) -> Any:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
             "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "attention_dropout", "mlp_bias",
             "tie_word_embeddings", "id2label", "label2id", "problem_type")  # fmt: skip
    kept = {name: getattr(old, name) for name in names if hasattr(old, name)}
    kept.setdefault("mlp_bias", False)
    bias = any(name.endswith("self_attn.q_proj.bias") for name in source.weights())
    head_dim = getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads
    config: Any = SmolLM3Config(
        **kept, attention_bias=bias, use_sliding_window=False, sliding_window=None,
        no_rope_layers=[int(not scheme.silent) for scheme in layers],
        rope_parameters=rope_parameters(next(iter(turning)), source, head_dim) if turning else
        {"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    config.head_dim = head_dim  # which SmolLM3's code reads, and its config class does not declare
    return config
