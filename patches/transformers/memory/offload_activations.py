"""What checkpointing keeps of a stack, the input of each layer, waits in host memory for the backward pass.

Checkpoints save their inputs through autograd, reentrant ones and others alike, and set hooks of their own for what runs
inside. So hooks around the whole stack meet exactly what outlives a layer.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ds_cp.agreement import BatchError

SMALL = 1 << 20
"""Bytes up to which a tensor is not worth a copy."""


def attach(stack: torch.nn.Module, checkpoints: bool = False) -> Callable[[], None]:
    """Hook a stack; returns what undoes it.

    Args:
        checkpoints: whether its layers keep their inputs only, also without gradient checkpointing.
    """
    opened: list[torch.autograd.graph.saved_tensors_hooks] = []

    @torch.compiler.disable
    def before(stack: torch.nn.Module, args: tuple) -> None:
        while opened:  # left by an interrupt, after which torch runs no hook; a stack does not run inside itself
            opened.pop().__exit__(None, None, None)
        if not stack.training or not torch.is_grad_enabled():
            return
        if not (checkpoints or stack.is_gradient_checkpointing):
            raise BatchError(
                '"context_parallel.offload_activations" moves what gradient checkpointing keeps, but checkpointing is off: '
                "nothing would be moved. Switch it on (gradient_checkpointing_enable), or take the key out."
            )
        opened.append(torch.autograd.graph.saved_tensors_hooks(to_host, from_host))
        opened[-1].__enter__()

    @torch.compiler.disable
    def after(stack: torch.nn.Module, args: tuple, output: Any) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)

    handles = [stack.register_forward_pre_hook(before), stack.register_forward_hook(after, always_call=True)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def to_host(tensor: torch.Tensor) -> Any:
    """A saved tensor, on its way out: (device, its copy in pinned memory), or itself where nothing is won."""
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.device.type == "cpu" or nbytes < SMALL or isinstance(tensor, torch.nn.Parameter):
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return tensor.device, host.copy_(tensor, non_blocking=True)  # the same stream brings it back


def from_host(packed: Any) -> torch.Tensor:
    """The saved tensor again, on its device."""
    if isinstance(packed, torch.Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=True)
