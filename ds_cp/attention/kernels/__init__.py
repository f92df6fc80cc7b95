"""Block kernels: attention of a few queries over a few keys, with its log-sum-exp. One file each, one interface."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Iterable, Protocol, Sequence

import torch

from ds_cp.attention.kernels.windows import Launch
from ds_cp.attention.score import Score, TileCoordinates
from ds_cp.mask.schedule import Step
from ds_cp.mask.tile import Tile

Work = Tile | Launch
"""What one call of a kernel computes."""


class Kernel(Protocol):
    """What :mod:`ds_cp.attention.attend` asks of a block kernel.

    Shapes: q [B, H, m, d], k [B, h, n, d], v [B, h, n, dv] with h dividing H, lse [B, H, m] natural log, fp32 or fp64.
    Strides are free but for the last dim, which is contiguous. m and n are never 0, and every query sees a key.
    """

    name: str

    def takes(self, q: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
        """Whether this kernel runs tensors of this device, dtype and head dims under this score rule."""

    def lower(self, tile: Tile) -> Iterable[Tile]:
        """Split a tile into tiles whose bands this kernel runs natively."""

    def launches(self, tiles: Sequence[Tile], device: torch.device) -> Sequence[Work]:
        """Join lowered tiles that one call computes; a kernel that cannot returns the tiles."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Work,
        score: Score,
        coordinates: TileCoordinates | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [B, H, m, dv], lse) of the work's tiles, each inside its band.

        Args:
            where: given if the score rule needs positions.
        """

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        work: Work,
        score: Score,
        coordinates: TileCoordinates | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Its share of (dq, dk, dv), given out and lse over *all* keys: exact, no forward is replayed."""


KERNELS = {
    "flash_attention_4": ("flash_attention_4", "FlashAttention4"),
    "flash_attention_3": ("flash_attention_3", "FlashAttention3"),
    "flash_attention_2": ("flash_attention_2", "FlashAttention2"),
    "torch": ("torch_flash", "TorchKernel"),
    "torch on cuda": ("torch_flash", "TorchCudaKernel"),
    "reference": ("reference", "ReferenceKernel"),
}
"""File and class of each kernel; a package is imported when its kernel is made."""


@cache
def make(name: str) -> Kernel:
    """The kernel of a name; kernels hold no state, so one serves the whole process."""
    file, kind = KERNELS[name]
    return getattr(import_module(f"{__name__}.{file}"), kind)()


def choose(name: str, k: torch.Tensor, v: torch.Tensor, score: Score) -> Kernel:
    """The kernel for one call: the plan's where it takes the call, else torch's, else the reference formulas.

    Args:
        name: the plan's kernel.
        k, v: of the call; device, dtype and head dims decide.
        score: the layer's score rule.
    """
    torchs = "torch on cuda" if k.is_cuda else "torch"
    names = {"torch": [torchs], "reference": []}.get(name, [name, torchs])
    return next((make(n) for n in names if make(n).takes(k, v, score)), make("reference"))


def work(step: Step, kernel: Kernel, device: torch.device) -> Sequence[Work]:
    """The calls that compute a step's tiles: lowered, grouped, made once and kept with the schedule."""
    key = kernel, device
    if key not in step.derived:
        lowered = [piece for tile in step.tiles for piece in kernel.lower(tile)]
        step.derived[key] = kernel.launches(lowered, device)
    return step.derived[key]
