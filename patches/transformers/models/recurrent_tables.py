"""Recurrent layers and short convolutions of transformers, by name: which functions and modules in them mix tokens.

Three kinds of layers are known: those whose tokens are mixed by a function that the modeling file looks up by name
(:data:`FUNCTIONS`), those whose tokens are mixed by a submodule (:data:`SUBMODULES`), and those that mix tokens somewhere in
their own forward (:data:`REPLICATED_LAYERS`). Dims are strings with one letter each, as
:func:`ds_cp.recurrent.channels.mix` reads them: b batch, l tokens, h heads or channels, g groups that serve several heads;
any other letter is a dim that is not split.
"""

from __future__ import annotations

from ds_cp.patches.transformers.batch import PACKING_ARGUMENTS
from ds_cp.patches.transformers.models.introspection import referenced_names

FUNCTIONS: dict[str, tuple[dict[str, str], str]] = {
    "causal_conv1d_fn": ({"hidden_states": "bhl", "weight": "hw", "bias": "h"}, "bhl"),
    "torch_chunk_gated_delta_rule": (
        {"query": "blgk", "key": "blgk", "value": "blhv", "g": "blh", "beta": "blh"},
        "blhv",
    ),
    "chunk_kimi_delta_attention": (
        {"query": "blhk", "key": "blhk", "value": "blhv", "g": "blhk", "beta": "blh"},
        "blhv",
    ),
    "mamba2_chunk_scan": (
        {"hidden_states": "blhd", "dt": "blh", "A": "h", "B": "blgn", "C": "blgn", "chunk_size": "", "D": "h", "dt_bias": "h"},
        "blhd",
    ),
    "mamba_selective_scan": (
        {"hidden_states": "bhl", "dt": "bhl", "A": "hn", "B": "bnl", "C": "bnl", "D": "h", "z": "bhl", "delta_bias": "h"},
        "bhl",
    ),
    "rwkv_linear_attention": ({"time_decay": "h", "time_first": "h", "key": "blh", "value": "blh"}, "blh"),
}  # fmt: skip
"""Functions that mix tokens: the dims of their first arguments, in order, and of their result."""

FUSED_KERNELS = frozenset({"mamba_inner_fn", "mamba2_split_conv1d_scan_combined"})
"""Functions that compute a whole layer. If they return None, the layer calls the functions above."""

SUBMODULES: dict[str, tuple[str, dict[str, str], str]] = {
    "RwkvSelfAttention": ("time_shift", {"input": "blh"}, "blh"),
    "RwkvFeedForward": ("time_shift", {"input": "blh"}, "blh"),
    "xLSTMLayer": (
        "mlstm_backend",
        {"query": "bhlk", "key": "bhlk", "value": "bhlv", "igate": "bhl", "fgate": "bhl"},
        "bhlv",
    ),
}
"""Layers, by class, in which a submodule mixes tokens: its name, the dims of its arguments and of its result."""

REPLICATED_LAYERS: dict[str, int] = {
    "Inkling2DynamicShortConvolution": 1,
    "Inkling2LoopDynamicShortConvolution": 1,
    "MiniMaxLightningAttention": 1,
    "Qwen4ExpTextPLELayer": 1,
    "RecurrentGemmaRecurrentBlock": 1,
    "ZayaCCAProjection": 3,
}
"""Layers, by class, that mix tokens in their own forward: how many of their results are per token. Every rank runs them on all
tokens."""

SHARD_ARGUMENTS = frozenset({*PACKING_ARGUMENTS, "cu_seqlens", "position_ids", "cache_position", "position_embeddings"})
"""Arguments that describe documents and positions of this rank's tokens. They do not fit the whole sequence, whose documents
the region knows."""


def is_known(cls: type) -> bool:
    """Whether a class of transformers mixes tokens in one of the ways above."""
    known = cls.__name__ in SUBMODULES or cls.__name__ in REPLICATED_LAYERS or bool(functions_of(cls))
    return known and cls.__module__.startswith("transformers.")


def is_replicated(cls: type) -> bool:
    """Whether every rank runs layers of a class on all tokens."""
    return cls.__name__ in REPLICATED_LAYERS and is_known(cls)


def functions_of(cls: type) -> list[str]:
    """Functions that mix tokens, and fused kernels, which the methods of a class refer to."""
    return sorted(referenced_names(cls) & (FUNCTIONS.keys() | FUSED_KERNELS))
