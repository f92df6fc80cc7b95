"""Model types, beyond the causal LMs in verified.csv, whose loss and gradients equal those of one process.

Each list is maintained by hand. A test fails if it names a type that no comparison covers.
"""

from __future__ import annotations

ENCODERS = frozenset(
    "albert bert camembert distilbert electra ernie eurobert modernbert roberta t5 umt5 xlm-roberta xlm-roberta-xl".split()
)
"""Compared in tests/parity/test_task_heads.py."""

ENCODER_DECODERS = frozenset(
    "bart blenderbot blenderbot-small m2m_100 marian mbart mt5 pegasus plbart t5 t5gemma umt5".split()
)
"""Types of the models and of their stacks. tests/parity/test_encoder_decoder.py compares both stacks, cross attention and
generation."""

VISION_LANGUAGE = frozenset(
    "aria gemma3 gemma4 glm4v glm4v_text internvl llava minimax_m3_vl mistral3 mllama paligemma qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text "
    "qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text smolvlm vipllava".split()
)
"""Types of models with a text decoder, and of text decoders that exist only inside such models. Compared in
tests/parity/test_vision_language.py."""

TEXT_DECODERS = frozenset({"emu3_text_model", "mllama_text_model"})
"""Types of the text decoders inside models that verified.csv lists."""

STACK_CONFIGS = frozenset({"t5_gemma_module"})
"""Types that the configs of stacks name, where they differ from the model's."""

TYPES = ENCODERS | ENCODER_DECODERS | VISION_LANGUAGE | TEXT_DECODERS | STACK_CONFIGS
