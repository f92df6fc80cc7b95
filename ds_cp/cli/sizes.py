"""Tables for :mod:`ds_cp.cli.shrink`: the names of sizes in the configs of transformers, their values in a tiny model, and
exceptions by model type."""

from __future__ import annotations

from typing import Any

LAYERS, MAX_LAYERS = 2, 5
HEADS, KV_HEADS, HEAD_DIM, VOCAB = 8, 2, 8, 128

SIZES: dict[str, int | float] = {
    # widths
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "attention_hidden_size"), HEADS * HEAD_DIM
    ),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "d_inner", "input_hidden_size"), HEADS * HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "d_ff", "intermediate_size_mlp", "shared_intermediate_size"), 96),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32
    ),
    **dict.fromkeys(("hidden_size_per_layer_input", "moe_latent_size"), 16),
    # depths
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), LAYERS
    ),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads",), HEADS),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "swa_head_dim", "global_head_dim"), HEAD_DIM),
    # multi-head latent attention
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), HEAD_DIM),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_layer_start_index"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    # tokens and positions
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 256),
    **{name: i for i, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id"))},
    **{
        name: VOCAB - 2 - i
        for i, name in enumerate(
            ("image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id", "vision_end_token_id")
        )
    },
    "original_max_position_embeddings": 64,
    # masks
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention_window", "window_size"), 6),
    # An indexer selects fewer keys than a row has; it has so many heads that scores are seldom equal.
    **{"index_topk": 7, "index_n_heads": 16, "index_head_dim": 16},
    # Recurrent layers: their chunks are shorter than a row.
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 16),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), HEADS),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "linear_num_key_heads"), 4),
    "mamba_d_ssm": 128,
    "initializer_range": 0.15,
    "num_kv_shared_layers": 0,
}
"""The value of each size in a tiny model, by its names in configs."""

# fmt: off
DROPOUT_NAMES = (
    "attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop",
    "embd_pdrop", "dropout", "activation_dropout", "embedding_dropout", "layerdrop", "resid_dropout", "residual_dropout",
    "router_jitter_noise", "input_jitter_noise", "embed_dropout", "classifier_dropout", "dropout_rate", "ffn_dropout",
)
"""Names of dropout probabilities and of other random noise, all of which are 0 in a tiny model."""

KV_HEAD_NAMES = (
    "num_key_value_heads", "kv_n_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "swa_num_key_value_heads",
    "num_global_key_value_heads",
)
# fmt: on

CAUSAL_LM_CONFIGS = {"musicgen": "decoder", "musicgen_melody": "decoder"}
"""By model type, the attribute of the config that its causal LM class expects instead of the config itself."""

DEPTH_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

TEXT_CONFIGS = (
    "text_config",
    "decoder",
    "encoder",
    "llm_config",
    "language_config",
    "thinker_config",
    "attn_config",
    "ffn_config",
)
"""Nested configs of parts that process text: they are shrunk like the config itself."""

ENCODER_CONFIGS = ("vision_config", "audio_config")
"""Nested configs of image and audio encoders, which text does not use: they get fewer layers of the same width."""

# fmt: off
TINY_VALUES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "deepseek_v4": {
        # Two compression rates, and an indexer that selects less compressed KV than a row has.
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 5}, "index_topk": 3, "o_groups": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "q_lora_rank": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma3n": {
        "vision_config": {"architecture": "test_resnet"},
        "audio_config": {"conf_num_hidden_layers": 2, "hidden_size": 64, "conf_num_attention_heads": 8},
    },
    "gemma4_text": {"per_layer_config": {}},
    "nemotron": {"head_dim": HEAD_DIM},
    "dory": {
        "num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "dots3_note_text": {
        "head_dim": 2 * HEAD_DIM,
        "per_layer_config": {2: {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24}},
    },
    "flint": {"mlp_only_layers": [0]},
    "hrm_text": {"num_hidden_layers": 8, "num_layers_per_stack": 1},
    "marian": {"decoder_vocab_size": VOCAB},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX", "de_DE"]},
    "dbrx": {"attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 5e5}},
    "zaya": {"num_experts_per_tok": 1},
    "bailing_hybrid": {"num_expert_group": 2},
    "minimax": {"block_size": 16},
    # The indexer selects three blocks of four keys, fewer than a row has.
    "minimax_m3_vl_text": {"index_n_heads": KV_HEADS, "index_block_size": 4, "index_topk_blocks": 3, "index_head_dim": 16},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": HEADS * HEAD_DIM, "attention_window_size": 6},
    **{
        # One layer of each kind. The logarithmic scale starts within a row, and the relative bias is shorter than a row.
        name: {
            "num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"], "swa_num_attention_heads": HEADS,
            "sliding_window_size": 6, "rel_extent": 11, "d_rel": 4, "log_scaling_n_floor": 5, "unpadded_vocab_size": VOCAB,
        }
        for name in ("inkling_text", "inkling2_text")
    },
    "inkling2_loop_text": {
        "num_hidden_layers": 4, "layer_types": ["hybrid_sliding", "hybrid"] * 2, "swa_num_attention_heads": HEADS,
        "loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2, "loop_gate_rank": 8,
        "n_layers_per_attn_res_block": 2, "sliding_window_size": 6, "rel_extent": 11, "d_rel": 4, "log_scaling_n_floor": 5,
        "unpadded_vocab_size": VOCAB,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 16, "n_groups": 2},
    "zamba": {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 2 * HEADS * HEAD_DIM, "attention_head_dim": 2 * HEAD_DIM,
    },
    "zamba2": {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "hybrid_layer_ids": [1, 2],
        "attention_hidden_size": 2 * HEADS * HEAD_DIM, "attention_head_dim": 2 * HEAD_DIM, "mamba_headdim": 2 * HEAD_DIM,
    },
    "longcat_flash": {
        "head_dim": HEAD_DIM, "qk_head_dim": 2 * HEAD_DIM, "expert_ffn_hidden_size": 32, "zero_expert_num": 2,
    },
    "reformer": {"is_decoder": True},
    "bert": {"is_decoder": True},
    "xlm": {"n_words": VOCAB, "emb_dim": HEADS * HEAD_DIM},
    "xlnet": {"d_head": HEAD_DIM},
    "xlstm": {"embedding_dim": HEADS * HEAD_DIM, "num_blocks": LAYERS, "use_cache": False},
    "qwen4_exp_text": {
        "linear_key_head_dim": HEAD_DIM, "linear_value_head_dim": HEAD_DIM, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "indexer_head_dim": HEAD_DIM, "indexer_budget": 8, "hc_lowrank": 8, "ple_embed_dim": HEADS * HEAD_DIM, "ple_layer_ids": [1],
        "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1, "heads_per_ngram": 2,
    },
}
# fmt: on
"""By model type, values of a tiny config that :data:`SIZES` does not give, or gives wrong for this type."""

GEMMA4_ASSISTANT = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "enable_moe_block": False, "use_double_wide_mlp": False,
}  # fmt: skip
QWEN4_INDEXER = {
    "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048, "indexer_compress_ratio": 4,
    "ple_layer_ids": [1], "eos_token_id": 2,
}  # fmt: skip

CHECKPOINT_VALUES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "bamba": {"attn_layer_indices": [1, 9, 18, 27]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 20,
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 1e4} for name in ("sliding_attention", "full_attention")
        },
    },
    # All layers of an assistant attend to the keys of the model that it assists.
    **{
        f"{name}_assistant": {"text_config": {"model_type": f"{name}_text", **GEMMA4_ASSISTANT}}
        for name in ("gemma4", "gemma4_unified")
    },
    # The default config does not name its parts.
    **{
        name: {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {}}
        for name in CAUSAL_LM_CONFIGS
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 45,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 45,
        "num_hidden_layers": 48,
    },
    "qwen4_exp_text": QWEN4_INDEXER,
    "qwen4_exp": {"text_config": QWEN4_INDEXER},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 5e5}},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
    **{
        name: {"head_dim": 128, "num_key_value_heads": 8}
        for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")
    },
}
"""By model type, values in which the checkpoints of the type differ from the default config of transformers."""
