"""Tiny configs of the model types of transformers: the same kinds of layers, small enough to compare on any machine."""

from __future__ import annotations

import copy
from typing import Any

from ds_cp.cli.sizes import (
    CAUSAL_LM_CONFIGS,
    CHECKPOINT_VALUES,
    DEPTH_NAMES,
    DROPOUT_NAMES,
    ENCODER_CONFIGS,
    HEAD_DIM,
    HEADS,
    KV_HEAD_NAMES,
    KV_HEADS,
    LAYERS,
    MAX_LAYERS,
    SIZES,
    TEXT_CONFIGS,
    TINY_VALUES,
)


def model_config(model_type: str) -> Any:
    """The config of a model type in real size: the default of transformers, with every kind of layer that the type has."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**copy.deepcopy(CHECKPOINT_VALUES.get(model_type, {})))


def empty_model(model_type: str) -> Any:
    """A causal LM of the type in real size on the meta device, which allocates no memory."""
    import torch

    with torch.device("meta"):
        return causal_lm(model_config(model_type))


def causal_lm(config: Any, **arguments: Any) -> Any:
    """The causal LM of a config, built like ``AutoModelForCausalLM.from_config(config, **arguments)``.

    Also builds the types whose causal LM class expects a part of the config.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if part := CAUSAL_LM_CONFIGS.get(config.model_type):
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return model_class._from_config(getattr(config, part), **arguments)
    return AutoModelForCausalLM.from_config(config, **arguments)


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A config of the type with small sizes, without dropout, and with each kind of layer that the type combines.

    Args:
        model_type: A key of ``CONFIG_MAPPING`` of transformers.
        overrides: Values that replace those of the tiny config.
    """
    return shrink(model_config(model_type), **overrides)


def shrink(config: Any, **overrides: Any) -> Any:
    """The same for an existing config: its kinds of layers stay, and its sizes become small."""
    values = {name: value for name, value in config.to_dict().items() if not name.startswith(("_", "transformers_"))}
    _shrink_dict(values)
    values.update(overrides)
    values.pop("model_type", None)
    return type(config)(**values)


def _shrink_dict(values: dict[str, Any]) -> None:
    """Shrink a config, as a dict, in place."""
    depth = next((values[name] for name in DEPTH_NAMES if isinstance(values.get(name), int)), None)
    query_heads = next((values[n] for n in ("num_attention_heads", "n_head", "num_heads") if values.get(n)), None)
    layers = _select_layers(values, depth)
    for name, value in list(values.items()):
        if isinstance(value, dict) and name in TEXT_CONFIGS:
            _shrink_dict(value)
        elif isinstance(value, dict) and name in ENCODER_CONFIGS:
            _shrink_encoder(value)
        elif isinstance(value, list) and depth and len(value) == depth > len(layers):
            values[name] = [SIZES[name]] * len(layers) if name in SIZES else [value[i] for i in layers]
        elif isinstance(value, dict) and depth and _is_by_layer(value):
            values[name] = {}
        elif name in KV_HEAD_NAMES and isinstance(value, int):
            values[name] = HEADS if value == query_heads else (1 if value == 1 else KV_HEADS)
        elif name in DROPOUT_NAMES and isinstance(value, float):
            values[name] = 0.0
        elif name == "head_dim":
            values[name] = HEAD_DIM
        elif name in DEPTH_NAMES and value is not None:
            values[name] = len(layers)
        elif name in SIZES and value is not None and not isinstance(value, (list, bool)):
            values[name] = SIZES[name]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), dict):
            values[name] = _shrink_rope(values[name])
    values.update(copy.deepcopy(TINY_VALUES.get(values.get("model_type", ""), {})))


def _shrink_encoder(values: dict[str, Any]) -> None:
    """Reduce the number of layers of an image or audio encoder's config, in place."""
    depth_names = (*DEPTH_NAMES, "num_blocks")
    depth = next((values[name] for name in depth_names if isinstance(values.get(name), int)), None)
    for name, value in values.items():
        if name in depth_names and value is not None:
            values[name] = LAYERS
        elif isinstance(value, list) and len(value) == depth:
            values[name] = value[:LAYERS]
        elif isinstance(value, dict) and _is_by_layer(value):
            values[name] = {}
        elif name == "adapter_out_dim":
            values[name] = HEADS * HEAD_DIM


def _is_by_layer(value: dict[Any, Any]) -> bool:
    """Whether a dict maps indices of layers to values; they are not valid for other numbers of layers."""
    return bool(value) and all(str(index).isdigit() for index in value)


def _shrink_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters for heads of ``HEAD_DIM``: of one kind, or in one dict per kind of layer."""
    rope = copy.deepcopy(rope)
    for parameters in [rope, *(nested for nested in rope.values() if isinstance(nested, dict))]:
        for name in ("short_factor", "long_factor"):
            if name in parameters:
                parameters[name] = parameters[name][: HEAD_DIM // 2]
        if "mrope_section" in parameters:
            parameters["mrope_section"] = [2, 1, 1]
        if "original_max_position_embeddings" in parameters:
            parameters["original_max_position_embeddings"] = 64
    return rope


def _select_layers(values: dict[str, Any], depth: int | None) -> list[int]:
    """Indices of the layers that a tiny config keeps: the first of each kind, at least ``LAYERS`` in all.

    Layers are of one kind if all per-layer lists of the config have equal values for them.
    """
    lists = [value for value in values.values() if isinstance(value, list) and depth and len(value) == depth]
    first_of_kind: dict[tuple[str, ...], int] = {}
    for layer in range(depth or 0):
        first_of_kind.setdefault(tuple(str(value[layer]) for value in lists), layer)
    selected = [*first_of_kind.values()][:MAX_LAYERS]
    return sorted({*selected, *[i for i in range(LAYERS) if len(selected) < LAYERS]})
