"""Published numbers of accelerators and of the links between them, for predicted times (:mod:`ds_cp.cost`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    # Gloo between processes of one machine and torch's kernel on one core, as measured in docs/performance.md.
    "CPU": Card("one CPU core", 60e9, 8e9, 16e9, Curve(40e9, 60, 120), Curve(35e9, 60, 120)),
    "B200": Card("B200 192GB SXM", 2250e12, 8.0e12, 192e9, Curve(1600e12, 500, 1100), Curve(1380e12, 700, 1200)),
}  # fmt: skip

LINKS = {
    # NVLink 3: 600 GB/s in both directions together, NVLink 4: 900, of the H800: 400, NVLink 5: 1800; about two thirds of
    # one direction are reached. InfiniBand: 400 Gbit/s per card.
    "A100": Link(200e9), "H100": Link(300e9), "H100-FA2": Link(300e9), "H800-FA2": Link(135e9), "H200": Link(300e9),
    "B200": Link(600e9), "CPU": Link(1.5e9, 150e-6), "ib": Link(45e9, 15e-6),
}  # fmt: skip


def card_here(device: str, kernel: str) -> str:
    """The entry of :data:`CARDS` for this rank's device; an H100 if the card is unknown, since only ratios are compared."""
    if device != "cuda":
        return "CPU" if device == "cpu" else "H100"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    found = next((card for card in ("B200", "H200", "H100", "H800", "A100") if card in name), "H100")
    if found == "H800":
        return "H800-FA2"
    return "H100-FA2" if found == "H100" and kernel in ("torch", "flash_attention_2") else found
