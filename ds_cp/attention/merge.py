"""Merging partial attention over disjoint sets of keys, and attention sinks."""

from __future__ import annotations

import warnings
from typing import Callable

import torch


def merge_partial_attention(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges the attention over further keys into ``out`` and ``lse``, in place.

    With ``out_i = softmax(s_i) v_i`` and ``lse_i = log sum exp s_i`` over disjoint key sets, the attention over their
    union has ``lse = log(e^lse_1 + e^lse_2)`` and ``out = sum_i e^(lse_i - lse) out_i`` (online softmax, Milakov and
    Gimelshein 2018); the weight of the second is ``sigmoid(lse_2 - lse_1)``. A query that sees no key has lse = -inf and
    out = 0, and so has the merge of two such results.

    On CUDA it is one fused kernel. On CPUs the separate operations are twice as fast as what torch compiles from them.

    Args:
        out: [B, H, n, dv] in the accumulation dtype.
        lse: [B, H, n], natural log.
        part, part_lse: Results over the further keys, in the same shapes; ``part`` may have a lower precision.
    """
    (merge_fused if out.is_cuda else merge_eager)(out, lse, part, part_lse)


def merge_eager(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """The formula of :func:`merge_partial_attention`."""
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)  # with no key on either side -inf - -inf would be NaN
    weight = torch.sigmoid(part_lse - finite)
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


class Compiled:
    """A function of tensors, compiled by torch at its first call; the function itself where compilation fails.

    Sizes are dynamic, so one compiled kernel serves all lengths. A batch of one and larger batches, other dtypes and other
    memory formats need a kernel each; beyond torch's limit of 8 kernels the function runs uncompiled.
    """

    def __init__(self, function: Callable[..., None]):
        self._plain = function
        self._run: Callable[..., None] | None = None

    def __call__(self, *tensors: torch.Tensor) -> None:
        if self._run is None:
            self._run = torch.compile(self._plain, dynamic=True)
        try:
            self._run(*tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler may raise anything, but it has not written to the tensors yet
            if self._run is self._plain:
                raise
            warnings.warn(f"{self._plain.__name__} runs uncompiled, torch.compile failed: {error}", stacklevel=2)
            self._run = self._plain
            self._plain(*tensors)


merge_fused = Compiled(merge_eager)


def merge_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Adds attention sinks to the softmax, in place: a sink has a score and no value.

    Args:
        out: [B, H, n, dv], attention over all keys.
        lse: [B, H, n].
        sinks: Scores per head [H], or per query [B, H, n].
    """
    total = torch.logaddexp(lse, _per_query(sinks, lse))
    out.mul_(torch.exp(lse - total).unsqueeze(-1))
    lse.copy_(total)


def sink_gradient(grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """This rank's gradient of the sinks' scores, [H] or [B, H, n].

    A sink's value is 0, so of the softmax's gradient ``p (grad_out v - delta)`` only ``-p delta`` remains, with
    ``delta = sum(grad_out * out)`` per query, as in FlashAttention.
    """
    probability = torch.exp(_per_query(sinks, lse) - lse)
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    gradient = -(probability * delta)
    return (gradient.sum((0, 2)) if sinks.dim() == 1 else gradient).to(sinks.dtype)


def _per_query(sinks: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return (sinks.view(1, -1, 1) if sinks.dim() == 1 else sinks).to(lse.dtype)
