"""Block kernels: attention of a few queries over a few keys, with its log-sum-exp. One file each, one interface."""

from __future__ import annotations

from typing import Callable, Iterable, Protocol

import torch

from ds_cp.attention.score import Score
from ds_cp.mask import Tile


class Kernel(Protocol):
    """What the engine asks of a block kernel.

    Shapes: q [B, H, m, d], k [B, h, n, d], v [B, h, n, dv] with h dividing H, lse [B, H, m] natural log, fp32 or fp64.
    Strides are free but for the last dim, which is contiguous. m and n are never 0, and every query sees a key.
    """

    name: str

    def takes(self, q: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
        """Whether this kernel runs tensors of this device, dtype and head dims under this score rule."""

    def lower(self, tile: Tile) -> Iterable[Tile]:
        """Split a tile into tiles whose bands this kernel runs natively."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [B, H, m, dv], lse) of the tile's band."""

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tile: Tile,
        score: Score,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tile's share of (dq, dk, dv), given out and lse over *all* keys: exact, no forward is replayed."""


def choose(name: str, q: torch.Tensor, v: torch.Tensor, score: Score) -> Kernel:
    """The kernel for one call: the plan's where it takes the call, else the reference formulas.

    Args:
        name: the plan's kernel.
        q, v: of the call; device, dtype and head dims decide.
        score: the layer's score rule.
    """
    from ds_cp.attention.kernels.reference import ReferenceKernel
    from ds_cp.attention.kernels.torch_flash import TorchKernel

    candidates: dict[str, Callable[[], Kernel]] = {"torch": TorchKernel, "reference": ReferenceKernel}
    kernel = candidates[name]()
    return kernel if kernel.takes(q, v, score) else ReferenceKernel()
