"""The argument MODEL of ``ds_cp plan`` and ``ds_cp verify``: which config or model of transformers it names."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch

from ds_cp.cli.shrink import shrink, tiny_config


def load_config(model: str, accepts_types: bool = False) -> Any:
    """Load the config of a checkpoint folder, a ``config.json`` or a model in the local cache.

    Args:
        model: The argument as it was typed.
        accepts_types: Whether the command also accepts model types such as ``llama``; the error message then suggests
            the type with the most similar spelling.

    Raises:
        ValueError: ``model`` names none of these.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:  # OSError: nothing was found; ValueError: a config.json without a model type
        suggestion, no_type = "", ""
        if accepts_types:
            similar = difflib.get_close_matches(model, list(transformers.CONFIG_MAPPING), n=1)
            suggestion = f' Did you mean the type "{similar[0]}"?' if similar else ""
            no_type = f", and no model type of transformers {transformers.__version__}"
        raise ValueError(
            f'"{model}" is no checkpoint folder and no config.json that names a model type, and no model in the local cache'
            f"{no_type}.{suggestion}"
        ) from error


def check_model(model: str) -> None:
    """Check that ``model`` is something that :func:`build_model` accepts, before any process is started.

    Raises:
        ValueError: It is not; the message suggests the model type with the most similar spelling.
    """
    import transformers

    if model not in transformers.CONFIG_MAPPING and not _gguf_arguments(model):
        load_config(model, accepts_types=True)


def build_model(model: str, auto_class: str, full: bool) -> torch.nn.Module:
    """Build a model in fp32, with eager attention, in training mode.

    Args:
        model: A model type, or what ``from_pretrained`` accepts.
        auto_class: Name of the class of transformers that builds it, for example ``"AutoModelForCausalLM"``.
        full: Whether to load the real weights. Otherwise the model is a tiny one with the same kinds of layers and random
            weights.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(attn_implementation="eager", dtype=torch.float32)
    builder = getattr(transformers, auto_class)
    gguf = _gguf_arguments(model)
    loaded: torch.nn.Module
    if full:
        loaded = builder.from_pretrained(model, **gguf, **settings)
        vars(loaded.config).pop("quantization_config", None)  # the weights of a GGUF file are dequantized to fp32
        return _without_dropout(loaded).train()
    is_type = model in transformers.CONFIG_MAPPING
    config = tiny_config(model) if is_type else shrink(transformers.AutoConfig.from_pretrained(model, **gguf))
    settings["experts_implementation"] = "eager"  # the grouped matmul of experts does not support fp64
    loaded = builder.from_config(config, **settings)
    return loaded.train()


def _gguf_arguments(model: str) -> dict[str, str]:
    """The additional arguments of ``from_pretrained`` for a folder with one GGUF file and no ``config.json``."""
    folder = Path(model)
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() and not (folder / "config.json").exists() else []
    return {"gguf_file": files[0].name} if len(files) == 1 else {}


def _without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """Set all dropout probabilities to zero: ranks and one process draw different random numbers."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model
