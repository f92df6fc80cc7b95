"""Tiny configs of real model types: the same kinds of layers, small enough to compare on any machine."""

from __future__ import annotations

import copy
from typing import Any

from ds_cp.cli.sizes import (
    CAUSAL_PART,
    DEPTHS,
    DROPOUTS,
    HEAD_DIM,
    HEADS,
    KEY_HEAD_NAMES,
    KEY_HEADS,
    LAYERS,
    MOST_LAYERS,
    NESTED,
    REAL,
    SIZES,
    SPECIAL,
    TOWERS,
)


def model_config(model_type: str) -> Any:
    """The config of a type that a tiny one is made of: transformers' default, with every kind of layer that the type has."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**copy.deepcopy(REAL.get(model_type, {})))


def empty_model(model_type: str) -> Any:
    """A causal LM of the type in real size, without memory."""
    import torch

    with torch.device("meta"):
        return causal_lm(model_config(model_type))


def causal_lm(config: Any, **how: Any) -> Any:
    """The causal LM of a config, as ``AutoModelForCausalLM.from_config`` makes it."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if part := CAUSAL_PART.get(config.model_type):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(getattr(config, part), **how)
    return AutoModelForCausalLM.from_config(config, **how)


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A config of the type with small sizes, no dropout, and each kind of layer that the type mixes.

    Args:
        model_type: a key of transformers' CONFIG_MAPPING.
        overrides: last word on any key.
    """
    return shrink(model_config(model_type), **overrides)


def shrink(config: Any, **overrides: Any) -> Any:
    """The same for an existing config: what it says of kinds of layers stays, sizes become small."""
    small = {name: value for name, value in config.to_dict().items() if not name.startswith(("_", "transformers_"))}
    _shrink_dict(small)
    small.update(overrides)
    small.pop("model_type", None)
    return type(config)(**small)


def _shrink_dict(small: dict[str, Any]) -> None:
    depth = next((small[name] for name in DEPTHS if isinstance(small.get(name), int)), None)
    query_heads = next((small[n] for n in ("num_attention_heads", "n_head", "num_heads") if small.get(n)), None)
    kept = _kept_layers(small, depth)
    for name, value in list(small.items()):
        if isinstance(value, dict) and name in NESTED:
            _shrink_dict(value)
        elif isinstance(value, dict) and name in TOWERS:
            _shrink_tower(value)
        elif isinstance(value, list) and depth and len(value) == depth > len(kept):
            small[name] = [SIZES[name]] * len(kept) if name in SIZES else [value[i] for i in kept]
        elif isinstance(value, dict) and depth and value and all(str(key).isdigit() for key in value):
            small[name] = {}
        elif name in KEY_HEAD_NAMES and isinstance(value, int):
            small[name] = HEADS if value == query_heads else (1 if value == 1 else KEY_HEADS)
        elif name in DROPOUTS and isinstance(value, float):
            small[name] = 0.0
        elif name == "head_dim":
            small[name] = HEAD_DIM
        elif name in DEPTHS and value is not None:
            small[name] = len(kept)
        elif name in SIZES and value is not None and not isinstance(value, (list, bool)):
            small[name] = SIZES[name]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(name), dict):
            small[name] = _shrink_rope(small[name])
    small.update(copy.deepcopy(SPECIAL.get(small.get("model_type", ""), {})))


def _shrink_tower(tower: dict[str, Any]) -> None:
    depth = next((tower[name] for name in (*DEPTHS, "num_blocks") if isinstance(tower.get(name), int)), None)
    for name, value in tower.items():
        if name in (*DEPTHS, "num_blocks") and value is not None:
            tower[name] = LAYERS
        elif isinstance(value, list) and len(value) == depth:
            tower[name] = value[:LAYERS]
        elif isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            tower[name] = {}
        elif name == "adapter_out_dim":
            tower[name] = HEADS * HEAD_DIM


def _shrink_rope(rope: dict[str, Any]) -> dict[str, Any]:
    rope = copy.deepcopy(rope)
    for node in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        for name in ("short_factor", "long_factor"):
            if name in node:
                node[name] = node[name][: HEAD_DIM // 2]
        if "mrope_section" in node:
            node["mrope_section"] = [2, 1, 1]
        if "original_max_position_embeddings" in node:
            node["original_max_position_embeddings"] = 64
    return rope


def _kept_layers(small: dict[str, Any], depth: int | None) -> list[int]:
    """Which layers to keep: the first of each kind where the model mixes kinds, and two at least."""
    lists = [value for value in small.values() if isinstance(value, list) and depth and len(value) == depth]
    first: dict[tuple[str, ...], int] = {}
    for layer in range(depth or 0):
        first.setdefault(tuple(str(value[layer]) for value in lists), layer)
    kept = [*first.values()][:MOST_LAYERS]
    return sorted({*kept, *[i for i in range(LAYERS) if len(kept) < LAYERS]})
