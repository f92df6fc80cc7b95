"""Merging partial attention over disjoint sets of keys, and attention sinks."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Callable

import torch


def merge_partial_attention(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges the attention over further keys into ``out`` and ``lse``, in place.

    With ``out_i = softmax(s_i) v_i`` and ``lse_i = log sum exp s_i`` over disjoint key sets, the attention over their
    union has ``lse = log(e^lse_1 + e^lse_2)`` and ``out = sum_i e^(lse_i - lse) out_i`` (online softmax, Milakov and
    Gimelshein 2018); the weight of the second is ``sigmoid(lse_2 - lse_1)``. A query that sees no key has lse = -inf and
    out = 0, and so has the merge of two such results.

    On CUDA it is one kernel. On CPUs the separate operations are twice as fast as what torch compiles from them.

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


class Fused:
    """The merge on CUDA: one kernel in Triton, :mod:`ds_cp.attention.merge_triton`.

    Tensors that the kernel does not support (fp64) are merged by the compiled :func:`merge_eager`, and so are all tensors
    where Triton is not installed or a launch has failed.
    """

    def __init__(self) -> None:
        self._compiled = Compiled(merge_eager)
        self._tried_import = False
        self._triton: ModuleType | None = None

    def __call__(self, out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
        if out.is_cuda and not self._tried_import:
            self._tried_import, self._triton = True, _import_merge_triton()
        if out.is_cuda and self._triton and self._triton.supports(out, lse, part, part_lse):
            try:
                self._triton.merge(out, lse, part, part_lse)
                return
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # while compiling or launching: nothing has been written to the tensors yet
                warnings.warn(f"the merge is compiled by torch, its Triton kernel failed: {error}", stacklevel=2)
                self._triton = None
        self._compiled(out, lse, part, part_lse)


def _import_merge_triton() -> ModuleType | None:
    """The module, or None without Triton; imported at the first merge on CUDA."""
    try:
        from ds_cp.attention import merge_triton
    except ImportError:
        return None
    return merge_triton


merge_fused = Fused()


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
