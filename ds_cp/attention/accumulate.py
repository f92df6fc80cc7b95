"""What the calls of a kernel add up to. Whoever touches rows first writes them: no zeros to fill, to read and to add.

Which call is first is known from the schedule, so it is worked out once per batch.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np
import torch

from ds_cp.attention.kernels import Kernel, Work, work
from ds_cp.mask.schedule import Step, count


class RowSlice(NamedTuple):
    """The rows of [B, heads, n, ...] that a call of a kernel uses.

    Attributes:
        index: three slices.
        everything: whether these are all rows there are.
        first: whether no call before touched any of them.
    """

    index: tuple[slice, slice, slice]
    everything: bool
    first: bool

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """These rows of x."""
        return x if self.everything else x[self.index]


class Coverage(NamedTuple):
    """How the calls of a kernel cover all rows.

    Attributes:
        gaps: some rows must be filled beforehand: no call touches them, or the first that does also touches rows that were
            written before, and so adds.
        single_call: one call covers everything, and it is the only one.
    """

    gaps: bool
    single_call: bool


class KernelCall(NamedTuple):
    """One call of a kernel, the queries and the keys that it uses."""

    work: Work
    q: RowSlice
    k: RowSlice


class KernelCalls(NamedTuple):
    """The calls of a rank's schedule, step by step, and what they cover: queries in all steps, keys in each."""

    calls: list[list[KernelCall]]
    queries: Coverage
    keys: list[Coverage]


def kernel_calls(steps: Sequence[Step], kernel: Kernel, device: torch.device, batch: int) -> KernelCalls:
    """The calls that a schedule needs, made once and kept with it."""
    key = "calls", kernel, device, batch
    if key not in steps[0].derived:
        queries = _Touched(batch, count(steps[0].rows))
        all_keys = [_Touched(batch, count(step.rows)) for step in steps]
        calls = [
            [
                KernelCall(
                    call,
                    queries.touch(call.batch_start, call.batch_stop, call.q_start, call.q_stop),
                    keys.touch(call.batch_start, call.batch_stop, call.k_start, call.k_stop),
                )
                for call in work(step, kernel, device)
            ]
            for step, keys in zip(steps, all_keys)
        ]
        covered = [keys.coverage() for keys in all_keys]
        if any(step.target_rows for step in steps[1:]):
            covered[0] = covered[0]._replace(single_call=False)  # gradients will come home
        steps[0].derived[key] = KernelCalls(calls, queries.coverage(), covered)
    return steps[0].derived[key]


class _Touched:
    """Which rows some call has used so far."""

    def __init__(self, batch: int, rows: int):
        self._rows, self._calls, self._mixed = np.zeros((batch, rows), dtype=bool), 0, False

    def touch(self, batch_start: int, batch_stop: int, start: int, stop: int) -> RowSlice:
        part = self._rows[batch_start:batch_stop, start:stop]
        first = not part.any()
        self._mixed |= not first and not part.all()
        self._calls += 1
        part[:] = True
        index = slice(batch_start, batch_stop), slice(None), slice(start, stop)
        return RowSlice(index, part.shape == self._rows.shape, first)

    def coverage(self) -> Coverage:
        gaps = self._mixed or not self._rows.all()
        return Coverage(gaps, self._calls == 1 and not gaps)


class Accumulator:
    """A total over calls, [B, heads, n, d] or [B, heads, n].

    Args:
        shape: of the total; [B, n, heads, d] underneath, so that the model's transpose back is free.
        like: says device and kind of tensor.
        dtype: of the total.
        gaps: whether rows that no call writes first must be filled.
        fill: with what.
        total: where to write, if not in a tensor of its own.
    """

    def __init__(
        self,
        shape: Sequence[int],
        like: torch.Tensor,
        dtype: torch.dtype,
        gaps: bool,
        fill: float = 0.0,
        total: torch.Tensor | None = None,
    ):
        self._shape, self._like, self._dtype, self._gaps, self._fill = shape, like, dtype, gaps, fill
        self._total, self._given = total, total is not None
        if total is not None and gaps:
            total.fill_(fill)

    @property
    def total(self) -> torch.Tensor:
        if self._total is None:
            batch, heads, n, *dim = self._shape
            memory = (batch, n, heads, *dim) if dim else (batch, heads, n)
            total = self._like.new_empty(memory, dtype=self._dtype)
            if self._gaps:
                total.fill_(self._fill)
            self._total = total.transpose(1, 2) if dim else total
        return self._total

    def put(self, rows: RowSlice, part: torch.Tensor) -> None:
        """What comes first; a part that covers everything becomes the total itself."""
        if rows.everything and not self._given and _fills_its_storage(part):
            self._total = part.to(self._dtype)
        else:
            rows.view(self.total).copy_(part)

    def add(self, rows: RowSlice, part: torch.Tensor) -> None:
        if rows.first:
            self.put(rows, part)
        else:
            rows.view(self.total).add_(part)


def _fills_its_storage(x: torch.Tensor) -> bool:
    """Whether keeping it keeps no more memory than its elements: a kernel may have padded it."""
    return x.untyped_storage().nbytes() == x.numel() * x.element_size()
