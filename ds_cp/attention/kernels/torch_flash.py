"""FlashAttention as torch ships it: the CPU operator, and on CUDA the aten flash pair. No extra package."""

from __future__ import annotations

from collections import defaultdict
from typing import Iterable, NamedTuple, Sequence

import torch
import torch.nn.functional as F

from ds_cp.attention.kernels import available
from ds_cp.attention.kernels.flash import FlashKernel
from ds_cp.attention.score import Score
from ds_cp.mask.rules import OPEN
from ds_cp.mask.tile import Tile, lower

aten = torch.ops.aten

MANY_KEYS = 4096
"""Keys from which the operators are faster on keys of one head that lie together, the copy included (by 3%): each block
of queries reads all of them again."""


class TileBatch(NamedTuple):
    """Tiles of one shape and band that follow each other, for one call as a batch; indexes like what covers them.

    Attributes:
        lo, hi: of each.
        times: how many.
    """

    batch_start: int
    batch_stop: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int
    hi: int
    times: int


class TorchKernel:
    """On CPU. Runs "all keys" and "causal from the top left"; other bands are lowered to these two.

    An anti-causal square (``lo = 0``) is a causal one with both orders flipped.
    """

    name = "torch"

    def lower(self, tile: Tile) -> Iterable[Tile]:
        return lower(tile)

    def launches(self, tiles: Sequence[Tile], device: torch.device) -> Sequence[TileBatch]:
        """Documents of one length, or the squares of a window, as a batch each."""
        shapes: dict[tuple[int, ...], list[Tile]] = defaultdict(list)
        for tile in tiles:
            shape = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start, tile.lo, tile.hi
            shapes[tile.batch_start, tile.batch_stop, *shape].append(tile)
        return sorted(together for alike in shapes.values() for together in _runs(sorted(alike)))

    def takes(self, q: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
        return q.device.type == "cpu" and not score.extras

    def forward(self, q, k, v, work, score, coordinates=None):
        flip, times = work.lo == 0, work.times
        q, k, v = _stacked(times, q, k, v)
        if flip:
            q, k, v = _flipped(q, k, v)
        value_dim = v.size(-1)
        q, k, v = _equally_wide(q, *_together(k, v))
        out, lse = _forward_cpu(q, k, v, work.hi < OPEN or flip, score.scale)
        out = _narrowed(out, value_dim)
        if times == 1 and not flip:
            return out, lse
        out, lse = _in_a_row(times, *(_flipped(out, lse.unsqueeze(-1)) if flip else (out, lse.unsqueeze(-1))))
        return out, lse.squeeze(-1)

    def backward(self, grad_out, q, k, v, out, lse, work, score, coordinates=None):
        flip, times = work.lo == 0, work.times
        if times > 1:
            grad_out, q, k, v, out, lse = _stacked(times, grad_out, q, k, v, out, lse.unsqueeze(-1))
            lse = lse.squeeze(-1)
        if flip:
            grad_out, q, k, v, out = _flipped(grad_out, q, k, v, out)
            lse = lse.flip(-1)
        dim, value_dim = q.size(-1), v.size(-1)
        grad_out, q, k, v, out = _equally_wide(grad_out, q, *_together(k, v), out)
        grads = _backward_cpu(grad_out, q, k, v, out, lse, work.hi < OPEN or flip, score.scale)
        dq, dk, dv = _in_a_row(times, *(_flipped(*grads) if flip else grads))
        return _narrowed(dq, dim), _narrowed(dk, dim), _narrowed(dv, value_dim)


class TorchCudaKernel(FlashKernel):
    """On CUDA: FlashAttention 2 inside torch, in half precision; windows and varlen are native."""

    name = "torch"

    def takes(self, q: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
        return super().takes(q, v, score) and available.torch_has_flash()

    def run_forward(self, q, k, v, launch, score):
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, launch.cu_q, launch.cu_k, launch.max_q, launch.max_k, 0.0, launch.causal, False,
            scale=score.scale, window_size_left=launch.left, window_size_right=launch.right,
        )  # fmt: skip
        return out, lse

    def run_backward(self, grad_out, q, k, v, out, lse, launch, score):
        # Without dropout the kernel never reads its random state. None for cu_seqlens arrives as the undefined tensor,
        # which is what torch's own dense backward hands on.
        no_rng = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        return aten._flash_attention_backward(
            grad_out.contiguous(), q, k, v, out.contiguous(), lse, launch.cu_q, launch.cu_k, launch.max_q, launch.max_k,
            0.0, launch.causal, no_rng, unused,
            scale=score.scale, window_size_left=launch.left, window_size_right=launch.right,
        )  # fmt: skip


def _forward_cpu(q, k, v, causal, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=None, scale=scale)


def _backward_cpu(grad_out, q, k, v, out, lse, causal, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=scale
    )


def _runs(tiles: Sequence[Tile]) -> Iterable[TileBatch]:
    """Sorted tiles of one shape and band, joined where the queries and keys of each lie right behind the last one's."""
    last: TileBatch | None = None
    for tile in tiles:
        one_row = tile.batch_stop - tile.batch_start == 1
        if last and one_row and (last.q_stop, last.k_stop) == (tile.q_start, tile.k_start):
            last = last._replace(q_stop=tile.q_stop, k_stop=tile.k_stop, times=last.times + 1)
            continue
        if last:
            yield last
        last = TileBatch(*tile, times=1)
    if last:
        yield last


def _stacked(times: int, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """[1, H, times * n, d] as [times, H, n, d], views."""
    if times == 1:
        return tensors
    return [x[0].unflatten(1, (times, -1)).transpose(0, 1) for x in tensors]


def _in_a_row(times: int, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Back; views of what the operators return, which has [times, n, H, d] underneath."""
    if times == 1:
        return tensors
    return [x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0) for x in tensors]


def _flipped(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.flip(-2) for tensor in tensors)


def _together(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    return [x.contiguous() for x in tensors] if tensors[0].size(-2) >= MANY_KEYS else tensors


def _narrowed(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.size(-1) == width else x[..., :width]


def _equally_wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The operators want v as wide as q and k; zero columns change nothing."""
    widths = {x.size(-1) for x in tensors}
    if len(widths) == 1:
        return list(tensors)
    width = max(widths)
    return [F.pad(x, (0, width - x.size(-1))) if x.size(-1) < width else x for x in tensors]
