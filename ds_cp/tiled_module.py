"""A module that acts token by token, run on tiles of tokens: what it keeps for the backward pass is its input.

The backward pass runs each tile again, so that a few rows of intermediate activations exist at a time instead of all.
Gradients of weights are summed in fp32 (fp64 for fp64) over the tiles and handed over once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Callable

import torch
from torch.autograd.function import once_differentiable


def run_in_tiles(module: torch.nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rows: int):
    """``run(x)``, a tile of rows at a time.

    Args:
        module: whose parameters ``run`` uses.
        run: [n, H] to [n, H'], each row by itself and without random numbers.
        x: [..., H].
        rows: of a tile.

    Returns:
        [..., H'].
    """
    parameters = [each for each in module.parameters() if each.requires_grad]
    flat = x.reshape(-1, x.size(-1))
    out = _Tiled.apply(flat, run, rows, _autocast(x.device.type), *parameters)
    return out.view(*x.shape[:-1], out.size(-1))


def _autocast(device: str) -> Callable[[], AbstractContextManager]:
    """The autocast that holds now, for later: the backward pass runs outside of it."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype, enabled, cache_enabled=False)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, run, rows, autocast, *parameters):
        ctx.run, ctx.rows, ctx.autocast, ctx.parameters = run, rows, autocast, parameters
        ctx.save_for_backward(x)
        return torch.cat([run(tile) for tile in x.split(rows)])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        totals: list[torch.Tensor | None] = [None] * len(ctx.parameters)
        for start in range(0, x.size(0), ctx.rows):
            tile = slice(start, start + ctx.rows)
            leaf = x[tile].detach().requires_grad_(of_x is not None)
            leaves = ([] if of_x is None else [leaf]) + list(ctx.parameters)
            with torch.enable_grad(), ctx.autocast():
                out = ctx.run(leaf)
            found = list(torch.autograd.grad(out, leaves, grad[tile], allow_unused=True))
            if of_x is not None:
                of_x[tile] = found.pop(0)
            for index, part in enumerate(found):
                if part is not None:
                    totals[index] = _add(totals[index], part)
        gradients = (None if t is None else t.to(p.dtype) for t, p in zip(totals, ctx.parameters, strict=True))
        return (of_x, None, None, None, *gradients)


def _add(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    if total is None:
        return part.to(torch.promote_types(part.dtype, torch.float32))
    return total.add_(part)
