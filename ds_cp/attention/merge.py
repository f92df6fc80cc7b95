"""Merging partial attention over disjoint sets of keys."""

from __future__ import annotations

import warnings
from typing import Callable

import torch


def merge_partial_attention(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Fold the attention over more keys into ``out`` and ``lse``, in place.

    With ``out_i = softmax(s_i) v_i`` and ``lse_i = log sum exp s_i`` over disjoint key sets, the attention over their
    union has ``lse = log(e^lse_1 + e^lse_2)`` and ``out = sum_i e^(lse_i - lse) out_i`` (online softmax, Milakov and
    Gimelshein 2018); the weight of the second is ``sigmoid(lse_2 - lse_1)``. A row that has seen no key has lse = -inf and
    out = 0; two such rows merge into one.

    On CUDA it is one fused kernel. On CPUs the passes one by one are twice as fast as what torch compiles from them.

    Args:
        out: [B, H, L, d] in the accumulator's dtype.
        lse: [B, H, L], natural log.
        part, part_lse: the same shapes; part may have a lower precision.
    """
    (fused if out.is_cuda else merge_eager)(out, lse, part, part_lse)


def merge_eager(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """The formula of :func:`merge_partial_attention`."""
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)  # with no key on either side -inf - -inf would be NaN
    weight = torch.sigmoid(part_lse - finite)
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


class Compiled:
    """A function of tensors as torch compiles it, at the first call; the function itself where that fails.

    Sizes are dynamic, so lengths share a kernel; a batch of one and of many, other dtypes and other orders in memory have
    one each. Past torch's limit of kernels (8) further kinds run uncompiled.
    """

    def __init__(self, function: Callable[..., None]):
        self._plain, self._run = function, None

    def __call__(self, *tensors: torch.Tensor) -> None:
        if self._run is None:
            self._run = torch.compile(self._plain, dynamic=True)
        try:
            self._run(*tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers fail in any way, before they have written anything
            if self._run is self._plain:
                raise
            warnings.warn(f"{self._plain.__name__} runs uncompiled, torch.compile failed: {error}", stacklevel=2)
            self._run = self._plain
            self._plain(*tensors)


fused = Compiled(merge_eager)


def merge_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Let a score per head, or per query, without a value take part in the softmax, in place.

    Args:
        out: [B, H, L, d], over all keys.
        lse: [B, H, L].
        sinks: [H], or [B, H, L].
    """
    total = torch.logaddexp(lse, _per_query(sinks, lse))
    out.mul_(torch.exp(lse - total).unsqueeze(-1))
    lse.copy_(total)


def sink_gradient(grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient of the sinks, [H] or [B, H, L], from this rank's queries: a sink's value is 0, so only the normalisation
    feels it."""
    probability = torch.exp(_per_query(sinks, lse) - lse)
    felt = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    gradient = -(probability * felt)
    return (gradient.sum((0, 2)) if sinks.dim() == 1 else gradient).to(sinks.dtype)


def _per_query(sinks: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return (sinks.view(1, -1, 1) if sinks.dim() == 1 else sinks).to(lse.dtype)
