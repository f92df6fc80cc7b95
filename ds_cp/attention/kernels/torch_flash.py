"""FlashAttention as torch ships it: the operator for CPUs, and the aten flash pair on CUDA. Needs no other package."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Iterable, NamedTuple, Sequence

import torch
import torch.nn.functional as F

from ds_cp.attention.kernels import available
from ds_cp.attention.kernels.flash import FlashKernel
from ds_cp.attention.kernels.windows import Launch
from ds_cp.attention.score import Score, TileCoordinates
from ds_cp.mask.rules import OPEN
from ds_cp.mask.tile import Tile, lower

aten = torch.ops.aten

MANY_KEYS = 4096
"""Number of keys from which it pays to copy each head's keys together first: the CPU operator reads all keys once per block
of queries. Measured: 3% faster, the copy included."""


class TileBatch(NamedTuple):
    """Adjacent tiles of one shape and band, which one call computes as a batch.

    The ranges are those of the rectangle that covers the tiles.

    Attributes:
        lo, hi: The band of each tile.
        n_tiles: Number of tiles.
    """

    batch_start: int
    batch_stop: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int
    hi: int
    n_tiles: int

    @property
    def flipped(self) -> bool:
        """Whether the tiles are anti-causal squares (``lo = 0``): causal ones with the order of queries and keys reversed."""
        return self.lo == 0

    @property
    def causal(self) -> bool:
        """Whether the operator's causal mask applies, once the order is reversed."""
        return self.hi < OPEN or self.lo == 0


class TorchKernel:
    """The kernel for CPUs. Its operator has two bands, "all keys" and "causal from the top left"; others are lowered to them."""

    name = "torch"

    def lower(self, tile: Tile) -> Iterable[Tile]:
        return lower(tile)

    def launches(self, tiles: Sequence[Tile], device: torch.device) -> Sequence[TileBatch]:
        """Tiles of equal shape as batches, such as documents of one length or the squares of a window."""
        by_shape: dict[tuple[int, ...], list[Tile]] = defaultdict(list)
        for tile in tiles:
            shape = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start, tile.lo, tile.hi
            by_shape[tile.batch_start, tile.batch_stop, *shape].append(tile)
        return sorted(batch for alike in by_shape.values() for batch in _join_adjacent(sorted(alike)))

    def takes(self, k: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
        return k.device.type == "cpu" and not score.features

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: TileBatch,
        score: Score,
        coordinates: TileCoordinates | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = _tiles_to_batch(tiles.n_tiles, q, k, v)
        if tiles.flipped:
            q, k, v = _flip(q, k, v)
        value_dim = v.size(-1)
        k, v = _contiguous_if_long(k, v)
        q, k, v = _pad_head_dims(q, k, v)
        out, lse = _forward_cpu(q, k, v, tiles.causal, score.scale)
        out = _slice_head_dim(out, value_dim)
        if tiles.n_tiles == 1 and not tiles.flipped:
            return out, lse
        lse = lse.unsqueeze(-1)
        if tiles.flipped:
            out, lse = _flip(out, lse)
        out, lse = _batch_to_tiles(tiles.n_tiles, out, lse)
        return out, lse.squeeze(-1)

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tiles: TileBatch,
        score: Score,
        coordinates: TileCoordinates | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if tiles.n_tiles > 1:
            grad_out, q, k, v, out, lse = _tiles_to_batch(tiles.n_tiles, grad_out, q, k, v, out, lse.unsqueeze(-1))
            lse = lse.squeeze(-1)
        if tiles.flipped:
            grad_out, q, k, v, out = _flip(grad_out, q, k, v, out)
            lse = lse.flip(-1)
        dim, value_dim = q.size(-1), v.size(-1)
        k, v = _contiguous_if_long(k, v)
        grad_out, q, k, v, out = _pad_head_dims(grad_out, q, k, v, out)
        grads: Sequence[torch.Tensor] = _backward_cpu(grad_out, q, k, v, out, lse, tiles.causal, score.scale)
        if tiles.flipped:
            grads = _flip(*grads)
        dq, dk, dv = _batch_to_tiles(tiles.n_tiles, *grads)
        return _slice_head_dim(dq, dim), _slice_head_dim(dk, dim), _slice_head_dim(dv, value_dim)


class TorchCudaKernel(FlashKernel):
    """The kernel for CUDA: torch's FlashAttention 2, in half precision, with windows and varlen."""

    name = "torch"

    def takes(self, k: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
        return super().takes(k, v, score) and available.torch_has_flash()

    def run_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: Launch, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, launch.cu_q, launch.cu_k, launch.max_q, launch.max_k, 0.0, launch.causal, False,
            scale=score.scale, window_size_left=launch.left, window_size_right=launch.right,
        )  # fmt: skip
        return out, lse

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
        # None for cu_seqlens becomes the undefined tensor, which torch's own dense backward passes, too.
        no_rng, unused = _no_random_state(q.device)
        dq, dk, dv = aten._flash_attention_backward(
            grad_out.contiguous(), q, k, v, out.contiguous(), lse, launch.cu_q, launch.cu_k, launch.max_q, launch.max_k,
            0.0, launch.causal, no_rng, unused,
            scale=score.scale, window_size_left=launch.left, window_size_right=launch.right,
        )  # fmt: skip
        return dq, dk, dv


@cache
def _no_random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The random state of a backward pass without dropout, which the kernel never reads; made once, not per launch."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def _forward_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=None, scale=scale)
    return out, lse


def _backward_cpu(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=scale
    )
    return dq, dk, dv


def _join_adjacent(tiles: Sequence[Tile]) -> Iterable[TileBatch]:
    """Sorted tiles of one shape and band, joined where queries and keys of each follow those of the one before."""
    last: TileBatch | None = None
    for tile in tiles:
        one_row = tile.batch_stop - tile.batch_start == 1
        if last and one_row and (last.q_stop, last.k_stop) == (tile.q_start, tile.k_start):
            last = last._replace(q_stop=tile.q_stop, k_stop=tile.k_stop, n_tiles=last.n_tiles + 1)
            continue
        if last:
            yield last
        last = TileBatch(*tile, n_tiles=1)
    if last:
        yield last


def _tiles_to_batch(n_tiles: int, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """[1, H, n_tiles * n, d] as views [n_tiles, H, n, d]."""
    if n_tiles == 1:
        return tensors
    return [x[0].unflatten(1, (n_tiles, -1)).transpose(0, 1) for x in tensors]


def _batch_to_tiles(n_tiles: int, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """[n_tiles, H, n, d] as [1, H, n_tiles * n, d]; views of what the operators return, whose memory is [n_tiles, n, H, d]."""
    if n_tiles == 1:
        return tensors
    return [x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0) for x in tensors]


def _flip(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in the reverse order of tokens."""
    return tuple(x.flip(-2) for x in tensors)


def _contiguous_if_long(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (k.contiguous(), v.contiguous()) if k.size(-2) >= MANY_KEYS else (k, v)


def _pad_head_dims(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors with equal head dims, as the operators need it; channels of zeros change nothing."""
    head_dims = {x.size(-1) for x in tensors}
    if len(head_dims) == 1:
        return tensors
    largest = max(head_dims)
    return [F.pad(x, (0, largest - x.size(-1))) if x.size(-1) < largest else x for x in tensors]


def _slice_head_dim(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    return x if x.size(-1) == head_dim else x[..., :head_dim]
