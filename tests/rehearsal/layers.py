"""Which decoder layer runs, in the forward and in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from rehearsal.tape import Tape


def layers_of(model: torch.nn.Module) -> Any:
    """The longest list of modules, which is that of the layers."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=lambda layers: sum(1 for layer in layers for _ in layer.parameters()), default=())


def mark_layers(tape: Tape, layers: Any) -> None:
    """Tell the tape which layer runs: by hooks in the forward pass, and in the backward pass by the gradients of the
    layers' inputs, which are there when a layer's own backward is done."""
    for index, layer in enumerate(layers):

        def enter(module, args, kwargs, index=index):
            if tape.phase != "forward":
                return  # a recomputation, inside of the layer's backward pass
            tape.layer = index
            hidden = args[0] if args else kwargs.get("hidden_states")
            if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda grad: leave(index - 1))

        def leave(index: int) -> None:
            tape.layer = index if index >= 0 else None

        def exit(module, args, output):
            if tape.phase == "forward":
                tape.layer = None

        def of_output(module, args, output, index=index):
            first = output if isinstance(output, torch.Tensor) else output[0]
            if tape.phase == "forward" and index == len(layers) - 1 and first.requires_grad:
                first.register_hook(lambda grad: leave(index))

        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(exit, always_call=True)
        layer.register_forward_hook(of_output)
