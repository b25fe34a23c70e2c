"""Tiny random models of every family."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel

import locant

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "roberta": {**SMALL, **TOKENS},
    "xlm-roberta": {**SMALL, **TOKENS},
    "camembert": {**SMALL, **TOKENS},
    "albert": {**SMALL, "embedding_size": 16},
    "electra": {**SMALL, "embedding_size": 16},
    "distilbert": {
        "vocab_size": 60,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 64,
        "max_position_embeddings": 40,
    },
    "mpnet": {**SMALL, **TOKENS},
    "modernbert": {
        **SMALL,
        **TOKENS,
        "cls_token_id": 0,
        "sep_token_id": 2,
        "global_attn_every_n_layers": 2,
        "local_attention": 16,
    },
    "gpt2": {
        "vocab_size": 60,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 40,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "gpt_neox": {**SMALL, "bos_token_id": 0, "eos_token_id": 2},
    "opt": {
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "max_position_embeddings": 40,
        "word_embed_proj_dim": 32,
        **TOKENS,
    },
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": None},
    "qwen2": {**GROUPED, "bos_token_id": 0, "eos_token_id": 2},
    "qwen3": {**GROUPED, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 2},
    "gemma": {**GROUPED, "head_dim": 8, "pad_token_id": 0},
    "phi": SMALL,
    "t5": {
        "vocab_size": 60,
        "d_model": 32,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "d_kv": 8,
        "d_ff": 64,
    },
    "vit": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 16,
        "patch_size": 4,
    },
    "bart": {
        "vocab_size": 60,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 40,
        **TOKENS,
    },
}

FOUND: dict[str, dict[str, Any]] = {  # families that are not listed: what they do is found by running
    "m2m_100": {**CONFIGS["bart"], "decoder_layers": 2},
    "marian": {**CONFIGS["bart"], "decoder_layers": 2, "decoder_start_token_id": 1},
    "nllb-moe": {**CONFIGS["bart"], "decoder_layers": 2, "num_experts": 4, "encoder_sparse_step": 2,
                 "decoder_sparse_step": 2},
    "umt5": CONFIGS["t5"],
    "biogpt": {**SMALL, **TOKENS},
    "splinter": {**SMALL, **TOKENS},
    "ctrl": {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64, "n_positions": 40},
    "stablelm": GROUPED,
    "jamba": {**GROUPED, **TOKENS, "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1,
              "expert_layer_period": 2, "num_experts": 2, "use_mamba_kernels": False, "mamba_d_state": 4,
              "mamba_dt_rank": 4},
}  # fmt: skip
WITH_DECODER = ["t5", "bart", "m2m_100", "marian", "nllb-moe", "umt5"]
DECODERS = ["gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma", "phi"]
BERT_LIKE = ["bert", "roberta", "xlm-roberta", "camembert", "albert", "electra", "distilbert", "mpnet"]


def make(kind: str, auto: Any = AutoModel, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model in eval mode whose positions matter: transformers' own initialisation is too small to see them."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**{**CONFIGS, **FOUND}[kind], **changes})
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not name.endswith(("A_log", "conv1d.weight")):  # of a state space
                parameter.normal_(std=0.3)
            if "embed_positions" in name or (
                "position_embeddings" in name and kind in ("roberta", "xlm-roberta", "camembert", "mpnet")
            ):
                parameter[1] = 0.0  # padding has no position
    return model


def inputs(kind: str, length: int = 9, batch: int = 2, padding: str | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    if kind == "vit":
        return {"pixel_values": torch.randn(batch, 3, 16, 16)}
    ids = torch.randint(3, 60, (batch, length))
    given = {"input_ids": ids}
    if padding is not None:
        mask = torch.ones(batch, length, dtype=torch.long)
        hole = slice(0, 3) if padding == "left" else slice(length - 3, length)
        mask[0, hole] = 0
        ids[0, hole] = 1
        given["attention_mask"] = mask
    if kind in WITH_DECODER:
        given["decoder_input_ids"] = torch.randint(3, 60, (batch, 6))
    return given


def output(model: PreTrainedModel, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        result = model(**given)
    return result.logits if "logits" in result else result.last_hidden_state


def spread(model: PreTrainedModel, std: float = 0.3) -> PreTrainedModel:
    """Moves the schemes away from where they start."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "locant" in name or ".scheme." in name:
                parameter.add_(std * torch.randn_like(parameter))
    return model


def check_kept_and_added(model: PreTrainedModel, given: dict[str, torch.Tensor]) -> None:
    """With a scheme that adds nothing yet, native + scheme is native; once it does, it is not."""
    before = output(model, **given)
    locant.swap(model, "tisa", keep_native=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("amplitude"):
                parameter.zero_()
    torch.testing.assert_close(output(model, **given), before, rtol=0, atol=1e-5)
    assert (output(spread(model, 2.0), **given) - before).abs().max() > 1e-3
