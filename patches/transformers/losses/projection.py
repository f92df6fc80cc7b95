"""The projection to the vocabulary (``lm_head``) returns deferred logits while a task head with a known loss runs.

Step 2 of the list in :mod:`~ds_cp.patches.transformers.losses`: :class:`.DeferredLogits` records the hidden states, and the loss
later calls the projection once, with what it computes from them.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any, Callable

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from ds_cp.patches.transformers.ambient import current_task_head
from ds_cp.patches.transformers.losses.deferred_logits import Compute, DeferredLogits


def attach(head: nn.Module) -> Callable[[], None]:
    """Bind a forward that defers to a model's output projections; returns what undoes it.

    Only a plain ``nn.Linear`` is bound, possibly inside PEFT's ``modules_to_save``. Other modules, such as a LoRA layer, may
    compute more than weight and bias, so their logits are computed at once.
    """
    bound = [module for module in _projections(head) if _is_plain_linear(module)]
    for module in bound:
        module.forward = MethodType(_forward, module)

    def undo() -> None:
        for module in bound:
            module.__dict__.pop("forward", None)

    return undo


def _projections(head: Any) -> list[Any]:
    projection = head.get_output_embeddings() if hasattr(head, "get_output_embeddings") else None
    copies = getattr(projection, "modules_to_save", None)
    return list(copies.values()) if isinstance(copies, nn.ModuleDict) else [projection]


def _is_plain_linear(module: Any) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def has_other_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks other than DeepSpeed's. They expect one call per forward, with logits as its output."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return _has_any_global_hook() or any(not _is_deepspeeds(hook) for each in hooks for hook in each.values())


def _is_deepspeeds(hook: Callable[..., Any]) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").startswith("deepspeed.")


@torch.compiler.disable
def _forward(self: nn.Linear, hidden: torch.Tensor, compute: Compute | None = None) -> torch.Tensor | DeferredLogits:
    """``nn.Linear.forward``, deferred for a known loss.

    Args:
        compute: From deferred logits: what to compute from hidden states, weight and bias. It runs inside a call of the module,
            for which ZeRO-3 has gathered the weight.
    """
    if compute is not None:
        return compute(hidden, self.weight, self.bias)
    call = current_task_head()
    if call is not None and call.defers(hidden) and not has_other_hooks(self):
        return DeferredLogits.of(self, hidden, call.returns_whole_logits)
    return type(self).forward(self, hidden)
