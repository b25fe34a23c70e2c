"""Tiny configs: one general rule, and corrections for the architectures where it is not enough.

The rule: of the default config of a class, replace every size that `SIZES` names, inner configs included. Everything
else stays as transformers has it, so that a tiny model computes what a large one does.
"""

from __future__ import annotations

import copy
from typing import Any

from census.corrections import CORRECTIONS

VOCABULARY, WIDTH, HEADS, HEAD, WINDOW, LONGEST = 60, 32, 4, 8, 8, 64
"""Tokens, width of a layer, heads, width of a head, tokens in a sliding window or chosen by sparse attention, largest
number of positions."""

TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}

_NAMES = [
    (
        VOCABULARY,
        "vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size input_vocab_size output_vocab_size "
        "codebook_vocab_size vocab_size_per_layer_input",
    ),
    (
        WIDTH,
        "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size embedding_dim input_embedding_size "
        "output_embedding_size word_embed_proj_dim pooler_hidden_size encoder_hidden_size cross_attention_hidden_size "
        "cross_hidden_size backbone_hidden_size lru_width true_hidden_size attention_hidden_size hidden_size_global "
        "moe_hidden_size mamba_d_ssm prediction_head_size projection_dim",
    ),
    (
        2 * WIDTH,
        "intermediate_size ffn_dim d_ff d_inner dff dim_ff hidden_dim n_inner encoder_ffn_dim decoder_ffn_dim "
        "ffn_hidden_size feed_forward_size intermediate_size_mlp dense_intermediate_size",
    ),
    (
        2,
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers "
        "num_encoder_layers layers num_layers_per_stack num_key_value_heads num_kv_heads kv_n_heads index_n_heads "
        "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts linear_num_key_heads "
        "swa_num_key_value_heads num_global_key_value_heads cross_num_key_value_heads",
    ),
    (
        HEADS,
        "num_attention_heads num_heads n_head n_heads attention_heads encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads "
        "cross_num_attention_heads linear_num_heads linear_num_value_heads num_experts n_routed_experts "
        "num_local_experts moe_num_experts",
    ),
    (
        HEAD,
        "head_dim d_kv d_head dim_head qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank index_head_dim "
        "swa_head_dim swa_v_head_dim global_head_dim cross_head_dim linear_key_head_dim linear_value_head_dim "
        "linear_head_dim kv_channels attention_head_size attention_head_dim hidden_size_per_layer_input "
        "mamba_d_state mamba_chunk_size chunk_size state_size ssm_state_size time_step_rank laurel_rank",
    ),
    (HEAD // 2, "qk_rope_head_dim rotary_dim"),
    (
        16,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size "
        "moe_shared_expert_intermediate_size",
    ),
    (WINDOW, "index_topk sliding_window attention_window_size window_size sliding_window_size attention_chunk_size"),
    (
        LONGEST,
        "max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_encoder_position_embeddings "
        "max_decoder_position_embeddings max_2d_position_embeddings max_source_positions block_size context_length",
    ),
    (
        1,
        "n_group topk_group num_expert_group first_k_dense_replace n_shared_experts num_shared_experts "
        "num_dense_layers",
    ),
]
SIZES: dict[str, int] = {name: size for size, names in _NAMES for name in names.split()}
"""Name of a size -> the size of a tiny model."""
SPECIAL = {
    "sep_token_id": 2,
    "cls_token_id": 0,
    "mask_token_id": 3,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
"""Special tokens beside those that every tiny model has, set where a config names them."""


def _small(config: Any) -> dict[str, Any]:
    """The sizes of one config that are not tiny, with those of its inner configs."""
    sizes: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        positive = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if name in SIZES and positive:
            sizes[name] = SIZES[name]
        elif name in SPECIAL and value is not None:
            sizes[name] = SPECIAL[name]
    for name in getattr(type(config), "sub_configs", None) or {}:
        if getattr(config, name, None) is not None:
            inner = getattr(config, name)
            sizes[name] = {"model_type": inner.model_type, **_small(inner)}
    return sizes


def tiny(name: str, config_class: Any) -> Any:
    """Returns the tiny config of an architecture."""
    sizes = {**TOKENS, **_small(config_class())}
    if "qk_rope_head_dim" in sizes:  # latent attention: a key for every head, and the config sets head_dim itself
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = HEADS
    # A copy: configs write into what they are given.
    for key, value in copy.deepcopy(CORRECTIONS.get(name, {})).items():
        if isinstance(value, dict) and isinstance(sizes.get(key), dict):
            sizes[key] = {**sizes[key], **value}
        else:
            sizes[key] = value
    return config_class(**{key: value for key, value in sizes.items() if value is not ...})
