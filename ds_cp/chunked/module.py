"""A module that acts token by token, run on tiles of tokens: what it keeps for the backward pass is its input.

The backward pass runs each tile again, so that a few rows of intermediate activations exist at a time instead of all.
Gradients of weights are summed in fp32 (fp64 for fp64) over the tiles and handed over once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Callable, Iterator, Sequence

import torch
from torch.autograd.function import once_differentiable

from ds_cp.chunked.weight_versions import WeightVersions


def run_in_chunks(module: torch.nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rows: int):
    """``run(x)``, a tile of rows at a time.

    Args:
        module: whose parameters ``run`` uses.
        run: [n, H] to [n, H'], each row by itself and without random numbers.
        x: [..., H].
        rows: of a tile.

    Returns:
        [..., H'].

    Raises:
        RuntimeError: in the backward pass, if the module's weights are no longer those of the forward pass.
    """
    parameters = [each for each in module.parameters() if each.requires_grad]
    flat = x.reshape(-1, x.size(-1))
    out = _ChunkedModule.apply(flat, module, run, rows, autocast_of(x.device.type), *parameters)
    return out.view(*x.shape[:-1], out.size(-1))


def autocast_of(device: str) -> Callable[[], AbstractContextManager]:
    """The autocast that holds now, for later: the backward pass runs outside of it."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype, enabled, cache_enabled=False)


class Gradients:
    """What the tiles' gradients of a module's parameters add up to, in fp32 at least."""

    def __init__(self, parameters: Sequence[torch.Tensor]):
        self._parameters = parameters
        self._sums: list[torch.Tensor | None] = [None] * len(parameters)

    def add(
        self, outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], *leaves: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """Walk a tile's graph back. Returns the gradients of ``leaves``; None for one that asks for none."""
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        of_outputs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        if not of_outputs:
            return [None] * len(leaves)
        outputs, grads = zip(*of_outputs)
        found = iter(torch.autograd.grad(outputs, [*asked, *self._parameters], grads, allow_unused=True))
        of_leaves = [next(found) if leaf.requires_grad else None for leaf in leaves]
        for index, part in enumerate(found):
            if part is None:
                continue
            if self._sums[index] is None:
                # a copy: parameters that are added to each other have one gradient, in one memory
                self._sums[index] = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
            else:
                self._sums[index].add_(part)
        return of_leaves

    def total(self) -> Iterator[torch.Tensor | None]:
        """One per parameter, in its dtype; None for one that no tile has used."""
        for parameter, of_all in zip(self._parameters, self._sums):
            yield None if of_all is None else of_all.to(parameter.dtype)


class _ChunkedModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module, run, rows, autocast, *parameters):
        ctx.module, ctx.weight_versions = module, WeightVersions(module)
        ctx.run, ctx.rows, ctx.autocast, ctx.parameters = run, rows, autocast, parameters
        ctx.save_for_backward(x)
        return torch.cat([run(tile) for tile in x.split(rows)])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.weight_versions.check(ctx.module, "its gradients")
        (x,) = ctx.saved_tensors
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        gradients = Gradients(ctx.parameters)
        for start in range(0, x.size(0), ctx.rows):
            tile = slice(start, start + ctx.rows)
            leaf = x[tile].detach().requires_grad_(of_x is not None)
            with torch.enable_grad(), ctx.autocast():
                out = ctx.run(leaf)
            (of_tile,) = gradients.add([out], [grad[tile]], leaf)
            if of_x is not None:
                of_x[tile] = of_tile
        return (of_x, None, None, None, None, *gradients.total())
