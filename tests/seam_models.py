"""Tiny random models of the families with a seam, in the variants that differ."""

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.models.blip import modeling_blip_text

from tests.hf_models import SMALL, TOKENS

GPT = {
    "vocab_size": 60,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 40,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
REMBERT = {**SMALL, **TOKENS, "input_embedding_size": 16, "output_embedding_size": 16}
XLNET = {"vocab_size": 60, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, **TOKENS}
DEBERTA = {**SMALL, "relative_attention": True}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "rembert": ("rembert", REMBERT),
    "rembert decoder": ("rembert", {**REMBERT, "is_decoder": True}),
    "megatron-bert": ("megatron-bert", SMALL),
    "squeezebert": (
        "squeezebert",
        {**SMALL, "embedding_size": 32, "q_groups": 2, "k_groups": 2, "v_groups": 2, "intermediate_groups": 2,
         "output_groups": 2},
    ),
    "luke": ("luke", {**SMALL, **TOKENS, "entity_vocab_size": 10, "entity_emb_size": 16}),
    "roformer": ("roformer", {**SMALL, "embedding_size": 16}),
    "roformer decoder": ("roformer", {**SMALL, "embedding_size": 16, "is_decoder": True, **TOKENS}),
    "gpt_neo": (
        "gpt_neo",
        {"vocab_size": 60, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 40,
         "intermediate_size": 64, "attention_types": [[["global", "local"], 1]], "window_size": 4, "bos_token_id": 0,
         "eos_token_id": 2},
    ),
    "imagegpt": ("imagegpt", GPT),
    "imagegpt upcast": (
        "imagegpt", {**GPT, "reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "codegen": ("codegen", {**GPT, "rotary_dim": 4, "n_ctx": 40}),
    "gpt_neox_japanese": (
        "gpt_neox_japanese", {**SMALL, "intermediate_multiple_size": 2, "bos_token_id": 0, "eos_token_id": 2},
    ),
    "bloom": ("bloom", {"vocab_size": 60, "hidden_size": 36, "n_layer": 2, "n_head": 6, **TOKENS}),
    "mpt": ("mpt", {"vocab_size": 60, "d_model": 36, "n_layers": 2, "n_heads": 6, "max_seq_len": 40}),
    "falcon": ("falcon", {**SMALL, **TOKENS}),
    "falcon, groups of heads": (
        "falcon", {**SMALL, **TOKENS, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon, alibi": (
        "falcon",
        {**SMALL, **TOKENS, "hidden_size": 48, "num_attention_heads": 12, "alibi": True, "multi_query": False,
         "parallel_attn": False, "bias": True},
    ),
    "deberta": ("deberta", {**DEBERTA, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 6}),
    "deberta, c2p": ("deberta", {**DEBERTA, "pos_att_type": ["c2p"], "position_biased_input": False}),
    "deberta-v2": (
        "deberta-v2",
        {**DEBERTA, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4, "max_relative_positions": 8,
         "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False, "conv_kernel_size": 3},
    ),
    "deberta-v2, p2c": ("deberta-v2", {**DEBERTA, "pos_att_type": ["p2c"], "max_relative_positions": 6}),
    "xlnet": ("xlnet", XLNET),
    "xlnet uni": ("xlnet", {**XLNET, "attn_type": "uni"}),
    "xglm": (
        "xglm",
        {"vocab_size": 60, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64,
         "max_position_embeddings": 40, **TOKENS},
    ),
}  # fmt: skip

BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 40, **TOKENS, "decoder_start_token_id": 2,
}  # fmt: skip
XLM = {"vocab_size": 60, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 40, **TOKENS,
       "pad_index": 1}  # fmt: skip
BARK = {"input_vocab_size": 60, "output_vocab_size": 60, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
        "block_size": 40}  # fmt: skip

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-gpt": ("OpenAIGPTModel", GPT),
    "xlm": ("XLMModel", XLM),
    "flaubert": ("FlaubertModel", XLM),
    "mvp": ("MvpModel", {**BART, "vocab_size": 60}),
    "fsmt": ("FSMTModel", {**BART, "src_vocab_size": 60, "tgt_vocab_size": 60, "langs": ["en", "de"]}),
    "bigbird_pegasus": ("BigBirdPegasusModel", {**BART, "vocab_size": 60, "attention_type": "original_full"}),
    "big_bird": ("BigBirdModel", {**SMALL, **TOKENS, "attention_type": "original_full"}),
    "trocr": (
        "TrOCRForCausalLM",
        {"vocab_size": 60, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
         "max_position_embeddings": 40, "cross_attention_hidden_size": 24, **TOKENS},
    ),
    "clvp_decoder": (
        "ClvpForCausalLM",
        {**SMALL, **TOKENS, "n_inner": 64, "max_text_tokens": 40, "num_mel_attn_blocks": 1},
    ),
    "semantic": ("BarkSemanticModel", BARK),
    "coarse_acoustics": ("BarkCoarseModel", BARK),
    "blip_text_model": ("BlipTextModel", {**SMALL, **TOKENS, "encoder_hidden_size": 24}),
    "tapas": ("TapasModel", {**SMALL, **TOKENS}),
    "visual_bert": ("VisualBertModel", {**SMALL, **TOKENS, "visual_embedding_dim": 16}),
    "ibert": ("IBertModel", {**SMALL, **TOKENS}),
}  # fmt: skip
"""More families, one test for each: model_type -> class and sizes."""

DECODERS = [
    "rembert decoder", "roformer decoder", "gpt_neo", "imagegpt", "gptj", "codegen", "gpt_neox_japanese", "bloom",
    "mpt", "falcon", "falcon, groups of heads", "falcon, alibi", "xglm",
]  # fmt: skip


def make(kind: str, auto: Any = AutoModel, **changes: Any) -> PreTrainedModel:
    """A model in eval mode whose parameters, biases too, are large enough to be seen in its outputs."""
    torch.manual_seed(0)
    family, sizes = CONFIGS[kind]
    model = _loud(auto.from_config(AutoConfig.for_model(family, **{**sizes, **changes})))
    if family == "luke":
        with torch.no_grad():
            model.base_model.embeddings.position_embeddings.weight[1] = 0.0  # padding has no position
    return model


def make_more(kind: str, model_class: str | None = None, **changes: Any) -> PreTrainedModel:
    """The same for a family of `MORE`, or for another class of it."""
    torch.manual_seed(0)
    name, sizes = MORE[kind]
    found = _class(model_class or name)
    return _loud(found(found.config_class(**{**sizes, **changes})))


def _class(name: str) -> Any:
    return getattr(modeling_blip_text, name) if name.startswith("BlipText") else getattr(transformers, name)


def _loud(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("embed_positions.weight") and type(model).__name__.startswith(("RoFormer", "FSMT")):
                continue  # sinusoids
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def inputs(kind: str, length: int = 9, padding: str | None = None) -> dict[str, torch.Tensor]:
    """Two sequences; the first one has three tokens of padding."""
    torch.manual_seed(1)
    ids = torch.randint(3, 60, (2, length))
    given = {"input_ids": ids}
    if padding is not None:
        mask = torch.ones(2, length, dtype=torch.long)
        first = {"left": 0, "middle": 3, "right": length - 3}[padding]
        hole = slice(first, first + 3)
        mask[0, hole] = 0
        ids[0, hole] = 1
        given["attention_mask"] = mask
    return given


def sides(kind: str) -> list[str | None]:
    """How inputs can be padded. transformers' XLNet with attn_type="uni" fails on masks of two sequences."""
    return [None] if kind == "xlnet uni" else [None, "left", "right", "middle"]
