"""Model types beyond the causal LMs of verified.csv whose loss and gradients equal one process; kept by hand, each line
backed by a test that builds what it names."""

from __future__ import annotations

ENCODERS = frozenset(
    "albert bert camembert distilbert electra ernie eurobert modernbert roberta t5 umt5 xlm-roberta xlm-roberta-xl".split()
)
"""Compared in tests/test_other_heads.py."""

ENCODER_DECODERS = frozenset(
    "bart blenderbot blenderbot-small m2m_100 marian mbart mt5 pegasus plbart t5 t5gemma umt5".split()
)
"""With the types of their stacks; compared in tests/test_encoder_decoder.py, both stacks, cross attention and generation."""

VISION_LANGUAGE = frozenset(
    "aria gemma3 gemma4 glm4v glm4v_text internvl llava minimax_m3_vl mistral3 mllama paligemma qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text "
    "qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text smolvlm vipllava".split()
)
"""Models around a text decoder, and text decoders that come only inside of one; compared in
tests/test_vision_language.py."""

INSIDE = frozenset({"emu3_text_model", "mllama_text_model"})
"""Types of the stacks inside of types that the sweep has compared."""

STACKS = frozenset({"t5_gemma_module"})
"""What the configs of stacks call themselves, where it is another name than their model's."""

TYPES = STACKS | ENCODERS | ENCODER_DECODERS | VISION_LANGUAGE | INSIDE
