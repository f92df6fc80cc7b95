"""Attention kernels: attention of some queries over some keys, with its log-sum-exp. One file each, one interface."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Iterable, Protocol, Sequence, Union, cast

import torch

from ds_cp.attention.kernels.windows import Launch
from ds_cp.attention.score import Score, TileCoordinates
from ds_cp.mask.schedule import Step
from ds_cp.mask.tile import Tile

if TYPE_CHECKING:
    from ds_cp.attention.kernels.torch_flash import TileBatch

Work = Union[Tile, "TileBatch", Launch]
"""What one call of a kernel computes: a tile, or several. Each kernel has one type, which :meth:`Kernel.launches` returns."""


class Kernel(Protocol):
    """A kernel that computes attention on tiles, and its gradients.

    Shapes: q [B, H, m, d], k [B, h, n, d], v [B, h, n, dv] with h dividing H, lse [B, H, m] as natural log in fp32 or fp64.
    Strides are arbitrary, except that the last dim is contiguous. m and n are at least 1, and every query sees a key.

    Attributes:
        name: Name in ``Plan.kernel`` and in reports.
    """

    name: str

    def takes(self, k: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
        """Whether this kernel supports the device, dtype and head dims of these tensors, and this score rule."""

    def lower(self, tile: Tile) -> Iterable[Tile]:
        """Splits a tile into tiles whose bands this kernel supports."""

    def launches(self, tiles: Sequence[Tile], device: torch.device) -> Sequence[Work]:
        """Joins lowered tiles that one call can compute; a kernel that computes one tile per call returns the tiles."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Work,
        score: Score,
        coordinates: TileCoordinates | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention inside the band of each tile: out [B, H, m, dv] and lse.

        Args:
            work: One of :meth:`launches`; q, k and v hold the queries and keys of all of its tiles.
            coordinates: Where the tile is in the batch; needed if ``score.needs_positions``.
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
        """The tiles' share of dq, dk and dv.

        ``out`` and ``lse`` are over *all* keys, which makes the share exact without running the forward pass again.
        """


KERNELS = {
    "flash_attention_4": ("flash_attention_4", "FlashAttention4"),
    "flash_attention_3": ("flash_attention_3", "FlashAttention3"),
    "flash_attention_2": ("flash_attention_2", "FlashAttention2"),
    "torch": ("torch_flash", "TorchKernel"),
    "torch on cuda": ("torch_flash", "TorchCudaKernel"),
    "reference": ("reference", "ReferenceKernel"),
}
"""Module and class of each kernel. :func:`make` imports the package that a kernel uses."""


@cache
def make(name: str) -> Kernel:
    """The kernel of a name. Kernels hold no state, so there is one of each per process."""
    module, class_name = KERNELS[name]
    return cast(Kernel, getattr(import_module(f"{__name__}.{module}"), class_name)())


def choose(name: str, k: torch.Tensor, v: torch.Tensor, score: Score) -> Kernel:
    """The kernel for one attention call: the plan's if it takes the call, else torch's, else the reference formulas.

    Args:
        name: Name of the plan's kernel.
        k, v: Keys and values of the call, for their device, dtype and head dims.
        score: The layer's score rule.
    """
    torch_kernel = "torch on cuda" if k.is_cuda else "torch"
    names = {"torch": [torch_kernel], "reference": []}.get(name, [name, torch_kernel])
    return next((make(n) for n in names if make(n).takes(k, v, score)), make("reference"))


def kernel_work(step: Step, kernel: Kernel, device: torch.device) -> Sequence[Work]:
    """What the kernel computes in a step, one item per call: the step's tiles, lowered and joined. Cached in the step."""
    cache_key = kernel, device
    if cache_key not in step.derived:
        lowered = [piece for tile in step.tiles for piece in kernel.lower(tile)]
        step.derived[cache_key] = kernel.launches(lowered, device)
    work: Sequence[Work] = step.derived[cache_key]
    return work
