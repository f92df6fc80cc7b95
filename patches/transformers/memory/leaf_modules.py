"""ZeRO-3 leaf modules: DeepSpeed gathers all weights of a leaf once per call of it, however often its submodules run.

Modules that run in chunks must be leaves. Otherwise the number of gathers, which are collectives of all ranks, would follow
from the length of the batch, which differs between data-parallel groups.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Callable, Iterable, Iterator

import torch


def bind_leaves(modules: Iterable[torch.nn.Module], forward: Callable[..., Any]) -> Callable[[], None]:
    """Bind a forward to modules and make them leaves; returns what undoes it.

    Args:
        forward: Called with the module and the arguments of its call.
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
    """Make modules ZeRO-3 leaves; returns what undoes it. DeepSpeed reads the mark when an engine is built."""
    marked: list[tuple[Any, bool | None]] = [(module, vars(module).get("_z3_leaf")) for module in modules]
    handles = [module.register_forward_pre_hook(_require_input_grad) for module, _ in marked]
    for module, _ in marked:
        module._z3_leaf = True  # what deepspeed.utils.set_z3_leaf_modules sets

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for module, was_leaf in marked:
            module.__dict__.pop("_z3_leaf", None)
            if was_leaf is not None:
                module._z3_leaf = was_leaf

    return undo


def _require_input_grad(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Let the input require grad if the leaf has trainable weights and nothing before it has (adapters on frozen embeddings).

    DeepSpeed reduces the gradients of a leaf in a full backward hook. torch calls that hook when the gradient of the input is
    known. Without one it calls the hook at the start of the module's backward pass, before the leaf has any gradients.
    """
    if not torch.is_grad_enabled() or not args or not isinstance(args[0], torch.Tensor) or args[0].requires_grad:
        return None
    if any(parameter.requires_grad for parameter in _parameters_of_leaf(module)):
        return _requiring_grad(args[0]), *args[1:]
    return None


def _parameters_of_leaf(leaf: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters that DeepSpeed reduces in the hook of this leaf; none without ZeRO-3."""
    return (each for each in leaf.parameters() if getattr(each, "ds_z3_leaf_module", None) is leaf)


@torch.compiler.disable
def _requiring_grad(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()
