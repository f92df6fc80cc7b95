"""Exchanges: they bring K and V rows to the ranks that need them, and return the gradients to the rows' owners.

The schedule lists, step by step, which rows each rank receives from which owner. :class:`PeerExchange` receives them by
point-to-point messages, straight from the owner: as a ring, the rows of the next step are in flight while a step is
computed; as an all-gather, the rows of all steps are in flight from the start. Gradients return in one hop.

In a message a row is one token: K and V of all its heads, side by side.
"""

from __future__ import annotations

from collections import deque
from typing import Iterator, Protocol, Sequence

import torch

from ds_cp.layout import Run, total_length
from ds_cp.mask.schedule import Step
from ds_cp.process_group import Group, Pending

KVPair = tuple[torch.Tensor, torch.Tensor]
"""K and V, or their gradients: [B, h, n, d] and [B, h, n, dv]."""


class Exchange(Protocol):
    """One pass, forward or backward, over the steps of a rank's schedule.

    Attributes:
        steps: This rank's schedule. Step 0 uses the rank's own rows.
    """

    steps: Sequence[Step]

    def received(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
        """Yields (step, K rows, V rows) for each step, once the rows are received; step 0 yields ``key`` and ``value``."""

    def return_gradients(self, step: Step, grad_rows: torch.Tensor, own_gradients: KVPair) -> None:
        """Starts to send a step's dK and dV to the owner of the rows, and adds those received so far to this rank's own.

        Args:
            step: Any but step 0.
            grad_rows: [n, B, h, d + dv], one per received row.
            own_gradients: dK and dV of this rank's own rows, added to in place.
        """

    def finish(self, own_gradients: KVPair) -> torch.Tensor | None:
        """Adds the gradients that are still in flight. Returns the gradient of compressed KV; None without any."""


class RotatingBuffers:
    """Buffers that the steps of one pass use in turn, so that a pass allocates a few buffers instead of one per step.

    A buffer is reused ``buffers`` steps later. On CUDA, its next write must be ordered after its last read in the current
    stream. :meth:`~ds_cp.process_group.Group.isend_irecv` is: it starts after the work that is queued at that time. The buffers are
    freed with the pass, so the rest of a layer can use their memory, and an exception leaves no buffer in use.
    """

    def __init__(self, buffers: int):
        self._buffers: deque[torch.Tensor | None] = deque([None] * buffers)

    def take(self, like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized memory of this shape, on the device of ``like``; a buffer grows when it is too short."""
        buffer = self._buffers.popleft()
        if buffer is None or len(buffer) < shape[0] or buffer.shape[1:] != tuple(shape[1:]):
            buffer = like.new_empty(shape, dtype=dtype)
        self._buffers.append(buffer)
        return buffer[: shape[0]]


class PeerExchange:
    """Point-to-point messages between the ranks of a ring group.

    Args:
        group: The ring group.
        steps: This rank's schedule.
        prefetch_steps: Number of later steps whose rows may be in flight: 1 for ``ring``, all of them for ``allgather``.
        phase: "forward" or "backward", for counters and error messages.
    """

    def __init__(self, group: Group, steps: Sequence[Step], prefetch_steps: int, phase: str):
        self.group, self.steps, self.prefetch_steps, self.phase = group, steps, prefetch_steps, phase
        self._kv_buffers = RotatingBuffers(prefetch_steps + 1)  # one is read while `prefetch_steps` are filled
        self._gradient_buffers = RotatingBuffers(1)
        self._gradients_in_flight: tuple[Pending, torch.Tensor, tuple[Run, ...]] | None = None

    def received(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
        sends = any(step.target_rows for step in self.steps[1:])
        row_shape = key.size(0), key.size(1), key.size(-1) + value.size(-1)
        rows = pack_rows(key, value) if sends else key.new_empty((0, *row_shape))
        in_flight = deque(self._start(step, rows) for step in self.steps[1 : 1 + self.prefetch_steps])
        yield self.steps[0], key, value
        for t in range(1, len(self.steps)):
            pending, buffer = in_flight.popleft()
            pending.wait()
            if t + self.prefetch_steps < len(self.steps):
                in_flight.append(self._start(self.steps[t + self.prefetch_steps], rows))
            yield self.steps[t], *unpack_rows(buffer, key.size(-1))

    def return_gradients(self, step: Step, grad_rows: torch.Tensor, own_gradients: KVPair) -> None:
        self._add_received_gradients(own_gradients)
        buffer = self._gradient_buffers.take(
            grad_rows, (total_length(step.target_rows), *grad_rows.shape[1:]), grad_rows.dtype
        )
        sends = [(step.source, grad_rows)] if len(grad_rows) else []
        receives = [(step.target, buffer)] if len(buffer) else []
        pending = self.group.isend_irecv(sends, receives, f"{self.phase} gradients from rank {step.target} of the ring")
        self._gradients_in_flight = (pending, buffer, step.target_rows)

    def finish(self, own_gradients: KVPair) -> None:
        self._add_received_gradients(own_gradients)

    def _start(self, step: Step, rows: torch.Tensor) -> tuple[Pending, torch.Tensor]:
        """Starts to receive a step's rows, and to send those of ``rows`` that another rank uses in the same step."""
        buffer = self._kv_buffers.take(rows, (total_length(step.rows), *rows.shape[1:]), rows.dtype)
        sends = [(step.target, select_runs(rows, step.target_rows))] if step.target_rows else []
        receives = [(step.source, buffer)] if step.rows else []
        pending = self.group.isend_irecv(sends, receives, f"{self.phase} rows from rank {step.source} of the ring")
        return pending, buffer

    def _add_received_gradients(self, own_gradients: KVPair) -> None:
        if self._gradients_in_flight:
            pending, buffer, target_rows = self._gradients_in_flight
            pending.wait()
            for (start, stop), part in zip(target_rows, buffer.split([b - a for a, b in target_rows])):
                for total, received in zip(own_gradients, unpack_rows(part, own_gradients[0].size(-1))):
                    total[:, :, start:stop] += received
            self._gradients_in_flight = None


def pack_rows(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """K [B, h, n, d] and V [B, h, n, dv] as rows [n, B, h, d + dv], of which any run is contiguous and sent without a copy."""
    return torch.cat((key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)), dim=-1)


def unpack_rows(rows: torch.Tensor, key_dim: int) -> KVPair:
    """K [B, h, n, d] and V [B, h, n, dv] as views of rows [n, B, h, d + dv]."""
    per_head = rows.permute(1, 2, 0, 3)
    return per_head[..., :key_dim], per_head[..., key_dim:]


def select_runs(rows: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
    """The rows of some runs along dim 0, contiguous; a view when there is one run."""
    if len(runs) == 1:
        return rows[runs[0][0] : runs[0][1]]
    return torch.cat([rows[start:stop] for start, stop in runs] or [rows[:0]])
