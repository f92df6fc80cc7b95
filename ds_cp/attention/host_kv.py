"""K and V of a whole layer wait in host memory: attention of a few tokens at a time over blocks of keys that come and go.

One more exchange. Its steps are blocks of keys, and rows arrive from the host instead of from another rank; the next block
is under way while a block is computed, as in a ring. Before, the ring's rows have been gathered into the host, block by
block; behind, their gradients, which have been summed there, go home in the same way. So the device holds blocks only,
however long a shard is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, zip_longest
from typing import Iterator, Mapping, NamedTuple, Sequence

import torch
from deepspeed.accelerator import get_accelerator

from ds_cp.attention.exchange import Pair, as_heads, as_rows
from ds_cp.attention.ulysses import HeadSharding, Tensors
from ds_cp.layout import Run, slice_runs
from ds_cp.mask.schedule import Step, count
from ds_cp.mask.tile import Tile, intersect
from ds_cp.process_group import Group


class HostRows:
    """Rows [n, ...] in (pinned) host memory, of which a device sees a few at a time.

    Rows are fetched on a stream of its own, behind the kernels launched so far and beside those that are launched next.

    Args:
        shape: n, and what a row is.
        device: where rows are used.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device):
        self._device, self._apart = device, device.type != "cpu"
        self._rows = torch.empty(shape, dtype=dtype, pin_memory=self._apart)

    def zero(self) -> "HostRows":
        self._rows[:] = 0
        return self

    def write(self, start: int, rows: torch.Tensor) -> None:
        self._rows[start : start + len(rows)].copy_(rows, non_blocking=True)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows on the device; not to be written to."""
        return self._rows[start:stop].to(self._device, non_blocking=True)

    def add(self, start: int, rows: torch.Tensor) -> None:
        self.write(start, self.read(start, start + len(rows)) + rows)

    def fetch(self, start: int, stop: int) -> "Arriving":
        """Start to read rows."""
        if not self._apart:
            return Arriving(self.read(start, stop), None)
        stream = _fetching(self._device)
        stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(stream):
            return Arriving(self.read(start, stop), stream.record_event())


@cache
def _fetching(device: torch.device) -> "torch.cuda.Stream":
    """One stream per device: memory is cached per stream."""
    return get_accelerator().Stream(device=device)


class Arriving(NamedTuple):
    """Rows on their way from the host, and the event of their arrival."""

    rows: torch.Tensor
    event: "torch.cuda.Event | None"

    def wait(self) -> torch.Tensor:
        """The rows, once the current stream may use them."""
        if self.event is not None:
            stream = get_accelerator().current_stream()
            stream.wait_event(self.event)
            self.rows.record_stream(stream)
        return self.rows


@dataclass(eq=False)
class HostKV:
    """K and V that this rank's queries of one layer need, and in time the gradients: the ring shard's rows, then those of
    each further step of the schedule.

    Attributes:
        steps: the layer's schedule.
        ring_group: the ring axis.
        heads: of the ulysses axis, for whom a rank holds its ring shard's rows of its own heads.
        length: L, tokens of this rank.
        calls: "forward" and "backward" passes of attention layers, which each store counts once.
        block: rows that the device sees at a time.
    """

    steps: Sequence[Step]
    ring_group: Group
    heads: HeadSharding
    length: int
    calls: Counter
    block: int
    _rows: HostRows | None = None
    _shape: tuple[int, ...] = ()
    _key: torch.Tensor | None = None
    _value: torch.Tensor | None = None
    _starts: list[int] = field(default_factory=list)

    @cached_property
    def _sums(self) -> HostRows:
        """Of the rows' gradients."""
        precise = torch.promote_types(self._key.dtype, torch.float32)
        return HostRows(self._shape, precise, self._key.device).zero()

    def put(self, span: Run, key: torch.Tensor, value: torch.Tensor, phase: str) -> None:
        """Keep K and V of a span of this rank's tokens, [B, h, n, d] and [B, h, n, dv].

        Args:
            phase: "forward" or "backward", for counters and messages.
        """
        key, value = self.heads.to_heads(phase, (), (key.detach(), value.detach()))
        if self._rows is None:
            self._starts = [*accumulate((count(step.rows) for step in self.steps), initial=0)]
            self._shape = (self._starts[-1], *key.shape[:2], key.size(-1) + value.size(-1))
            self._rows = HostRows(self._shape, key.dtype, key.device)
            self._key, self._value = (x.new_empty((*x.shape[:2], 0, x.size(-1))) for x in (key, value))
        for run, part in zip(self._spread(span), as_rows(key, value).split(span[1] - span[0])):
            self._rows.write(run[0], part)

    def complete(self, phase: str) -> None:
        """Gather the rows of other ranks."""
        self.calls[phase] += 1
        for step, start in zip(self.steps[1:], self._starts[1:]):
            for leave, arrive in self._messages(step.target_rows, step.rows):
                buffer = self._key.new_empty((count(arrive), *self._shape[1:]))
                parcel = torch.cat([self._rows.read(*run) for run in leave] or [buffer[:0]])
                self._swap(f"{phase} rows", (step.target, parcel), (step.source, buffer))
                self._rows.write(start, buffer)
                start += len(buffer)

    def exchange(self, span: Run) -> "HostExchange":
        """How the queries of a span meet all keys; what it needs is worked out once per batch."""
        queries, known = tuple(self._spread(span)), self.steps[0].derived
        if ("blocks", self.block, queries) not in known:
            known["blocks", self.block, queries] = self._plan(queries)
        return HostExchange(self, *known["blocks", self.block, queries])

    def fetch(self, step: Step, start: int) -> "Arriving":
        """Start to bring the rows of a block."""
        return self._rows.fetch(start, start + count(step.rows))

    def empty_kv(self) -> Pair:
        """K and V of no rows: a span's attention is given none; they ask for a gradient, so that its backward runs."""
        return tuple(x.detach().requires_grad_() for x in (self._key, self._value))

    def add_gradient(self, start: int, rows: torch.Tensor) -> None:
        """Sum up the gradient of some rows, [n, B, h, d + dv]."""
        self._sums.add(start, rows)

    def return_gradients(self) -> None:
        """Bring the gradients of other ranks' rows to them, and add what comes for this rank's."""
        for step, start in zip(self.steps[1:], self._starts[1:]):
            for leave, arrive in self._messages(step.rows, step.target_rows):
                parcel = self._sums.read(start, start + count(leave)).contiguous()
                start += len(parcel)
                buffer = parcel.new_empty((count(arrive), *self._shape[1:]))
                self._swap("backward gradients", (step.source, parcel), (step.target, buffer))
                for run, part in zip(arrive, buffer.split([stop - first for first, stop in arrive])):
                    self._sums.add(run[0], part)

    def gradient(self, span: Run) -> Pair:
        """dK and dV of a span of this rank's tokens, [B, h, n, d] and [B, h, n, dv]."""
        rows = torch.cat([self._sums.read(*run) for run in self._spread(span)]).to(self._key.dtype)
        return tuple(self.heads.to_tokens("backward", (), as_heads(rows, self._key.size(-1))))

    def _spread(self, span: Run) -> Iterator[Run]:
        """The ring shard's rows of a span that each rank of the ulysses axis computes at the same time."""
        for start in range(0, count(self.steps[0].rows), self.length):
            yield start + span[0], start + span[1]

    def _messages(self, leave: Sequence[Run], arrive: Sequence[Run]) -> Iterator[tuple[Sequence[Run], Sequence[Run]]]:
        """Rows of both directions, as many at a time as a block holds; both ends of a message cut it alike."""
        cut = (
            [slice_runs(runs, i, i + self.block) for i in range(0, count(runs), self.block)] for runs in (leave, arrive)
        )
        yield from zip_longest(*cut, fillvalue=())

    def _swap(self, what: str, parcel: tuple[int, torch.Tensor], buffer: tuple[int, torch.Tensor]) -> None:
        sends, receives = ([each] if len(each[1]) else [] for each in (parcel, buffer))
        self.ring_group.isend_irecv(
            sends, receives, f"{what} in blocks, with ranks {parcel[0]} and {buffer[0]} of the ring"
        ).wait()

    def _plan(self, queries: tuple[Run, ...]) -> tuple[Step, dict[Step, int]]:
        """For some rows of the ring shard: a step that stands for them, and a step per block of keys that one of them sees,
        with where its rows start."""
        own, blocks = self.steps[0], {}
        for step, start in zip(self.steps, self._starts):
            tiles: dict[int, list[Tile]] = {}
            for tile in step.tiles:
                for number in range(tile.k_start // self.block, -(-tile.k_stop // self.block)):
                    tiles.setdefault(number, []).extend(_meetings(tile, queries, self._block_of(step, number)))
            for number in sorted(number for number, found in tiles.items() if found):
                keys = self._block_of(step, number)
                rows = slice_runs(step.rows, *keys)
                blocks[Step(step.source, step.target, rows, (), tuple(tiles[number]))] = start + keys[0]
        return Step(own.source, own.target, queries, (), ()), blocks

    def _block_of(self, step: Step, number: int) -> Run:
        return number * self.block, min(count(step.rows), (number + 1) * self.block)


def _meetings(tile: Tile, queries: Sequence[Run], keys: Run) -> Iterator[Tile]:
    """The part of a tile in which some runs of queries meet a run of keys, counted through the runs."""
    before = 0
    for run in queries:
        for piece in intersect(tile, run, keys):
            yield piece._replace(q_start=piece.q_start + before, q_stop=piece.q_stop + before)
        before += run[1] - run[0]


class HostExchange:
    """The exchange of a span of queries: blocks of keys arrive from the host, their gradients are summed there.

    Args:
        host_kv: K and V of the layer.
        queries: a step that stands for the queries, without keys.
        blocks: a step each, and where its rows start among those that are held.
    """

    def __init__(self, host_kv: HostKV, queries: Step, blocks: Mapping[Step, int]):
        self.steps = [queries, *blocks]
        self._host_kv, self._blocks = host_kv, blocks

    def received(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
        arriving = (self._host_kv.fetch(*block) for block in self._blocks.items())
        under_way = next(arriving, None)
        yield self.steps[0], key, value
        for step in self._blocks:
            rows, under_way = under_way.wait(), next(arriving, None)
            yield step, *as_heads(rows, key.size(-1))

    def return_gradients(self, step: Step, grad_rows: torch.Tensor, own_gradients: Pair) -> None:
        self._host_kv.add_gradient(self._blocks[step], grad_rows)

    def finish(self, own_gradients: Pair) -> None:
        """Nothing is under way."""


@dataclass(frozen=True)
class QueryHeadsOnly:
    """Heads of a span's attention: K and V are held by heads already."""

    heads: HeadSharding

    def to_heads(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        return [*self.heads.to_heads(phase, queries), *keys]

    def to_tokens(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        return [*self.heads.to_tokens(phase, queries), *keys]
