"""Sizes of tiny models by type. A new model type is one new line in TYPES."""

# The names of the sizes of ModelSpec in each type, and settings that make it small, deterministic and causal.
COMMON = dict(
    hidden_size="{hidden}", intermediate_size="{mlp}", num_hidden_layers="{layers}", vocab_size="{vocab}",
    num_attention_heads="{heads}", num_key_value_heads="{kv_heads}", max_position_embeddings=256,
    attention_dropout=0.0, initializer_range=0.15, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
WINDOWED = dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"])
MLA = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, qk_head_dim=12)
TYPES = {
    "llama": COMMON | dict(head_dim=8),
    "qwen2": COMMON | dict(use_sliding_window=False),
    "qwen3": COMMON | dict(head_dim=8, use_sliding_window=False),
    "mistral": COMMON | dict(head_dim=8, sliding_window=None),
    "olmo2": COMMON,
    "granite": COMMON | dict(logits_scaling=4.0, residual_multiplier=0.5, attention_multiplier=0.3),
    "phi": COMMON,  # its head has a bias
    "gpt2": dict(
        n_embd="{hidden}", n_inner="{mlp}", n_layer="{layers}", n_head="{heads}", vocab_size="{vocab}",
        n_positions=256, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, initializer_range=0.15,
        bos_token_id=None, eos_token_id=None,
    ),
    "gemma2": COMMON | WINDOWED | dict(
        head_dim=8, query_pre_attn_scalar=20, attn_logit_softcapping=1.5, final_logit_softcapping=5.0,
    ),
    "gemma3_text": COMMON | WINDOWED | dict(head_dim=8, query_pre_attn_scalar=20),
    "gemma4_text": COMMON | WINDOWED | dict(
        initializer_range=0.1, head_dim=8, global_head_dim=16, num_global_key_value_heads=1, vocab_size_per_layer_input="{vocab}",
        hidden_size_per_layer_input=8, num_kv_shared_layers=0, attention_k_eq_v=False, enable_moe_block=False,
    ),
    "gpt_oss": COMMON | WINDOWED | dict(
        head_dim=8, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager",
    ),
    "olmo3": COMMON | WINDOWED,
    "cohere2": COMMON | WINDOWED | dict(head_dim=8, logit_scale=0.5),
    "phi3": COMMON | dict(
        sliding_window=None,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=16, short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[2.0, 3.0, 4.0, 5.0], factor=16.0,
        ),
    ),
    "llama4_text": COMMON | dict(
        head_dim=8, intermediate_size_mlp="{mlp}", num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=8,
        moe_layers=[1], no_rope_layers=[1, 0], layer_types=["chunked_attention", "full_attention"], use_qk_norm=True,
        attn_temperature_tuning=True, floor_scale=4, attn_scale=0.5,
    ),
    "deepseek_v3": COMMON | MLA | dict(
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, experts_implementation="eager", num_key_value_heads="{heads}",
    ),
    "minicpm3": COMMON | MLA | dict(num_key_value_heads="{heads}"),
    "bloom": dict(hidden_size="{hidden}", n_layer="{layers}", n_head="{heads}", vocab_size="{vocab}", hidden_dropout=0.0,
                  attention_dropout=0.0, initializer_range=0.15, pad_token_id=None, bos_token_id=None, eos_token_id=None),
    "falcon": COMMON | dict(alibi=True, num_kv_heads="{kv_heads}", hidden_dropout=0.0, ffn_hidden_size="{mlp}",
                            new_decoder_architecture=True, multi_query=False),
    "mpt": dict(d_model="{hidden}", n_heads="{heads}", n_layers="{layers}", vocab_size="{vocab}", max_seq_len=256,
                expansion_ratio=2, initializer_range=0.15, pad_token_id=None, bos_token_id=None, eos_token_id=None),
}  # fmt: skip
TRUE_ATTENTION = {"falcon": "sdpa"}  # eager attention of falcon adds ALiBi twice
TYPES_WITHOUT_KV_HEADS = {"gpt2"}
