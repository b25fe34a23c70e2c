"""Where the general rule of `sizes.py` is not enough: architecture -> entries of its config.

An inner dict changes entries of an inner config. `...` takes an entry out, so that transformers' own default holds.
"""

from __future__ import annotations

from typing import Any

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
HEAD = {"head_dim": 8}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 4}
BLT = {"num_key_value_heads": 4, "num_hidden_layers": 1}

CODEC = {
    "hidden_size": 32,
    "num_filters": 2,
    "codebook_dim": 8,
    "codebook_size": 8,
    "vector_quantization_hidden_dimension": 8,
    "upsample_groups": 32,
}

CORRECTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**HYBRID, "head_dim": 8},
    "big_bird": {"attention_type": "original_full"},  # sparse attention is refused
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "bert_generation": {"is_decoder": True},
    "bros": {"dim_bbox_sinusoid_emb_1d": 4, "dim_bbox_sinusoid_emb_2d": 32, "dim_bbox_projection": 8},
    "blt": {
        "encoder_config": BLT,
        "decoder_config": BLT,
        "global_config": {**BLT, "num_hidden_layers": 2},
        "patcher_config": BLT,
        "encoder_hash_byte_group_vocab": 100,
        "num_hidden_layers": 2,
        "vocab_size": 60,
    },
    "chameleon": {
        "vocabulary_map": {"<image>": 59, "IMGIMGA": 58},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_embeddings": 8, "resolution": 8},
    },
    "cohere_compass": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "cosmos3_edge": MROPE,
    "csm": {"codec_config": CODEC, "num_codebooks": 3, "depth_decoder_config": {"num_codebooks": 3}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_routed_experts": 4},
    "deepseek_v4": {"num_hidden_layers": 2, "o_groups": 2, "o_lora_rank": 8},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "embedding_gemma2": {"global_head_dim": 16},
    "esm": {"vocab_size": 60, "position_embedding_type": "rotary"},
    "esmc": {"num_key_value_heads": 4},
    "esmfold": {
        "vocab_size": 33,
        "is_folding_model": True,
        "position_embedding_type": "rotary",
        "esmfold_config": {
            "trunk": {
                "num_blocks": 1,
                "sequence_state_dim": 32,
                "pairwise_state_dim": 16,
                "sequence_head_width": 8,
                "pairwise_head_width": 8,
                "position_bins": 4,
                "chunk_size": 4,
                "structure_module": {"num_blocks": 1, "sequence_dim": 32, "pairwise_dim": 16, "ipa_dim": 4},
            },
            "fp16_esm": False,
            "lddt_head_hid_dim": 8,
        },
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4": {"global_head_dim": 16},
    "gemma4_unified": {"global_head_dim": 16},
    "glm4v": MROPE,
    "glm4v_moe": {"head_dim": 16, **MROPE},
    "glm5_next": {"num_key_value_heads": 4, "layer_types": ["linear_attention", "indexed_attention"], "index_kpool": 4},
    "glm_image": MROPE,
    "glm_ocr": MROPE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "higgs_audio_v2": {"num_codebooks": 2, "codebook_size": 30, "audio_token_id": 59, "audio_delay_token_id": 58},
    "hrm_text": {"num_layers_per_stack": ..., "num_hidden_layers": 1, "H_cycles": 1, "L_cycles": 2},
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": HEAD,
    "hunyuan_vl": {**HEAD, **MROPE},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": HYBRID,
    "kyutai_speech_to_text": {
        "codebook_vocab_size": 8,
        "num_codebooks": 2,
        "audio_bos_token_id": 60,
        "audio_pad_token_id": 61,
        "codec_config": CODEC,
    },
    "longformer": {"attention_window": 8},
    "led": {"attention_window": 8, "max_position_embeddings": ...},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48, "num_attention_heads": 4},
    "longcat_flash": {"head_dim": 4, "qk_head_dim": 12},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 8},
    "lxmert": {"l_layers": 2, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 8},
    "mamba2": {"num_heads": 8},
    "markuplm": {"max_depth": 4, "xpath_unit_hidden_size": 4},
    "minimax_m3_vl": {"index_block_size": 4, "index_topk_blocks": 2},
    "ministral": HEAD,
    "mistral_large4": {"kv_source_layers": [0, 1]},
    "mobilebert": {"intra_bottleneck_size": 32},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
    },
    "neomme": {"head_dim": 16, "embedding_rank": 8},
    "phi4_multimodal": {"vision_config": VISION, "audio_config": {**VISION, "num_blocks": 1}},
    "qwen2_5_vl": MROPE,
    "qwen2_vl": MROPE,
    "qwen3_5": HYBRID,
    "qwen3_5_moe": HYBRID,
    "qwen3_next": HYBRID,
    "qwen4_exp": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "axial_pos_embds_dim": [8, 24],
        "axial_pos_shape": [8, 8],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 60,
        "shape_vocab_size": 60,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "adapter_rank": 8,
        "attention_hidden_size": ...,
        "attention_head_dim": ...,
        "kv_channels": ...,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
}
