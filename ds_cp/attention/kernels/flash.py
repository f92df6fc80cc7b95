"""What the FlashAttention kernels share: which calls they take, the layout [B, m, H, d], head dims, launches."""

from __future__ import annotations

from typing import Iterable, Sequence

import torch
import torch.nn.functional as F

from ds_cp.attention.kernels.windows import Launch, fit, launches
from ds_cp.attention.score import Score
from ds_cp.mask.tile import Tile


class FlashKernel:
    """A kernel that runs one band per launch through a window, on CUDA, in half precision.

    A subclass calls its package in :meth:`run_forward` and :meth:`run_backward`. There q is [B, m, H, d], or
    [total, H, d] in a launch of several tiles, and lse is [B, H, m], or [H, total].
    """

    name: str
    device = "cuda"
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    max_width = 256
    extras: frozenset[str] = frozenset()
    varlen = True

    def takes(self, q: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
        return (
            q.device.type == self.device
            and q.dtype in self.dtypes
            and max(self.widths(q.size(-1), v.size(-1))) <= self.max_width
            and score.extras <= self.extras
        )

    def lower(self, tile: Tile) -> Iterable[Tile]:
        return fit(tile)

    def launches(self, tiles: Sequence[Tile], device: torch.device) -> Sequence[Launch]:
        return launches(tiles, device, self.varlen)

    def widths(self, dim: int, value_dim: int) -> tuple[int, int]:
        """The head dims of q and k, and of v, that the package runs: multiples of 8, equal."""
        width = -(-max(dim, value_dim) // 8) * 8
        return width, width

    def forward(self, q, k, v, launch, score, coordinates=None):
        dim, value_dim = self.widths(q.size(-1), v.size(-1))
        rows = [_rows(x, width, launch) for x, width in ((q, dim), (k, dim), (v, value_dim))]
        out, lse = self.run_forward(*rows, launch, score)
        return _heads(out, launch)[..., : v.size(-1)], lse.unsqueeze(0) if launch.several else lse

    def backward(self, grad_out, q, k, v, out, lse, launch, score, coordinates=None):
        dim, value_dim = self.widths(q.size(-1), v.size(-1))
        q_rows, k_rows = _rows(q, dim, launch), _rows(k, dim, launch)
        v_rows, out_rows, grad_rows = (_rows(x, value_dim, launch) for x in (v, out, grad_out))
        lse = (lse[0] if launch.several else lse).contiguous()
        grads = self.run_backward(grad_rows, q_rows, k_rows, v_rows, out_rows, lse, launch, score)
        return tuple(_heads(grad, launch)[..., : x.size(-1)] for grad, x in zip(grads, (q, k, v)))

    def run_forward(self, q, k, v, launch: Launch, score: Score) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse fp32)."""
        raise NotImplementedError

    def run_backward(self, grad_out, q, k, v, out, lse, launch: Launch, score: Score) -> tuple[torch.Tensor, ...]:
        """(dq, dk, dv) in the inputs' dtype."""
        raise NotImplementedError


def _rows(x: torch.Tensor, width: int, launch: Launch) -> torch.Tensor:
    """[B, H, m, d] as [B, m, H, width] or, in a launch of several tiles, [m, H, width]; every row is aligned.

    Columns of zeros change neither the scores nor the other columns of the output.
    """
    x = F.pad(x, (0, width - x.size(-1))) if x.size(-1) < width else x
    x = x.transpose(1, 2)
    x = x[0] if launch.several else x
    return x if _aligned(x) else x.contiguous()


def _aligned(x: torch.Tensor) -> bool:
    """Whether every row starts on 16 bytes, which the kernels' loads rely on: k and v lie side by side in memory, so
    the head dim of one shifts the other."""
    rows = (stride for stride, size in zip(x.stride()[:-1], x.shape) if size > 1)
    return x.stride(-1) == 1 and x.storage_offset() % 8 == 0 and all(stride % 8 == 0 for stride in rows)


def _heads(x: torch.Tensor, launch: Launch) -> torch.Tensor:
    """Rows back to [B, H, m, width]."""
    return (x.unsqueeze(0) if launch.several else x).transpose(1, 2)


def empty_like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Contiguous buffers of the same shapes, for gradients."""
    return tuple(x.new_empty(x.shape) for x in tensors)
