"""All replacements by class: which function runs instead of which method of transformers, for one model's modules.

:func:`attach` binds them to the modules of a decoder, together with the hooks of models that count positions or build masks
themselves. Which families there are, and what their attention does, is said in the module of each table.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any, Callable

import torch

from ds_cp.patches.transformers.models import (
    alibi,
    deepseek_v4,
    doge,
    eager_only,
    inkling,
    llama4,
    positions,
    relative_bias,
    sparse_attention,
    xlm,
)
from ds_cp.patches.transformers.models.replacement import Replacement

REPLACED: dict[str, Replacement] = {
    **alibi.REPLACED,
    **relative_bias.REPLACED,
    **llama4.REPLACED,
    **eager_only.REPLACED,
    **doge.REPLACED,
    **xlm.REPLACED,
    **sparse_attention.REPLACED,
    **deepseek_v4.REPLACED,
    **inkling.REPLACED,
}
"""Replacements by the name of the class, or by "module.class" if several classes have the name."""


def replacement_of(cls: type) -> Replacement | None:
    """The replacement of a class of transformers; None if it has none."""
    if not cls.__module__.startswith("transformers."):
        return None
    return REPLACED.get(cls.__name__) or REPLACED.get(f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}")


def attach(decoder: torch.nn.Module) -> Callable[[], None]:
    """Bind the replacements of a decoder's modules, and hook positions and masks; returns what undoes it."""
    replaced = {module: found for module in decoder.modules() if (found := replacement_of(type(module)))}
    chunked = [module for module, replacement in replaced.items() if replacement.role in ("indexer", "compressor")]
    undo_hooks = [positions.attach(decoder), xlm.attach(decoder), sparse_attention.attach(chunked)]
    for module, replacement in replaced.items():
        setattr(module, replacement.method, MethodType(partial(_call, replacement), module))

    def undo() -> None:
        for module, replacement in replaced.items():
            module.__dict__.pop(replacement.method, None)
        for undo_hook in undo_hooks:
            undo_hook()

    return undo


def _call(replacement: Replacement, self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    # the class's method is looked up at the call: in a deep copy of the model it must use the copy's weights
    return replacement.run(MethodType(getattr(type(self), replacement.method), self), self, *args, **kwargs)
