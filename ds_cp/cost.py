"""Predicted time of one attention layer: the exact schedule of a rank on a stated roofline. Predicted, not measured.

The schedule says which kernels are launched on which tiles, which rows are sent when, and what is merged. Each of these is
an event on one of two streams, compute and communication; a kernel that needs received rows waits for them. Rates come from
:class:`Card` and :class:`Link`, whose numbers are published ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Sequence

import torch

from ds_cp.attention.kernels.windows import launches, split_to_windows
from ds_cp.attention.ulysses import HeadSplit
from ds_cp.mask.rules import OPEN
from ds_cp.mask.schedule import Step, count
from ds_cp.mask.tile import Tile


@dataclass(frozen=True)
class Curve:
    """The rate of a FlashAttention kernel by the length of its tile: ``rate * n / (n + half)``.

    Attributes:
        rate: FLOP/s on long tiles.
        half, half_causal: tokens at which a tile without and with a causal diagonal runs at half the rate.
    """

    rate: float
    half: float
    half_causal: float

    def seconds(self, flops: float, tokens: int, causal: bool) -> float:
        """Time of a tile whose shorter side has ``tokens``."""
        half = self.half_causal if causal else self.half
        return flops / self.rate * (tokens + half) / tokens


@dataclass(frozen=True)
class Card:
    """One accelerator.

    Attributes:
        name: as users call it.
        peak: dense bf16 FLOP/s of the data sheet.
        memory: bytes/s of the data sheet; ``STREAMED`` of it is reached.
        capacity: bytes.
        forward, backward: the FlashAttention that ``auto`` chooses there, head dim 128.
    """

    name: str
    peak: float
    memory: float
    capacity: float
    forward: Curve
    backward: Curve


@dataclass(frozen=True)
class Link:
    """What connects the ranks of a group.

    Attributes:
        bandwidth: bytes/s that a rank sends while it receives as many, as NCCL reaches it.
        latency: seconds of a message.
    """

    bandwidth: float
    latency: float = 8e-6


STREAMED = 0.85
"""Share of a card's memory bandwidth that element-wise kernels reach."""

LAUNCH = 3e-6
"""Seconds of the shortest kernel."""

_FA2_H100 = Curve(375e12, 110, 400), Curve(310e12, 250, 500)
_FA3_H100 = Curve(655e12, 190, 500), Curve(565e12, 260, 500)

CARDS = {
    # data sheets: 312, 989 and 2250 TFLOP/s dense bf16; 2.04, 3.35, 4.8 and 8 TB/s. Curves are fitted to the figures of the
    # FlashAttention-2 and -3 papers for head dim 128 (H100: 309 to 370 and 467 to 648 TFLOP/s forward, 191 to 335 and 292
    # to 616 causal, for 512 to 16k tokens; backward up to 561 for FlashAttention-3). B200: FlashAttention 4's published
    # 1.6 PFLOP/s forward, its backward by the same ratio as FlashAttention 3's.
    "A100": Card("A100 80GB SXM", 312e12, 2.04e12, 80e9, Curve(225e12, 110, 400), Curve(190e12, 250, 500)),
    "H100": Card("H100 80GB SXM", 989e12, 3.35e12, 80e9, *_FA3_H100),
    "H100-FA2": Card("H100 80GB SXM, FlashAttention 2", 989e12, 3.35e12, 80e9, *_FA2_H100),
    "H800-FA2": Card("H800 80GB SXM, FlashAttention 2", 989e12, 3.35e12, 80e9, *_FA2_H100),
    "H200": Card("H200 141GB SXM", 989e12, 4.8e12, 141e9, *_FA3_H100),
    "B200": Card("B200 192GB SXM", 2250e12, 8.0e12, 192e9, Curve(1600e12, 500, 1100), Curve(1380e12, 700, 1200)),
}  # fmt: skip

LINKS = {
    # NVLink 3: 600 GB/s in both directions together, NVLink 4: 900, of the H800: 400, NVLink 5: 1800; about two thirds of
    # one direction are reached. InfiniBand: 400 Gbit/s per card.
    "A100": Link(200e9), "H100": Link(300e9), "H100-FA2": Link(300e9), "H800-FA2": Link(135e9), "H200": Link(300e9),
    "B200": Link(600e9), "ib": Link(45e9, 15e-6),
}  # fmt: skip


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
    shard = count(steps[0].rows) * batch  # tokens of the ring shard
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
    streams.copy("copies", 2 * count(steps[0].rows) * row * sends)
    calls = [launches([piece for tile in step.tiles for piece in split_to_windows(tile)], torch.device("cpu")) for step in steps]
    single = sum(map(len, calls)) == 1
    out = batch * shape.query_heads * shape.value_dim
    arrival = streams.send(*_sizes(steps, 1, row))
    written = 0
    for number, of_step in enumerate(calls):
        if number:
            streams.wait(arrival)
            arrival = streams.send(*_sizes(steps, number + 1, row))
        for launch in of_step:
            queries = launch.q_stop - launch.q_start
            streams.kernel("kernel forward", _flash(launch.tiles, shape, card.forward, 1.0))
            fresh = min(queries, max(0, count(steps[0].rows) - written))
            written += fresh
            if not single:
                streams.copy("copies", fresh * out * (shape.item + 4))
                streams.copy("merge", (queries - fresh) * out * (4 + 4 + shape.item))
    if not single:
        streams.copy("copies", count(steps[0].rows) * out * (4 + shape.item))


def _backward(streams: _Streams, steps: Sequence[Step], shape: AttentionShape, card: Card, batch: int) -> None:
    dims = shape.dim + shape.value_dim
    row, gradient_row = batch * shape.kv_heads * dims * shape.item, batch * shape.kv_heads * dims * 4
    calls = [launches([piece for tile in step.tiles for piece in split_to_windows(tile)], torch.device("cpu")) for step in steps]
    single = sum(map(len, calls)) == 1
    arrival = streams.send(*_sizes(steps, 1, row))
    returned = 0.0
    for number, of_step in enumerate(calls):
        if number:
            streams.wait(arrival)
            arrival = streams.send(*_sizes(steps, number + 1, row))
        for launch in of_step:
            queries, keys = launch.q_stop - launch.q_start, launch.k_stop - launch.k_start
            # the kernel's own passes: it reads dO and out, sums dQ in fp32 and converts it; dK and dV per query head, summed
            passes = batch * shape.query_heads * (queries * shape.dim * 14 + keys * dims * 2 * shape.item)
            streams.kernel(
                "kernel backward",
                _flash(launch.tiles, shape, card.backward, 2.5) + passes / (card.memory * STREAMED),
                launches=4,
            )
            if not single:
                streams.copy("copies", batch * queries * shape.query_heads * shape.dim * (shape.item + 8))
                streams.copy("copies", batch * keys * shape.kv_heads * dims * (shape.item + 4))
        if number:
            streams.wait(returned)  # the message before is added to this rank's gradients
            streams.copy("copies", count(steps[number - 1].target_rows) * gradient_row * 3 * (number > 1))
            returned = streams.send(
                count(steps[number].rows) * gradient_row, count(steps[number].target_rows) * gradient_row
            )
    streams.wait(returned)


def _sizes(steps: Sequence[Step], number: int, row: float) -> tuple[float, float]:
    """Bytes that a rank sends and receives for a step; nothing past the last."""
    if number >= len(steps):
        return 0.0, 0.0
    return count(steps[number].target_rows) * row, count(steps[number].rows) * row


def _flash(tiles: Sequence[Tile], shape: AttentionShape, curve: Curve, factor: float) -> float:
    """Seconds of a launch over some tiles."""
    seconds = 0.0
    for tile in tiles:
        shorter = min(tile.q_stop - tile.q_start, tile.k_stop - tile.k_start)
        causal = tile.lo > -OPEN or tile.hi < OPEN
        seconds += curve.seconds(factor * tile.area * shape.pair_flops(), shorter, causal)
    return seconds


def ideal_time(tiles: Sequence[Tile], ranks: int, shape: AttentionShape, card: Card) -> float:
    """Seconds of one card's single call on all tiles, divided by the ranks: the ideal of a method."""
    time = Time()
    streams = _Streams(card, Link(1.0), time)
    queries = sum(tile.q_stop - tile.q_start for tile in tiles)
    keys = sum(tile.k_stop - tile.k_start for tile in tiles)
    dims = shape.dim + shape.value_dim
    streams.kernel("kernel forward", _flash(tiles, shape, card.forward, 1.0))
    passes = shape.query_heads * (queries * shape.dim * 14 + keys * dims * 2 * shape.item)
    streams.kernel("kernel backward", _flash(tiles, shape, card.backward, 2.5) + passes / (card.memory * STREAMED), 4)
    return time.total / ranks
