"""Offloads the input of each checkpointed layer to pinned host memory until the backward pass ("offload_activations").

Checkpoints save their inputs through autograd, reentrant ones and others, and set saved-tensor hooks of their own for what runs
inside. So saved-tensor hooks around a whole stack apply to exactly the tensors that outlive a layer.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ds_cp.agreement import BatchError

SMALL_BYTES = 1 << 20
"""Size below which a tensor stays on the device."""


def attach(stack: torch.nn.Module, without_checkpointing: bool = False) -> Callable[[], None]:
    """Hook a stack; returns what removes the hooks.

    Args:
        without_checkpointing: Whether its layers save no more than their inputs even if gradient checkpointing is off.
    """
    entered: list[torch.autograd.graph.saved_tensors_hooks] = []

    @torch.compiler.disable
    def enter(stack: Any, args: tuple[Any, ...]) -> None:
        while (
            entered
        ):  # left by an interrupted forward, after which torch runs no hook; a stack does not run inside itself
            entered.pop().__exit__(None, None, None)
        if not stack.training or not torch.is_grad_enabled():
            return
        if not (without_checkpointing or stack.is_gradient_checkpointing):
            raise BatchError(
                '"context_parallel.offload_activations" moves what gradient checkpointing keeps, but checkpointing is off: '
                "nothing would be moved. Switch it on (gradient_checkpointing_enable), or take the key out."
            )
        entered.append(torch.autograd.graph.saved_tensors_hooks(to_host, from_host))
        entered[-1].__enter__()

    @torch.compiler.disable
    def leave(stack: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    handles = [stack.register_forward_pre_hook(enter), stack.register_forward_hook(leave, always_call=True)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def to_host(tensor: torch.Tensor) -> Any:
    """Copy a tensor to pinned memory: (device, copy). Small tensors, parameters and tensors on a CPU are returned as they are."""
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.device.type == "cpu" or nbytes < SMALL_BYTES or isinstance(tensor, torch.nn.Parameter):
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return tensor.device, host.copy_(tensor, non_blocking=True)  # safe: the copy back runs on the same stream


def from_host(packed: Any) -> torch.Tensor:
    """The tensor that :func:`to_host` was called with, on its device."""
    if isinstance(packed, torch.Tensor):
        return packed
    device, host = packed
    tensor: torch.Tensor = host.to(device, non_blocking=True)
    return tensor
