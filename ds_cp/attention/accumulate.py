"""Which rows each kernel call reads and writes, and sums of the calls' results.

The first call that uses some rows writes its result, later calls add to it: most sums then need no zeros to start from.
Which call is the first follows from the schedule, so it is computed once per batch.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np
import torch

from ds_cp.attention.kernels import Kernel, Work, kernel_work
from ds_cp.layout import total_length
from ds_cp.mask.schedule import Step


class RowSlice(NamedTuple):
    """The rows of tensors [B, heads, n, ...] that a kernel call uses.

    Attributes:
        slices: Slices of the batch, of the heads (all of them) and of the rows.
        all_rows: Whether the slices cover the whole tensor.
        first: Whether no earlier call uses any of these rows.
    """

    slices: tuple[slice, slice, slice]
    all_rows: bool
    first: bool

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """These rows of ``x``."""
        return x if self.all_rows else x[self.slices]


class Coverage(NamedTuple):
    """How the kernel calls cover all rows of a tensor.

    Attributes:
        has_gaps: Whether the tensor must be filled first: no call uses some of its rows, or a call uses both rows that an
            earlier call has written and rows that none has, so that it can only add.
        single_call: Whether one call covers all rows and no other result is added to them.
    """

    has_gaps: bool
    single_call: bool


class KernelCall(NamedTuple):
    """One call of a kernel, and the rows of queries and of keys that it uses."""

    work: Work
    q: RowSlice
    k: RowSlice


class KernelCalls(NamedTuple):
    """The kernel calls of a schedule.

    Attributes:
        calls: The calls of each step.
        queries: How the calls of all steps together cover this rank's queries.
        keys: For each step, how its calls cover its keys.
    """

    calls: list[list[KernelCall]]
    queries: Coverage
    keys: list[Coverage]


def kernel_calls(steps: Sequence[Step], kernel: Kernel, device: torch.device, batch: int) -> KernelCalls:
    """The kernel calls of a schedule, computed once and cached in its first step."""
    cached = steps[0].derived
    cache_key = "calls", kernel, device, batch
    if cache_key not in cached:
        queries = _UsedRows(batch, total_length(steps[0].rows))
        calls, keys_of_steps = [], []
        for step in steps:
            keys = _UsedRows(batch, total_length(step.rows))
            calls.append([_kernel_call(work, queries, keys) for work in kernel_work(step, kernel, device)])
            keys_of_steps.append(keys.coverage())
        if any(step.target_rows for step in steps[1:]):  # other ranks return gradients of this rank's own keys
            keys_of_steps[0] = keys_of_steps[0]._replace(single_call=False)
        cached[cache_key] = KernelCalls(calls, queries.coverage(), keys_of_steps)
    found: KernelCalls = cached[cache_key]
    return found


def _kernel_call(work: Work, queries: _UsedRows, keys: _UsedRows) -> KernelCall:
    return KernelCall(
        work,
        queries.use(work.batch_start, work.batch_stop, work.q_start, work.q_stop),
        keys.use(work.batch_start, work.batch_stop, work.k_start, work.k_stop),
    )


class _UsedRows:
    """The rows [B, n] that the calls so far use."""

    def __init__(self, batch: int, rows: int):
        self._used = np.zeros((batch, rows), dtype=bool)
        self._calls, self._some_used_before = 0, False

    def use(self, batch_start: int, batch_stop: int, start: int, stop: int) -> RowSlice:
        """Marks the rows of the next call as used."""
        rows = self._used[batch_start:batch_stop, start:stop]
        first = not rows.any()
        self._some_used_before |= not first and not rows.all()
        self._calls += 1
        rows[:] = True
        slices = slice(batch_start, batch_stop), slice(None), slice(start, stop)
        return RowSlice(slices, rows.shape == self._used.shape, first)

    def coverage(self) -> Coverage:
        has_gaps = self._some_used_before or not bool(self._used.all())
        return Coverage(has_gaps, self._calls == 1 and not has_gaps)


class Accumulator:
    """The sum of the kernel calls' results, [B, heads, n, d] or [B, heads, n].

    Args:
        shape: Shape of the sum. Its memory is [B, n, heads, d], so that the model's transpose back is free.
        like: Tensor whose device and subclass the sum gets.
        dtype: Dtype of the sum.
        has_gaps: Whether the sum is filled first; see :class:`Coverage`.
        fill: Value that it is filled with.
        out: Tensor to sum up in; None to allocate one.
    """

    def __init__(
        self,
        shape: Sequence[int],
        like: torch.Tensor,
        dtype: torch.dtype,
        has_gaps: bool,
        fill: float = 0.0,
        out: torch.Tensor | None = None,
    ):
        self._shape, self._like, self._dtype, self._has_gaps, self._fill = shape, like, dtype, has_gaps, fill
        self._total, self._replaceable = out, out is None
        if out is not None and has_gaps:
            out.fill_(fill)

    @property
    def total(self) -> torch.Tensor:
        """The sum, allocated at first use: often a call's result becomes the sum instead."""
        if self._total is None:
            batch, heads, n, *dim = self._shape
            memory_shape = (batch, n, heads, *dim) if dim else (batch, heads, n)
            total = self._like.new_empty(memory_shape, dtype=self._dtype)
            if self._has_gaps:
                total.fill_(self._fill)
            self._total = total.transpose(1, 2) if dim else total
        return self._total

    def put(self, rows: RowSlice, result: torch.Tensor) -> None:
        """Writes the result of the first call that uses these rows. A result for all rows becomes the sum itself."""
        if rows.all_rows and self._replaceable and _owns_exact_storage(result):
            self._total = result.to(self._dtype)
        else:
            rows.view(self.total).copy_(result)

    def add(self, rows: RowSlice, result: torch.Tensor) -> None:
        """Adds the result of a call, or writes it if the call is the first."""
        if rows.first:
            self.put(rows, result)
        else:
            rows.view(self.total).add_(result)


def _owns_exact_storage(x: torch.Tensor) -> bool:
    """Whether the storage of ``x`` holds nothing else: a kernel may return a slice of a padded tensor."""
    return x.untyped_storage().nbytes() == x.numel() * x.element_size()
