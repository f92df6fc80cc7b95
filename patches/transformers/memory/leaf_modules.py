"""Modules that run with another forward, inside of their call."""

from __future__ import annotations

from types import MethodType
from typing import Any, Callable, Iterable, Iterator

import torch


def bind(modules: Iterable[torch.nn.Module], forward: Callable[..., Any]) -> Callable[[], None]:
    """Give modules another forward, and make each a leaf; returns what undoes it.

    Args:
        forward: takes the module first.
    """
    bound = [*modules]
    undo_leaves = make_leaves(bound)
    for module in bound:
        module.forward = MethodType(forward, module)

    def undo() -> None:
        undo_leaves()
        for module in bound:
            module.__dict__.pop("forward", None)

    return undo


def make_leaves(modules: Iterable[torch.nn.Module]) -> Callable[[], None]:
    """Make modules *leaves* for ZeRO-3, which then gathers the weights of each once around its call, however often its parts
    run. Returns what undoes it."""
    bound = [(module, vars(module).get("_z3_leaf")) for module in modules]
    handles = [module.register_forward_pre_hook(_with_gradient) for module, _ in bound]
    for module, _ in bound:
        module._z3_leaf = True  # what DeepSpeed's set_z3_leaf_modules sets; it is read when an engine is made

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for module, leaf in bound:
            module.__dict__.pop("_z3_leaf", None)
            if leaf is not None:
                module._z3_leaf = leaf

    return undo


def _with_gradient(module: torch.nn.Module, args: tuple) -> tuple | None:
    """An input that asks for a gradient, where a leaf learns and nothing before it does (adapters on frozen embeddings).

    DeepSpeed reduces a leaf's gradients in a full backward hook. torch calls that when the input's gradient is known, and
    where none is asked for at once: before the leaf has any.
    """
    if not torch.is_grad_enabled() or not args or not isinstance(args[0], torch.Tensor) or args[0].requires_grad:
        return None
    if any(parameter.requires_grad for parameter in _reduced_with(module)):
        return _asking(args[0]), *args[1:]
    return None


def _reduced_with(leaf: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    return (each for each in leaf.parameters() if getattr(each, "ds_z3_leaf_module", None) is leaf)


@torch.compiler.disable
def _asking(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()
