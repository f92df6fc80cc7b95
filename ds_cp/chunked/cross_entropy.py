"""Cross entropy of a linear projection, computed in chunks of tokens, so that the logits [N, V] of all tokens never exist.

The gradient of a chunk is computed in the forward pass, while its logits exist, so that nothing is projected twice. The
backward pass only scales the gradients. Those of weight and bias are summed over chunks in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F

CHUNK_BYTES = 32 << 20
"""Size of the logits of one chunk in fp32 on a CPU. A few buffers of this size exist at a time."""

DEVICE_FACTOR = 8
"""How many times larger chunks are on a GPU, which needs some hundred tokens even for a large vocabulary. Not measured."""

FP16_SCALE = 1024.0
"""Scale of the loss in fp16, which the backward pass undoes. fp16 has no numbers below 6e-8 except zero, and the loss scale of
the user comes too late for gradients that are computed in the forward pass."""


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    finish: Callable[[torch.Tensor], torch.Tensor],
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Sum of ``F.cross_entropy(finish(F.linear(hidden, weight, bias)), targets)`` over tokens.

    Args:
        hidden: [N, H].
        weight: [V, H].
        bias: [V] or None.
        targets: [N]; tokens whose target is ``ignore_index`` add nothing.
        finish: What the model applies to logits [n, V], each token independently of the others and without parameters.
        label_smoothing: As in ``F.cross_entropy``.

    Returns:
        Scalar, fp32 or fp64.
    """
    criterion = _Criterion(finish, ignore_index, label_smoothing)
    total: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch does not annotate apply
        hidden, weight, bias, targets, criterion, torch.is_grad_enabled()
    )
    return total


class _Criterion(NamedTuple):
    """The loss as a function of logits."""

    finish: Callable[[torch.Tensor], torch.Tensor]
    ignore_index: int
    label_smoothing: float

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        finished = self.finish(logits)
        finished = finished.to(torch.promote_types(finished.dtype, torch.float32))
        return F.cross_entropy(
            finished,
            targets,
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        criterion: _Criterion,
        grad_enabled: bool,
    ) -> torch.Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        sum_dtype = torch.promote_types(dtype, torch.float32)
        needs_grad = [grad_enabled and needs for needs in ctx.needs_input_grad[:3]]
        grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if needs_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=sum_dtype) if bias is not None and needs_grad[2] else None
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.scale = FP16_SCALE if dtype == torch.float16 else 1.0
        total = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        chunk_bytes = CHUNK_BYTES * (1 if device == "cpu" else DEVICE_FACTOR)
        chunk_tokens = max(1, chunk_bytes // (weight.size(0) * sum_dtype.itemsize))
        with torch.autocast(device, enabled=False):
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start in range(0, hidden.size(0), chunk_tokens):
                chunk = slice(start, start + chunk_tokens)
                x = hidden[chunk].to(dtype)
                logits = F.linear(x, weight, bias)
                if not any(needs_grad):
                    total += criterion(logits, targets[chunk])
                    continue
                loss, grad_logits = _loss_and_gradient(logits, targets[chunk], criterion, ctx.scale)
                total += loss
                if grad_hidden is not None:
                    grad_hidden[chunk] = grad_logits @ weight
                if grad_weight is not None:
                    _add_product(grad_weight, grad_logits.t(), x)
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0, dtype=sum_dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # once_differentiable raises only if grad itself has a graph
            raise RuntimeError(
                "create_graph=True asks for gradients of the gradient, which a loss in chunks does not have: they would silently "
                'be missing. Set "tiled_loss": false.'
            )
        factor = grad / ctx.scale
        gradients = (None if x is None else (x * factor).to(dtype) for x, dtype in zip(ctx.saved_tensors, ctx.dtypes))
        return (*gradients, None, None, None)


def _loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, criterion: _Criterion, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of a chunk, and ``scale`` times its gradient with respect to ``logits``."""
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        loss = criterion(logits, targets)
    return loss.detach(), torch.autograd.grad(loss, logits, torch.full_like(loss, scale))[0]


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b``, without rounding the product to the dtype of ``a`` and ``b`` first."""
    if total.dtype != a.dtype and total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
