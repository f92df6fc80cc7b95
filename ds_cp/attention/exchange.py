"""How rows of K and V reach the rank that needs them, and how their gradients come home.

One idea for every method: the schedule says, step by step, which rows travel between which two ranks. ``ring`` has the
next step's rows under way while a step is computed; ``allgather`` has all of them under way from the start. Rows travel
straight from their owner; gradients return in one hop.
"""

from __future__ import annotations

from collections import deque
from typing import Iterator, Protocol, Sequence

import torch

from ds_cp.layout import Run
from ds_cp.mask.schedule import Step, count
from ds_cp.process_group import Group, Pending

Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V, or their gradients: [B, h, n, d] and [B, h, n, dv]."""


class Exchange(Protocol):
    """What the four steps need from a transport.

    Attributes:
        steps: this rank's schedule.
    """

    steps: Sequence[Step]

    def received(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
        """Yield (step, K, V of the rows that arrived) for each step; this rank's own come first, as given."""

    def return_gradients(self, step: Step, grad_rows: torch.Tensor, own_gradients: Pair) -> None:
        """Start the journey of a step's gradient, rows [n, B, h, d + dv]; add what arrives for this rank's rows to
        ``own_gradients``."""

    def finish(self, own_gradients: Pair) -> torch.Tensor | None:
        """Wait until every gradient is home. Returns that of keys that every rank holds whole, if there are any."""


class RotatingBuffers:
    """Memory that the rows of a pass's steps use in turn, so that a pass allocates as often as steps are in use at a time.

    A step's memory is lent again ``turns`` steps later. On CUDA whoever writes to it then must stand behind its last
    reader in the current stream's order, as every :meth:`Group.isend_irecv` does, which starts behind what is queued. It goes with
    the pass: nothing lives on that the rest of a layer could use better, and an exception leaves nothing that could be lent
    twice.
    """

    def __init__(self, turns: int):
        self._turns: deque[torch.Tensor | None] = deque([None] * turns)

    def rows(self, like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised rows of a shape."""
        memory = self._turns.popleft()
        if memory is None or len(memory) < shape[0] or memory.shape[1:] != tuple(shape[1:]):
            memory = like.new_empty(shape, dtype=dtype)
        self._turns.append(memory)
        return memory[: shape[0]]


class PeerExchange:
    """Rows by point-to-point messages inside a group.

    Args:
        group: the ring axis.
        steps: this rank's schedule.
        ahead: how many steps' rows may be under way: 1 for the ring, all of them for all-gather.
        phase: "forward" or "backward", for counters and messages.
    """

    def __init__(self, group: Group, steps: Sequence[Step], ahead: int, phase: str):
        self.group, self.steps, self.ahead, self.phase = group, steps, ahead, phase
        self._arriving, self._home = (
            RotatingBuffers(ahead + 1),
            RotatingBuffers(1),
        )  # a step's rows are used while others are under way
        self._returning: tuple[Pending, torch.Tensor, tuple[Run, ...]] | None = None

    def received(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
        sends = any(step.target_rows for step in self.steps[1:])
        like_a_row = (key.size(0), key.size(1), key.size(-1) + value.size(-1))
        rows = as_rows(key, value) if sends else key.new_empty((0, *like_a_row))
        under_way = [self._start(step, rows) for step in self.steps[1 : 1 + self.ahead]]
        yield self.steps[0], key, value
        for t in range(1, len(self.steps)):
            arriving, buffer = under_way.pop(0)
            arriving.wait()
            if t + self.ahead < len(self.steps):
                under_way.append(self._start(self.steps[t + self.ahead], rows))
            yield self.steps[t], *as_heads(buffer, key.size(-1))

    def return_gradients(self, step: Step, grad_rows: torch.Tensor, own_gradients: Pair) -> None:
        self._add_what_came(own_gradients)
        buffer = self._home.rows(grad_rows, (count(step.target_rows), *grad_rows.shape[1:]), grad_rows.dtype)
        sends = [(step.source, grad_rows)] if len(grad_rows) else []
        receives = [(step.target, buffer)] if len(buffer) else []
        pending = self.group.isend_irecv(sends, receives, f"{self.phase} gradients from rank {step.target} of the ring")
        self._returning = (pending, buffer, step.target_rows)

    def finish(self, own_gradients: Pair) -> None:
        self._add_what_came(own_gradients)

    def _add_what_came(self, own_gradients: Pair) -> None:
        if self._returning:
            pending, buffer, target_rows = self._returning
            pending.wait()
            for (start, stop), part in zip(target_rows, buffer.split([b - a for a, b in target_rows])):
                for total, more in zip(own_gradients, as_heads(part, own_gradients[0].size(-1))):
                    total[:, :, start:stop] += more
            self._returning = None

    def _start(self, step: Step, rows: torch.Tensor) -> tuple[Pending, torch.Tensor]:
        buffer = self._arriving.rows(rows, (count(step.rows), *rows.shape[1:]), rows.dtype)
        sends = [(step.target, select(rows, step.target_rows))] if step.target_rows else []
        receives = [(step.source, buffer)] if step.rows else []
        pending = self.group.isend_irecv(sends, receives, f"{self.phase} rows from rank {step.source} of the ring")
        return pending, buffer


def as_rows(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[B, h, n, d] and [B, h, n, dv] as one [n, B, h, d + dv]: any run of rows is contiguous and travels as it is."""
    return torch.cat((key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)), dim=-1)


def as_heads(rows: torch.Tensor, key_dim: int) -> Pair:
    """The views [B, h, n, d] and [B, h, n, dv] of rows [n, B, h, d + dv]."""
    heads = rows.permute(1, 2, 0, 3)
    return heads[..., :key_dim], heads[..., key_dim:]


def select(rows: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
    """Some rows of dim 0, contiguous; a view when they are one run."""
    if len(runs) == 1:
        return rows[runs[0][0] : runs[0][1]]
    return torch.cat([rows[start:stop] for start, stop in runs] or [rows[:0]])
