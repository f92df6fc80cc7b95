"""Predicted time of one attention layer: the exact schedule of a rank on a stated roofline. Predicted, not measured.

The schedule says which kernels are launched on which tiles, which rows are sent when, and what is merged. Each of these is
an event on one of two streams, compute and communication; a kernel that needs received rows waits for them. Rates come from
:mod:`ds_cp.cards`, whose numbers are published ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Sequence

import numpy as np

from ds_cp.attention.ulysses import HeadSplit
from ds_cp.cards import LAUNCH, STREAMED, Card, Curve, Link
from ds_cp.layout import total_length
from ds_cp.mask.rules import OPEN
from ds_cp.mask.schedule import Step
from ds_cp.mask.tile import Tile


@dataclass(frozen=True)
class AttentionShape:
    """What one layer's attention computes.

    Attributes:
        query_heads, kv_heads: H and h.
        dim, value_dim: d and dv.
        item: bytes of an element of Q, K and V.
    """

    query_heads: int
    kv_heads: int
    dim: int = 128
    value_dim: int = 128
    item: int = 2

    def pair_flops(self) -> int:
        """FLOPs of one (query, key) pair in the forward pass, all query heads."""
        return 2 * self.query_heads * (self.dim + self.value_dim)


@dataclass
class Time:
    """Seconds of one rank's attention, by part.

    Attributes:
        parts: Seconds of "kernel forward", "kernel backward", "merge", "copies", "exposed messages".
        counts: "launches", "messages", "bytes sent" and "FLOPs".
    """

    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> float:
        """Seconds."""
        return sum(self.parts.values())


class _Streams:
    """A compute and a communication stream, and what is launched on them."""

    def __init__(self, card: Card, link: Link, time: Time):
        self._card, self._link, self._time = card, link, time
        self._compute = self._messages = 0.0

    def kernel(self, part: str, seconds: float, launches: int = 1) -> None:
        seconds += launches * LAUNCH
        self._compute += seconds
        self._time.parts[part] += seconds
        self._time.counts["launches"] += launches

    def copy(self, part: str, nbytes: float) -> None:
        if nbytes:
            self.kernel(part, nbytes / (self._card.memory * STREAMED))

    def send(self, sent: float, received: float) -> float:
        """Start a message; returns when it is complete."""
        if not sent and not received:
            return 0.0
        start = max(self._compute, self._messages)
        self._messages = start + self._link.latency + max(sent, received) / self._link.bandwidth
        self._time.counts["messages"] += 1
        self._time.counts["bytes sent"] += int(sent)
        return self._messages

    def wait(self, until: float) -> None:
        exposed = max(0.0, until - self._compute)
        self._compute += exposed
        self._time.parts["exposed messages"] += exposed


def attention_time(
    steps: Sequence[Step], ulysses: int, shape: AttentionShape, card: Card, link: Link, batch: int = 1
) -> Time:
    """Predicted time of one rank's attention, forward and backward.

    Args:
        steps: the rank's schedule on the ring axis.
        ulysses: ranks on the ulysses axis, which exchange tokens for heads before and after.
        shape: of the whole layer, all heads.
        link: between the ranks of the group.
        batch: B.
    """
    split = HeadSplit.plan(shape.query_heads, shape.kv_heads, ulysses)
    if split is None:
        raise ValueError(f"{shape.query_heads} and {shape.kv_heads} heads do not split over {ulysses} ranks")
    local = AttentionShape(max(split.query_heads), max(split.kv_heads), shape.dim, shape.value_dim, shape.item)
    time = Time()
    streams = _Streams(card, link, time)
    shard = total_length(steps[0].rows) * batch  # tokens of the ring shard
    q_bytes = shard * local.query_heads * shape.item
    kv_bytes = shard * local.kv_heads * shape.item
    dims = shape.dim + shape.value_dim

    def exchange_heads(elements: float) -> None:
        """An all-to-all of a rank's part, with one copy before; nothing is computed meanwhile."""
        if ulysses > 1:
            streams.copy("copies", 2 * elements)
            sent = elements * (ulysses - 1) / ulysses
            streams.wait(streams.send(sent, sent))

    exchange_heads(q_bytes * shape.dim + kv_bytes * dims)
    _forward(streams, steps, local, card, batch)
    exchange_heads(q_bytes * shape.value_dim)
    exchange_heads(q_bytes * shape.value_dim)
    _backward(streams, steps, local, card, batch)
    exchange_heads(q_bytes * shape.dim + kv_bytes * dims)
    return time


def _forward(streams: _Streams, steps: Sequence[Step], shape: AttentionShape, card: Card, batch: int) -> None:
    row = batch * shape.kv_heads * (shape.dim + shape.value_dim) * shape.item
    sends = any(step.target_rows for step in steps[1:])
    streams.copy("copies", 2 * total_length(steps[0].rows) * row * sends)
    work = [_StepWork.of(step) for step in steps]
    single = sum(each.launches for each in work) == 1
    out = batch * shape.query_heads * shape.value_dim
    arrival = streams.send(*_sizes(steps, 1, row))
    for number, each in enumerate(work):
        if number:
            streams.wait(arrival)
            arrival = streams.send(*_sizes(steps, number + 1, row))
        streams.kernel("kernel forward", each.seconds(shape, card.forward, 1.0), each.launches)
        if number:  # a rank's own keys come first, and cover its queries
            streams.copy("merge", each.queries * out * (4 + 4 + shape.item))
        elif not single:
            streams.copy("copies", each.queries * out * (shape.item + 4))
    if not single:
        streams.copy("copies", total_length(steps[0].rows) * out * (4 + shape.item))


def _backward(streams: _Streams, steps: Sequence[Step], shape: AttentionShape, card: Card, batch: int) -> None:
    dims = shape.dim + shape.value_dim
    row, gradient_row = batch * shape.kv_heads * dims * shape.item, batch * shape.kv_heads * dims * 4
    work = [_StepWork.of(step) for step in steps]
    single = sum(each.launches for each in work) == 1
    arrival = streams.send(*_sizes(steps, 1, row))
    returned = 0.0
    for number, each in enumerate(work):
        if number:
            streams.wait(arrival)
            arrival = streams.send(*_sizes(steps, number + 1, row))
        streams.kernel("kernel backward", each.seconds(shape, card.backward, 2.5), 4 * each.launches)
        streams.kernel("kernel backward", each.passes(shape, batch) / (card.memory * STREAMED), 0)
        if not single:
            streams.copy("copies", batch * each.queries * shape.query_heads * shape.dim * (shape.item + 8))
            streams.copy("copies", batch * each.keys * shape.kv_heads * dims * (shape.item + 4))
        if number:
            streams.wait(returned)  # the message before is added to this rank's gradients
            streams.copy("copies", total_length(steps[number - 1].target_rows) * gradient_row * 3 * (number > 1))
            sent, received = total_length(steps[number].rows), total_length(steps[number].target_rows)
            returned = streams.send(sent * gradient_row, received * gradient_row)
    streams.wait(returned)


@dataclass(frozen=True)
class _StepWork:
    """Kernel launches of one step, as arrays over its tiles.

    Attributes:
        area: Number of (query, key) pairs of each tile, all batch rows.
        shorter: The shorter side of each tile.
        diagonal: Whether a band cuts through the tile.
        queries, keys: Total numbers of query and key rows.
        launches: Number of launches; neighbouring tiles of one band share one.
    """

    area: np.ndarray
    shorter: np.ndarray
    diagonal: np.ndarray
    queries: int
    keys: int
    launches: int

    @staticmethod
    def of(step: Step) -> _StepWork:
        key = "work for cost"
        if key not in step.derived:
            step.derived[key] = _StepWork.of_tiles(step.tiles)
        work: _StepWork = step.derived[key]
        return work

    @staticmethod
    def of_tiles(tiles: Sequence[Tile]) -> _StepWork:
        table = np.array(tiles, dtype=np.int64).reshape(-1, 8)
        rows = table[:, 1] - table[:, 0]
        queries, keys = table[:, 3] - table[:, 2], table[:, 5] - table[:, 4]
        low, high = np.maximum(table[:, 6], -queries), np.minimum(table[:, 7], keys)
        area = rows * (_pairs_up_to(queries, keys, high) - _pairs_up_to(queries, keys, low - 1))
        diagonal = (table[:, 6] > -OPEN) | (table[:, 7] < OPEN)
        follows = (table[1:, 2] == table[:-1, 3]) & (table[1:, 4] == table[:-1, 5]) & (rows[1:] == 1)
        launches = len(table) - int((follows & (diagonal[1:] == diagonal[:-1])).sum())
        return _StepWork(area, np.minimum(queries, keys), diagonal, int(queries.sum()), int(keys.sum()), launches)

    def seconds(self, shape: AttentionShape, curve: Curve, factor: float) -> float:
        """Time of the matrix products; the backward pass has 2.5 times the FLOPs of the forward pass."""
        half = np.where(self.diagonal, curve.half_causal, curve.half)
        return float(factor * shape.pair_flops() / curve.rate * (self.area * (1 + half / self.shorter)).sum())

    def passes(self, shape: AttentionShape, batch: int) -> float:
        """Bytes that a backward kernel moves beside its tiles: it reads dO and out, sums dQ in fp32 and converts it, and writes
        dK and dV per query head, which are summed."""
        dims = shape.dim + shape.value_dim
        return batch * shape.query_heads * (self.queries * shape.dim * 14 + self.keys * dims * 2 * shape.item)


def _pairs_up_to(queries: np.ndarray, keys: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Number of pairs (i, j) of a rectangle with ``j - i <= offset``."""
    first = np.clip(-offset, 0, queries)  # queries before it see nothing
    full = np.maximum(first, np.clip(keys - offset - 1, 0, queries))  # from it on they see all keys
    pairs: np.ndarray = (first + full - 1) * (full - first) // 2 + (offset + 1) * (full - first)
    pairs += (queries - full) * keys
    return pairs


def _sizes(steps: Sequence[Step], number: int, row: float) -> tuple[float, float]:
    """Bytes that a rank sends and receives for a step; nothing past the last."""
    if number >= len(steps):
        return 0.0, 0.0
    return total_length(steps[number].target_rows) * row, total_length(steps[number].rows) * row


def ideal_time(tiles: Sequence[Tile], ranks: int, shape: AttentionShape, card: Card) -> float:
    """Seconds of one card's single call on all tiles, divided by the ranks: the ideal of a method."""
    time = Time()
    streams = _Streams(card, Link(1.0), time)
    work = _StepWork.of_tiles(tiles)
    streams.kernel("kernel forward", work.seconds(shape, card.forward, 1.0))
    streams.kernel("kernel backward", work.seconds(shape, card.backward, 2.5), 4)
    streams.kernel("kernel backward", work.passes(shape, 1) / (card.memory * STREAMED), 0)
    return time.total / ranks
