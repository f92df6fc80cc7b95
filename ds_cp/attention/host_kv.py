"""K and V of a layer in host memory (``"offload_kv"``): attention of a chunk of queries over blocks of K and V rows.

:class:`HostExchange` is one more exchange. Its steps are blocks of rows, which come from host memory instead of another
rank; the next block is copied while a block is computed. Before attention runs, each rank receives the rows of other ranks,
block by block, into its host memory. Gradients are summed in host memory, and afterwards returned to their owners in the
same way. The device never holds more than a few blocks, however long the ring shard is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, zip_longest
from typing import Iterator, Mapping, NamedTuple, Sequence

import torch
from deepspeed.accelerator import get_accelerator

from ds_cp.attention.exchange import KVPair, pack_rows, unpack_rows
from ds_cp.attention.ulysses import HeadSharding, Tensors
from ds_cp.layout import Run, slice_runs, total_length
from ds_cp.mask.schedule import Step
from ds_cp.mask.tile import Tile, intersect
from ds_cp.process_group import Group


class HostRows:
    """Rows [n, ...] in host memory, pinned if the device is an accelerator.

    :meth:`fetch` copies on a stream of its own: after the work that is queued so far, in parallel to what is queued next.

    Args:
        shape: n, and the shape of a row.
        dtype: Dtype of the rows.
        device: Device that reads and writes them.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device):
        self._device, self._is_accelerator = device, device.type != "cpu"
        self._rows = torch.empty(shape, dtype=dtype, pin_memory=self._is_accelerator)

    def zero(self) -> HostRows:
        self._rows[:] = 0
        return self

    def write(self, start: int, rows: torch.Tensor) -> None:
        self._rows[start : start + len(rows)].copy_(rows, non_blocking=True)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows on the device. They must not be written to: on CPUs they are a view."""
        return self._rows[start:stop].to(self._device, non_blocking=True)

    def add(self, start: int, rows: torch.Tensor) -> None:
        self.write(start, self.read(start, start + len(rows)) + rows)

    def fetch(self, start: int, stop: int) -> PendingRows:
        """Starts to copy rows to the device."""
        if not self._is_accelerator:
            return PendingRows(self.read(start, stop), None)
        stream = _copy_stream(self._device)
        stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(stream):
            return PendingRows(self.read(start, stop), stream.record_event())


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device, because the allocator caches memory per stream."""
    stream: torch.cuda.Stream = get_accelerator().Stream(device=device)
    return stream


class PendingRows(NamedTuple):
    """Rows that are being copied to the device, and the event at the end of the copy; None on CPUs."""

    rows: torch.Tensor
    event: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        """The rows; the current stream waits for the copy."""
        if self.event is not None:
            stream = get_accelerator().current_stream()
            stream.wait_event(self.event)
            self.rows.record_stream(stream)
        return self.rows


class _HostMemory:
    """K and V rows of all steps of a schedule, one step after the other, and the sums of their gradients."""

    def __init__(self, n_rows: int, key: torch.Tensor, value: torch.Tensor):
        self.shape = (n_rows, *key.shape[:2], key.size(-1) + value.size(-1))
        self.kv = HostRows(self.shape, key.dtype, key.device)
        self.empty_key = key.new_empty((*key.shape[:2], 0, key.size(-1)))
        self.empty_value = value.new_empty((*value.shape[:2], 0, value.size(-1)))

    @cached_property
    def gradients(self) -> HostRows:
        sum_dtype = torch.promote_types(self.empty_key.dtype, torch.float32)
        return HostRows(self.shape, sum_dtype, self.empty_key.device).zero()


@dataclass(eq=False)
class HostKV:
    """All K and V that this rank's queries of one layer need, and the sums of their gradients, in host memory.

    The rows are those of the schedule's steps, one step after the other: the ring shard's own, then those of other ranks.

    Attributes:
        steps: The layer's schedule.
        ring_group: The ring group.
        heads: How the ulysses group shares heads. A rank stores the rows of its ring shard for its own heads.
        length: L, number of tokens of this rank.
        calls: The mesh's counter of attention passes by phase; :meth:`receive` counts one.
        block: Number of rows in a block.
    """

    steps: Sequence[Step]
    ring_group: Group
    heads: HeadSharding
    length: int
    calls: Counter[str]
    block: int
    _allocated: _HostMemory | None = None
    _starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._starts = [*accumulate((total_length(step.rows) for step in self.steps), initial=0)]

    @property
    def _memory(self) -> _HostMemory:
        assert self._allocated is not None, "no K and V are stored"
        return self._allocated

    def put(self, chunk: Run, key: torch.Tensor, value: torch.Tensor, phase: str) -> None:
        """Stores K and V of a chunk of this rank's tokens. All ranks of the ulysses group must call it.

        Args:
            chunk: Local indices of the tokens.
            key: [B, h, n, d].
            value: [B, h, n, dv].
            phase: "forward" or "backward", for counters and error messages.
        """
        key, value = self.heads.to_heads(phase, (), (key.detach(), value.detach()))
        if self._allocated is None:
            self._allocated = _HostMemory(self._starts[-1], key, value)
        for run, rows in zip(self._shard_runs(chunk), pack_rows(key, value).split(chunk[1] - chunk[0])):
            self._memory.kv.write(run[0], rows)

    def receive(self, phase: str) -> None:
        """Receives the rows of other ranks, once all chunks are stored."""
        self.calls[phase] += 1
        kv, empty_key = self._memory.kv, self._memory.empty_key
        for step, start in zip(self.steps[1:], self._starts[1:]):
            for to_send, to_receive in self._messages(step.target_rows, step.rows):
                received = empty_key.new_empty((total_length(to_receive), *self._memory.shape[1:]))
                sent = torch.cat([kv.read(*run) for run in to_send] or [received[:0]])
                self._exchange_rows(f"{phase} rows", (step.target, sent), (step.source, received))
                kv.write(start, received)
                start += len(received)

    def exchange(self, chunk: Run) -> HostExchange:
        """The exchange for the queries of a chunk. Its steps are computed once per batch."""
        queries, cached = tuple(self._shard_runs(chunk)), self.steps[0].derived
        cache_key = "blocks", self.block, queries
        if cache_key not in cached:
            cached[cache_key] = self._steps_for(queries)
        return HostExchange(self, *cached[cache_key])

    def fetch(self, step: Step, start: int) -> PendingRows:
        """Starts to copy the rows of a block to the device."""
        return self._memory.kv.fetch(start, start + total_length(step.rows))

    def empty_kv(self) -> KVPair:
        """K and V without rows, the inputs of a chunk's attention. They require grad, so that its backward pass runs."""
        return self._memory.empty_key.detach().requires_grad_(), self._memory.empty_value.detach().requires_grad_()

    def add_gradient(self, start: int, grad_rows: torch.Tensor) -> None:
        """Adds the gradient [n, B, h, d + dv] of some rows to the sums."""
        self._memory.gradients.add(start, grad_rows)

    def return_gradients(self) -> None:
        """Sends the gradients of other ranks' rows to them, and adds those that they return for this rank's rows."""
        gradients = self._memory.gradients
        for step, start in zip(self.steps[1:], self._starts[1:]):
            for to_send, to_receive in self._messages(step.rows, step.target_rows):
                sent = gradients.read(start, start + total_length(to_send)).contiguous()
                start += len(sent)
                received = sent.new_empty((total_length(to_receive), *self._memory.shape[1:]))
                self._exchange_rows("backward gradients", (step.source, sent), (step.target, received))
                for run, rows in zip(to_receive, received.split([stop - first for first, stop in to_receive])):
                    gradients.add(run[0], rows)

    def gradient(self, chunk: Run) -> KVPair:
        """dK [B, h, n, d] and dV [B, h, n, dv] of a chunk. All ranks of the ulysses group must call it."""
        empty_key = self._memory.empty_key
        rows = torch.cat([self._memory.gradients.read(*run) for run in self._shard_runs(chunk)]).to(empty_key.dtype)
        dk, dv = self.heads.to_tokens("backward", (), unpack_rows(rows, empty_key.size(-1)))
        return dk, dv

    def _shard_runs(self, chunk: Run) -> Iterator[Run]:
        """The rows of the ring shard that belong to a chunk: all ranks of the ulysses group compute it at the same time."""
        for start in range(0, total_length(self.steps[0].rows), self.length):
            yield start + chunk[0], start + chunk[1]

    def _messages(
        self, to_send: tuple[Run, ...], to_receive: tuple[Run, ...]
    ) -> Iterator[tuple[tuple[Run, ...], tuple[Run, ...]]]:
        """Both directions' rows, a block at a time. Sender and receiver split the rows of a message alike."""
        sends, receives = (
            [slice_runs(runs, i, i + self.block) for i in range(0, total_length(runs), self.block)]
            for runs in (to_send, to_receive)
        )
        yield from zip_longest(sends, receives, fillvalue=())

    def _exchange_rows(self, what: str, send: tuple[int, torch.Tensor], receive: tuple[int, torch.Tensor]) -> None:
        """Sends rows to one ring rank and receives rows from another one; without rows there is no message."""
        sends, receives = ([message] if len(message[1]) else [] for message in (send, receive))
        self.ring_group.isend_irecv(
            sends, receives, f"{what} in blocks, with ranks {send[0]} and {receive[0]} of the ring"
        ).wait()

    def _steps_for(self, queries: tuple[Run, ...]) -> tuple[Step, dict[Step, int]]:
        """The steps of a :class:`HostExchange` for some rows of the ring shard.

        Returns:
            A step with the queries and without keys; and for each block of rows that one of them sees a step, with the
            index of its first row.
        """
        own, blocks = self.steps[0], {}
        for step, start in zip(self.steps, self._starts):
            tiles: dict[int, list[Tile]] = {}
            for tile in step.tiles:
                for number in range(tile.k_start // self.block, -(-tile.k_stop // self.block)):
                    tiles.setdefault(number, []).extend(_tiles_of(tile, queries, self._block_rows(step, number)))
            for number in sorted(number for number, tiles_of_block in tiles.items() if tiles_of_block):
                keys = self._block_rows(step, number)
                rows = slice_runs(step.rows, *keys)
                blocks[Step(step.source, step.target, rows, (), tuple(tiles[number]))] = start + keys[0]
        return Step(own.source, own.target, queries, (), ()), blocks

    def _block_rows(self, step: Step, number: int) -> Run:
        return number * self.block, min(total_length(step.rows), (number + 1) * self.block)


def _tiles_of(tile: Tile, queries: Sequence[Run], keys: Run) -> Iterator[Tile]:
    """The parts of a tile in which runs of queries meet a run of keys; query indices count through the runs."""
    before = 0
    for run in queries:
        for part in intersect(tile, run, keys):
            yield part._replace(q_start=part.q_start + before, q_stop=part.q_stop + before)
        before += run[1] - run[0]


class HostExchange:
    """The exchange of a chunk of queries: blocks of K and V come from host memory, their gradients are summed there.

    Args:
        host_kv: K and V of the layer.
        queries: Step with the queries and without keys.
        blocks: Steps of the blocks, with the index of each block's first row in ``host_kv``.
    """

    def __init__(self, host_kv: HostKV, queries: Step, blocks: Mapping[Step, int]):
        self.steps: Sequence[Step] = [queries, *blocks]
        self._host_kv, self._blocks = host_kv, blocks

    def received(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
        fetches = (self._host_kv.fetch(step, start) for step, start in self._blocks.items())
        pending = next(fetches, None)
        yield self.steps[0], key, value
        for step in self._blocks:
            assert pending is not None
            rows, pending = pending.wait(), next(fetches, None)
            yield step, *unpack_rows(rows, key.size(-1))

    def return_gradients(self, step: Step, grad_rows: torch.Tensor, own_gradients: KVPair) -> None:
        self._host_kv.add_gradient(self._blocks[step], grad_rows)

    def finish(self, own_gradients: KVPair) -> None:
        """No gradients are in flight."""


@dataclass(frozen=True)
class QueryHeadsOnly:
    """The head sharding of a chunk's attention: exchanges queries only, for K and V are stored per head already."""

    heads: HeadSharding

    def to_heads(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        return [*self.heads.to_heads(phase, queries), *keys]

    def to_tokens(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        return [*self.heads.to_tokens(phase, queries), *keys]
