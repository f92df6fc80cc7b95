"""Sizes of tiny vision-language models, by type."""

from ds_cp.cli import shrink

IMAGE, VIDEO, START, END = 120, 121, 122, 123
TEXT = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, vocab_size=128,
    max_position_embeddings=256, initializer_range=0.15, attention_dropout=0.0, pad_token_id=0, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
WINDOWED = dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"])
TOWER = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4,
    initializer_range=0.15, attention_dropout=0.0,
)  # fmt: skip
QWEN_TOWER = dict(
    depth=2, hidden_size=32, intermediate_size=48, num_heads=4, patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
    in_channels=3, out_hidden_size=64, initializer_range=0.15, hidden_act="silu",
)  # fmt: skip
TOKENS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])


def text(model_type, **more):
    return dict(model_type=model_type) | TEXT | more


def tower(model_type, **more):
    return dict(model_type=model_type) | TOWER | more


CONFIGS = {
    "llava": ("LlavaForConditionalGeneration", dict(
        text_config=text("llama", head_dim=8), vision_config=tower("clip_vision_model"), image_token_index=IMAGE,
        image_seq_length=16,
    )),
    "mistral3": ("Mistral3ForConditionalGeneration", dict(
        text_config=text("mistral", head_dim=8, sliding_window=None), image_token_index=IMAGE, spatial_merge_size=1,
        vision_config=tower("pixtral", head_dim=8), vision_feature_layer=-1,
    )),
    "internvl": ("InternVLForConditionalGeneration", dict(
        text_config=text("qwen2"), image_token_id=IMAGE, image_seq_length=4,
        vision_config=tower("internvl_vision", image_size=[16, 16], patch_size=[4, 4], hidden_dropout_prob=0.0),
    )),
    "gemma3": ("Gemma3ForConditionalGeneration", dict(
        text_config=text("gemma3_text", head_dim=8, query_pre_attn_scalar=20, **WINDOWED), mm_tokens_per_image=16,
        vision_config=tower("siglip_vision_model"), image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END,
    )),
    "paligemma": ("PaliGemmaForConditionalGeneration", dict(
        text_config=text("gemma", head_dim=8), vision_config=tower("siglip_vision_model", projection_dim=64),
        image_token_index=IMAGE, projection_dim=64,
    )),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", dict(
        text_config=text("qwen2_vl_text", rope_parameters=MROPE, use_sliding_window=False), **TOKENS,
        vision_config=dict(depth=2, embed_dim=32, num_heads=4, mlp_ratio=2, patch_size=4, spatial_merge_size=2,
                           temporal_patch_size=2, in_channels=3, hidden_size=64, initializer_range=0.15),
    )),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", dict(
        text_config=text("qwen2_5_vl_text", rope_parameters=MROPE, use_sliding_window=False), **TOKENS,
        vision_config=QWEN_TOWER | dict(window_size=16, fullatt_block_indexes=[1]),
    )),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", dict(
        text_config=text("qwen3_vl_text", head_dim=8, rope_parameters=MROPE | dict(mrope_interleaved=True)), **TOKENS,
        vision_config=QWEN_TOWER | dict(num_position_embeddings=64, deepstack_visual_indexes=[0, 1]),
    )),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", dict(
        text_config=text("qwen3_vl_moe_text", head_dim=8, rope_parameters=MROPE | dict(mrope_interleaved=True), num_experts=4,
                         num_experts_per_tok=2, moe_intermediate_size=32, router_aux_loss_coef=0.5,
                         output_router_logits=True), **TOKENS,
        vision_config=QWEN_TOWER | dict(num_position_embeddings=64, deepstack_visual_indexes=[0, 1]),
    )),
    "qwen4_exp": ("Qwen4ExpForConditionalGeneration", dict(
        text_config=shrink.tiny_config("qwen4_exp_text").to_dict(), **TOKENS,
        vision_config=QWEN_TOWER | dict(num_position_embeddings=64),
    )),
    "minimax_m3_vl": ("MiniMaxM3SparseForConditionalGeneration", dict(
        text_config=shrink.tiny_config("minimax_m3_vl_text").to_dict(), image_token_index=IMAGE, video_token_index=VIDEO,
        vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, patch_size=4,
                           image_size=32, initializer_range=0.15), projector_hidden_size=64,
    )),
    "vipllava": ("VipLlavaForConditionalGeneration", dict(
        text_config=text("llama", head_dim=8), vision_config=tower("clip_vision_model"), image_token_index=IMAGE,
        vision_feature_layers=[-1, -2], image_seq_length=16,
    )),
    "smolvlm": ("SmolVLMForConditionalGeneration", dict(
        text_config=text("llama", head_dim=8), vision_config=tower("smolvlm_vision"), image_token_id=IMAGE, scale_factor=2,
    )),
    "gemma4": ("Gemma4ForConditionalGeneration", dict(
        text_config=text("gemma4_text", head_dim=8, global_head_dim=16, num_global_key_value_heads=1,
                         vocab_size_per_layer_input=128, hidden_size_per_layer_input=8, num_kv_shared_layers=0,
                         attention_k_eq_v=False, enable_moe_block=False, use_bidirectional_attention="vision",
                         **WINDOWED | {"initializer_range": 0.1}),
        vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=4, head_dim=8, patch_size=4, pooling_kernel_size=2, position_embedding_size=64),
        image_token_id=IMAGE, audio_config=None,
    )),
    "aria": ("AriaForConditionalGeneration", dict(
        text_config=text("aria_text", head_dim=8, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, bos_token_id=1,
                         eos_token_id=2, **{"intermediate_size": 48}),
        vision_config=tower("idefics3_vision"), image_token_index=IMAGE, projector_patch_to_query_dict={16: 16},
    )),
    "mllama": ("MllamaForConditionalGeneration", dict(
        text_config=text("mllama_text_model", cross_attention_layers=[1], rope_parameters=dict(rope_type="default", rope_theta=1e4),
                         bos_token_id=1, eos_token_id=2, **{"num_hidden_layers": 3}),
        vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_global_layers=1, attention_heads=4,
                           image_size=16, patch_size=4, vision_output_dim=64, intermediate_layers_indices=[0], max_num_tiles=4,
                           supported_aspect_ratios=[[1, 1]]), image_token_index=IMAGE,
    )),
    "glm4v": ("Glm4vForConditionalGeneration", dict(
        text_config=text("glm4v_text", rope_parameters=MROPE | dict(partial_rotary_factor=1.0)), **TOKENS,
        vision_config=dict(depth=2, hidden_size=32, num_heads=4, patch_size=4, image_size=32, spatial_merge_size=2,
                           temporal_patch_size=2, in_channels=3, out_hidden_size=64, intermediate_size=48),
    )),
}  # fmt: skip
