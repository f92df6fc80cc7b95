"""What the FlashAttention kernels have in common: the calls they take, the layout [B, m, H, d], head dims, launches."""

from __future__ import annotations

from typing import Iterable, Sequence

import torch
import torch.nn.functional as F

from ds_cp.attention.kernels.windows import Launch, launches, split_to_windows
from ds_cp.attention.score import Score, TileCoordinates
from ds_cp.mask.tile import Tile


class FlashKernel:
    """A kernel that runs one window per launch, on CUDA, in half precision.

    A subclass calls its package in :meth:`run_forward` and :meth:`run_backward`. There q is [B, m, H, d], or [total, H, d]
    in a varlen launch, and lse is [B, H, m], or [H, total].

    Attributes:
        name: Name of the kernel.
        device: Device type that it runs on.
        dtypes: Dtypes that it supports.
        max_head_dim: Largest head dim that it supports.
        score_features: Names of the :attr:`Score.features` that it supports.
        varlen: Whether one launch may have several tiles.
    """

    name: str
    device = "cuda"
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    max_head_dim = 256
    score_features: frozenset[str] = frozenset()
    varlen = True

    def takes(self, k: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
        return (
            k.device.type == self.device
            and k.dtype in self.dtypes
            and max(self.padded_head_dims(k.size(-1), v.size(-1))) <= self.max_head_dim
            and score.features <= self.score_features
        )

    def lower(self, tile: Tile) -> Iterable[Tile]:
        return split_to_windows(tile)

    def launches(self, tiles: Sequence[Tile], device: torch.device) -> Sequence[Launch]:
        return launches(tiles, device, self.varlen)

    def padded_head_dims(self, dim: int, value_dim: int) -> tuple[int, int]:
        """Head dims of q and k, and of v, as the package needs them: multiples of 8, equal."""
        padded = -(-max(dim, value_dim) // 8) * 8
        return padded, padded

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        launch: Launch,
        score: Score,
        coordinates: TileCoordinates | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dim, value_dim = self.padded_head_dims(q.size(-1), v.size(-1))
        out, lse = self.run_forward(
            _to_bshd(q, dim, launch), _to_bshd(k, dim, launch), _to_bshd(v, value_dim, launch), launch, score
        )
        return _to_bhsd(out, launch)[..., : v.size(-1)], lse.unsqueeze(0) if launch.varlen else lse

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        launch: Launch,
        score: Score,
        coordinates: TileCoordinates | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dim, value_dim = self.padded_head_dims(q.size(-1), v.size(-1))
        dq, dk, dv = self.run_backward(
            _to_bshd(grad_out, value_dim, launch),
            _to_bshd(q, dim, launch),
            _to_bshd(k, dim, launch),
            _to_bshd(v, value_dim, launch),
            _to_bshd(out, value_dim, launch),
            (lse[0] if launch.varlen else lse).contiguous(),
            launch,
            score,
        )
        return (
            _to_bhsd(dq, launch)[..., : q.size(-1)],
            _to_bhsd(dk, launch)[..., : k.size(-1)],
            _to_bhsd(dv, launch)[..., : v.size(-1)],
        )

    def run_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: Launch, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out in q's dtype, lse in fp32."""
        raise NotImplementedError

    def run_backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        launch: Launch,
        score: Score,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv in the dtypes of q, k and v."""
        raise NotImplementedError


def _to_bshd(x: torch.Tensor, head_dim: int, launch: Launch) -> torch.Tensor:
    """[B, H, m, d] as [B, m, H, head_dim] or, in a varlen launch, as [m, H, head_dim]; every row is aligned.

    Channels of zeros change neither the scores nor the other channels of the output.
    """
    x = F.pad(x, (0, head_dim - x.size(-1))) if x.size(-1) < head_dim else x
    x = x.transpose(1, 2)
    x = x[0] if launch.varlen else x
    return x if _is_aligned(x) else x.contiguous()


def _to_bhsd(x: torch.Tensor, launch: Launch) -> torch.Tensor:
    """The inverse: [B, H, m, head_dim]."""
    return (x.unsqueeze(0) if launch.varlen else x).transpose(1, 2)


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes, as the kernels' loads need it.

    K and V are received side by side in memory, so the head dim of K shifts V.
    """
    row_strides = (stride for stride, size in zip(x.stride()[:-1], x.shape) if size > 1)
    return x.stride(-1) == 1 and x.storage_offset() % 8 == 0 and all(stride % 8 == 0 for stride in row_strides)


def empty_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contiguous buffers for dq, dk and dv."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
