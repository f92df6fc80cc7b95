"""Block kernels: attention of a few queries over a few keys, with its log-sum-exp. One file each, one interface."""

from __future__ import annotations

from typing import Iterable, Protocol

import torch

from ds_cp.mask import Tile


class Kernel(Protocol):
    """What the engine asks of a block kernel.

    Shapes: q [B, H, m, d], k [B, h, n, d], v [B, h, n, dv] with h dividing H, lse [B, H, m] natural log, fp32 or fp64.
    Strides are free but for the last dim, which is contiguous. m and n are never 0, and every query sees a key.
    """

    name: str

    def lower(self, tile: Tile) -> Iterable[Tile]:
        """Split a tile into tiles whose bands this kernel runs natively."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
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
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tile's share of (dq, dk, dv), given out and lse over *all* keys: exact, no forward is replayed."""


def get(name: str, device: str, dtype: torch.dtype) -> Kernel:
    """The kernel for one call.

    Args:
        name: the plan's kernel, ``"torch"`` or ``"reference"``.
        device: ``"cpu"``, ``"cuda"``, ...
        dtype: of q, k and v. The CUDA flash pair takes 16-bit types only; fp32 there runs by the reference formulas.
    """
    from ds_cp.attention.kernels.reference import ReferenceKernel
    from ds_cp.attention.kernels.torch_flash import TorchKernel

    fused = device == "cpu" or dtype in (torch.bfloat16, torch.float16)
    return TorchKernel() if name == "torch" and fused else ReferenceKernel()
