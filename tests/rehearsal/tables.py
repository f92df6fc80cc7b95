"""What is allowed in a rehearsal, in one place: where the host may wait, launches per layer, bytes.

Numbers were counted with the shape in ``scenario.py``. They are bounds: a change that needs fewer should lower them.
"""

from __future__ import annotations

from typing import Any

HOST_WAITS = {
    "patches/transformers/host_copies.py:__init__": (1, "documents and bounds are computed on the host, from one read"),
    "ds_cp/region.py:_on_device": (3, "positions of packed or padded tokens go to the card, once per batch"),
    "ds_cp/mask/queries.py:of": (3, "the queries of each document go to the card for indexers, once per batch"),
    "ds_cp/layout.py:unshard_index_on": (1, "the order of a gathered sequence goes to the card, once per layout"),
    "patches/transformers/models/deepseek_v4.py:_compute_windows": (4, "the windows of compressed keys, once per rate"),
}
"""``file:function`` of ds_cp where the host may wait for the card: how often in a step, and why."""

OF_TRANSFORMERS = {
    "transformers/models/falcon/modeling_falcon.py:_split_heads": "indexes with a list, which torch copies to the card",
    "transformers/models/gemma3n/modeling_gemma3n.py:_gaussian_topk": "makes a number on the host",
    "transformers/models/phimoe/modeling_phimoe.py:forward": "makes a number on the host",
    "transformers/models/dbrx/modeling_dbrx.py:forward": "asks which tokens an expert got",
    "transformers/models/longcat_flash/modeling_longcat_flash.py:forward": "asks which tokens an expert got",
    "transformers/models/jetmoe/modeling_jetmoe.py:forward": "asks how many tokens each expert got",
}
"""Where models wait by themselves, whatever ds_cp does."""

HOST_TENSORS = {
    "ds_cp/attention/kernels/windows.py": "boundaries of documents are made on the host and copied, once per batch",
    "ds_cp/layout.py": "the order of a gathered sequence is made on the host, once per layout",
    "ds_cp/rng.py": "the state of the host's generator, which is compared around chunks of a layer",
}
"""Files that may make tensors in pageable host memory while a layer runs."""

# ---- launches of one layer ----------------------------------------------------------------------------------

LAUNCHES: dict[str, dict[str, tuple[int, int]]] = {
    "plain": {"ring": (73, 184), "ulysses": (44, 88), "hybrid": (61, 140), "allgather": (73, 184)},
    "tiled_mlp": {"ring": (79, 224), "ulysses": (50, 132), "hybrid": (67, 172), "allgather": (79, 224)},
    "offload_activations": {"ring": (76, 196), "ulysses": (46, 90), "hybrid": (63, 150), "allgather": (76, 196)},
    "offload_kv": {"ring": (232, 670), "ulysses": (436, 1030), "hybrid": (284, 795), "allgather": (232, 670)},
}
"""(forward, backward) without checkpointing: kernels, copies and messages."""

RECOMPUTATION = 40
"""More of them in the backward pass of a checkpointed layer, whose attention is not computed again."""

DOCUMENT_BY_DOCUMENT = 30
"""More in each pass where FlashAttention is too old to compute several documents in one call (before 2.6)."""


def most_launches(case: dict[str, Any]) -> tuple[int, int]:
    """The bounds of a case."""
    forward, backward = LAUNCHES[case["memory"]][case["method"]]
    if case["checkpointing"] != "off" and case["memory"] != "offload_kv":  # there layers run on chunks, twice as it is
        backward += RECOMPUTATION
    if case["kernel"].startswith("flash_attention_2 2.5") and case["batch"] == "packed":
        forward, backward = forward + DOCUMENT_BY_DOCUMENT, backward + DOCUMENT_BY_DOCUMENT
    return forward, backward


# ---- bytes --------------------------------------------------------------------------------------------------

PEAK_IN_LAYERS = {
    ("plain", False): 1660, ("plain", True): 800, ("tiled_mlp", False): 930, ("tiled_mlp", True): 690,
    ("offload_activations", True): 810, ("offload_kv", False): 600, ("offload_kv", True): 600,
}  # fmt: skip
"""MiB over weights and optimizer states while a layer runs, by memory and checkpointing: ZeRO-2."""

PEAK_ANYWHERE = {
    ("plain", False): 2550, ("plain", True): 1280, ("tiled_mlp", False): 1690, ("tiled_mlp", True): 1280,
    ("offload_activations", True): 1140, ("offload_kv", False): 1280, ("offload_kv", True): 1280,
}  # fmt: skip
"""The same for a whole step; most of it are a few buffers of the loss's chunks of logits."""

GATHERED = 180
"""MiB more under ZeRO-3: weights that are gathered."""


def most_bytes(case: dict[str, Any]) -> dict[str, int]:
    """The bounds of a case, over what lives between steps."""
    key = case["memory"], case["checkpointing"] != "off"
    more = GATHERED if case["stage"] == 3 else 0
    return {"in layers": (PEAK_IN_LAYERS[key] + more) << 20, "anywhere": (PEAK_ANYWHERE[key] + more) << 20}


WITHOUT_GRADIENT = {
    "deepseek_v32": ("indexer",), "glm_moe_dsa": ("indexer",), "deepseek_v4": ("indexer",),
    "bart": ("encoder_attn",), "whisper": ("encoder_attn",),
}  # fmt: skip
"""Parts of model types that plain transformers trains no more than ds_cp does: choices of keys, attention over an encoder that
is not there."""
