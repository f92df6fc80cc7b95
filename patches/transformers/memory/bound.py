"""Modules that run with another forward, inside of their call."""

from __future__ import annotations

from types import MethodType
from typing import Any, Callable, Iterable

import torch


def bind(modules: Iterable[torch.nn.Module], forward: Callable[..., Any]) -> Callable[[], None]:
    """Give modules another forward; returns what undoes it.

    Each becomes a *leaf* for ZeRO-3, which then gathers its weights once around the call, however often its parts run.

    Args:
        forward: takes the module first.
    """
    bound = [(module, vars(module).get("_z3_leaf")) for module in modules]
    for module, _ in bound:
        module.forward = MethodType(forward, module)
        module._z3_leaf = True  # what DeepSpeed's set_z3_leaf_modules sets; it is read when an engine is made

    def undo() -> None:
        for module, leaf in bound:
            module.__dict__.pop("forward", None)
            module.__dict__.pop("_z3_leaf", None)
            if leaf is not None:
                module._z3_leaf = leaf

    return undo
