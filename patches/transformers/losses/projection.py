"""The projection to the vocabulary: while a head with a known loss runs, it answers with deferred logits."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any, Callable

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from ds_cp.patches.transformers.ambient import current_task_head
from ds_cp.patches.transformers.losses.deferred_logits import DeferredLogits


def attach(head: nn.Module) -> Callable[[], None]:
    """Bind the forward of a model's output projections; returns what undoes it.

    Only a plain ``nn.Linear`` is bound, possibly inside of PEFT's ``modules_to_save``: of anything else, an adapter on the
    head say, nobody knows that weight and bias are all of it, so its logits are computed at once.
    """
    bound = [module for module in _projections(head) if _is_plain(module)]
    for module in bound:
        module.forward = MethodType(_forward, module)

    def undo() -> None:
        for module in bound:
            module.__dict__.pop("forward", None)

    return undo


def _projections(head: nn.Module) -> list[nn.Module]:
    found = head.get_output_embeddings() if hasattr(head, "get_output_embeddings") else None
    saved = getattr(found, "modules_to_save", None)
    return list(saved.values()) if isinstance(saved, nn.ModuleDict) else [found]


def _is_plain(module: Any) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def is_watched(module: nn.Module) -> bool:
    """Whether hooks other than DeepSpeed's see a module's calls: they expect one call, with whole inputs and outputs."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return _has_any_global_hook() or any(not _is_deepspeeds(hook) for each in hooks for hook in each.values())


def _is_deepspeeds(hook: Callable) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").startswith("deepspeed.")


@torch.compiler.disable
def _forward(self: nn.Linear, hidden: torch.Tensor, work: Callable | None = None) -> Any:
    """``nn.Linear.forward``, deferred while a known loss is to come.

    Args:
        work: what deferred logits want to be done, given hidden states, weight and bias. It runs inside of one call of the
            module, where ZeRO-3 has gathered the weight.
    """
    if work is not None:
        return work(hidden, self.weight, self.bias)
    call = current_task_head()
    if call is not None and call.defers(hidden) and not is_watched(self):
        return DeferredLogits.of(self, hidden, call.returns_whole_logits)
    return type(self).forward(self, hidden)
