"""Cross entropy of a projection, tile by tile: the logits [N, V] of all tokens never exist.

Each tile's gradient is taken while its logits are there, so that nothing is projected twice: the backward pass only
scales what the forward pass has found. Gradients of weights are summed in fp32 (fp64 for fp64), tile by tile.
"""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F

CHUNK_BYTES = 32 << 20
"""Of one tile's logits in fp32, on a CPU; a few such buffers live at a time."""

DEVICE_FACTOR = 8
"""How much larger tiles are elsewhere: a GPU wants some hundred rows even of a large vocabulary. Not measured."""

FP16_BOOST = 1024.0
"""The gradient that a tile starts from in fp16, taken back by the backward pass: below 6e-8 fp16 knows only zero, and the
user's loss scale comes too late for a gradient that is computed in the forward pass."""


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    finish: Callable[[torch.Tensor], torch.Tensor],
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The sum of ``F.cross_entropy(finish(F.linear(hidden, weight, bias)), targets)`` over tokens.

    Args:
        hidden: [N, H].
        weight: [V, H].
        bias: [V] or None.
        targets: [N], of which ``ignore_index`` does not count.
        finish: what the model does to logits [n, V] of some tokens, token by token, without parameters.
        label_smoothing: as in ``F.cross_entropy``.

    Returns:
        Scalar, fp32 or fp64.
    """
    learns = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, finish, (ignore_index, label_smoothing), learns)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, finish, rules, learns):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        precise = torch.promote_types(dtype, torch.float32)
        wanted = [learns and needs for needs in ctx.needs_input_grad[:3]]
        given = (hidden, weight, bias)
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_weight, of_bias = (
            torch.zeros_like(x, dtype=precise) if wants else None for x, wants in zip(given[1:], wanted[1:])
        )
        ctx.boost = FP16_BOOST if dtype == torch.float16 else 1.0
        total = torch.zeros((), dtype=precise, device=hidden.device)
        chunk_bytes = CHUNK_BYTES * (1 if device == "cpu" else DEVICE_FACTOR)
        rows = max(1, chunk_bytes // (weight.size(0) * precise.itemsize))
        with torch.autocast(device, enabled=False):
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start in range(0, hidden.size(0), rows):
                tile = slice(start, start + rows)
                x = hidden[tile].to(dtype)
                loss, slope = _tile(F.linear(x, weight, bias), targets[tile], finish, rules, ctx.boost, any(wanted))
                total += loss
                if of_hidden is not None:
                    of_hidden[tile] = slope @ weight
                if of_weight is not None:
                    _add_product(of_weight, slope.t(), x)
                if of_bias is not None:
                    of_bias += slope.sum(0, dtype=precise)
        ctx.dtypes = [None if x is None else x.dtype for x in given]
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return total

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # once_differentiable would say so only where grad itself has a graph
            raise RuntimeError(
                "create_graph=True asks for gradients of the gradient, which a loss in tiles does not have: they would silently "
                'be missing. Set "tiled_loss": false.'
            )
        scale = grad / ctx.boost
        gradients = (
            None if found is None else (found * scale).to(dtype) for found, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        )
        return (*gradients, None, None, None, None)


def _tile(logits, targets, finish, rules, boost, learns):
    """(loss of a tile, its gradient with respect to ``logits`` times boost)."""
    ignore_index, smoothing = rules
    with torch.set_grad_enabled(learns):
        logits = logits.detach().requires_grad_(learns)
        finished = finish(logits)
        finished = finished.to(torch.promote_types(finished.dtype, torch.float32))
        loss = F.cross_entropy(finished, targets, ignore_index=ignore_index, reduction="sum", label_smoothing=smoothing)
    if not learns:
        return loss, None
    return loss.detach(), torch.autograd.grad(loss, logits, torch.full_like(loss, boost))[0]


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b`` without rounding the product to the inputs' dtype first."""
    if total.dtype != a.dtype and total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
