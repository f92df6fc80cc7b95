"""The cases of the rehearsal, as data: what :func:`rehearsal.scenario.run` gets."""

from __future__ import annotations

from typing import Any

from harness.flash_stand_in import VERSIONS
from harness.pairwise import covering

FACTORS: dict[str, list[Any]] = {
    "method": ["ring", "ulysses", "hybrid", "allgather"],
    "stage": [2, 3],
    "batch": ["dense", "packed", "padded"],
    "checkpointing": ["off", "reentrant", "non-reentrant"],
    "memory": ["plain", "offload_kv", "offload_activations", "tiled_mlp"],
    "kernel": [
        "torch",
        "flash_attention_2 2.5.9.post1",
        "flash_attention_2 2.8.3.post2",
        "flash_attention_3 hopper 01afd16",
        "flash_attention_4 4.0.0b36",
    ],
    "rank": [0, 4, 7],
}
CONSTRAINTS = [(("memory", "checkpointing"), lambda memory, how: memory != "offload_activations" or how != "off")]

PLAIN = {"kind": "engine", "steps": 1, "method": "ring", "stage": 2, "batch": "dense", "checkpointing": "off", "memory": "plain",
         "kernel": "torch", "rank": 3}  # fmt: skip


def selection() -> list[dict[str, Any]]:
    """Cases of an engine's steps in which every pair of values that can occur together does."""
    return [{"kind": "engine", "steps": _steps(case), **case} for case in covering(FACTORS, CONSTRAINTS)]


def _steps(case: dict[str, Any]) -> int:
    """Two where the second differs most: ZeRO-3 fetches weights ahead from then on."""
    return 2 if case["memory"] == "plain" else 1


def other_versions() -> list[dict[str, Any]]:
    """Packed rows in each version of the FlashAttention packages that the selection does not have."""
    named = [f"{kernel} {version}" for kernel, version in VERSIONS]
    return [PLAIN | {"batch": "packed", "kernel": kernel} for kernel in named if kernel not in FACTORS["kernel"]]


# ---- mistakes -----------------------------------------------------------------------------------------------

SMALL = {"kind": "model_type", "type": "llama", "method": "ring", "rank": 3, "batch": "packed"}

MISTAKES = {
    "host_tensor_in_a_sum": "error: .*found at least two devices",
    "host_tensor_in_a_layer": "host tensor: ds_cp/attention",
    "other_card": "device: a tensor on cuda:0, this rank has cuda:3",
    "item_in_a_layer": "wait: forward, local_scalar_dense, ds_cp/attention",
    "item_in_the_backward_pass": "wait: backward, local_scalar_dense, ds_cp/attention",
    "nonzero_in_a_layer": "wait: forward, nonzero: its size, ds_cp/attention",
    "blocking_copy_in_a_layer": "wait: forward, copy to card, ds_cp/attention",
    "synchronize_in_a_layer": "wait: forward, torch.cuda.synchronize, ds_cp/attention",
    "product_without_out_dtype": "dtype: addmm of mat1 bfloat16, mat2 bfloat16, self float32",
    "product_with_an_fp32_sum": "dtype: addmm of mat1 bfloat16, mat2 bfloat16, self float32",
    "swapped_arguments": "arguments: _flash_attention_forward: dropout_p is a bool, the schema says float",
    "swapped_booleans": "arguments: _flash_attention_forward: return_debug_mask",
    "wrong_longest": "arguments: _flash_attention_forward: the longest is said to be .*, the lengths say otherwise",
    "float16_buffer": "dtype: .* makes a float16 tensor",
}
"""A function of ``mistakes.py``, and what the rehearsal must say."""

BOUNDS = {"more_launches": "launches", "kept_activations": "bytes"}
"""Mistakes that break a bound of ``tables.py``."""

# ---- model types --------------------------------------------------------------------------------------------

SOME_TYPES = "llama gemma2 gpt2 mixtral deepseek_v3 qwen3_next llama4_text falcon".split()

MORE_TYPES = (
    "afmoe apertus arcee bamba bart bert biogpt bitnet bloom codegen cohere cohere2 ctrl dbrx deepseek_v2 deepseek_v32 deepseek_v4 "
    "diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 falcon_h1 falcon_mamba flex_olmo gemma gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe "
    "glm_moe_dsa gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan_v1_dense "
    "inkling_text jamba jetmoe kimi_linear lfm2 longcat_flash mamba mamba2 minicpm3 minimax ministral mistral modernbert-decoder "
    "mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 "
    "qwen3_5_text qwen3_moe recurrent_gemma seed_oss smollm3 stablelm starcoder2 vaultgemma whisper xglm zamba2"
).split()


def of_types(names: list[str]) -> list[dict[str, Any]]:
    methods = FACTORS["method"]
    return [{"kind": "model_type", "type": name, "method": methods[i % 4], "rank": 3} for i, name in enumerate(names)]


def name_of(case: dict[str, Any]) -> str:
    """A test id."""
    return "-".join(str(value).replace(" ", "_") for name, value in case.items() if name not in ("kind", "steps"))
