"""FlashAttention as torch ships it: the CPU operator, and on CUDA the aten flash pair. No extra package."""

from __future__ import annotations

from typing import Iterable

import torch
import torch.nn.functional as F

from ds_cp.attention.score import Score
from ds_cp.mask import OPEN, Tile, lower

aten = torch.ops.aten


class TorchKernel:
    """Runs "all keys" and "causal from the top left"; other bands are lowered to these two.

    An anti-causal square (``lo = 0``) is a causal one with both orders flipped.
    """

    name = "torch"

    def lower(self, tile: Tile) -> Iterable[Tile]:
        return lower(tile)

    def takes(self, q: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
        return q.device.type == "cpu" or (q.dtype in (torch.bfloat16, torch.float16) and q.size(-1) <= 256)

    def forward(self, q, k, v, tile, score):
        flip = tile.lo == 0
        if flip:
            q, k, v = _flipped(q, k, v)
        width = v.size(-1)
        v = _padded(v, q.size(-1))
        out, lse = (_forward_cuda if q.is_cuda else _forward_cpu)(q, k, v, tile.hi < OPEN or flip, score.scale)
        out = out[..., :width]
        return _flipped(out, lse.unsqueeze(-1), squeeze=True) if flip else (out, lse)

    def backward(self, grad_out, q, k, v, out, lse, tile, score):
        flip = tile.lo == 0
        if flip:
            grad_out, q, k, v, out = _flipped(grad_out, q, k, v, out)
            lse = lse.flip(-1)
        width = v.size(-1)
        grad_out, v, out = (_padded(x, q.size(-1)) for x in (grad_out, v, out))
        grads = (_backward_cuda if q.is_cuda else _backward_cpu)(
            grad_out, q, k, v, out, lse, tile.hi < OPEN or flip, score.scale
        )
        dq, dk, dv = _flipped(*grads) if flip else grads
        return dq, dk, dv[..., :width]


def _forward_cpu(q, k, v, causal, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=None, scale=scale)


def _backward_cpu(grad_out, q, k, v, out, lse, causal, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=scale
    )


def _forward_cuda(q, k, v, causal, scale):
    width = v.size(-1)
    q, k, v = (_aligned(x).transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, None, None, q.size(1), k.size(1), 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2)[..., :width], lse


def _backward_cuda(grad_out, q, k, v, out, lse, causal, scale):
    width = q.size(-1)
    no_rng = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout is 0: the kernel never reads its seed
    grad_out, q, k, v, out = (_aligned(x).transpose(1, 2) for x in (grad_out, q, k, v, out))
    grads = aten._flash_attention_backward(
        grad_out.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), None, None, q.size(1), k.size(1),
        0.0, causal, no_rng, no_rng[:1], scale=scale,
    )  # fmt: skip
    return tuple(grad.transpose(1, 2)[..., :width] for grad in grads)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """The CUDA kernel wants head dims in multiples of 8."""
    return _padded(x, -(-x.size(-1) // 8) * 8)


def _flipped(*tensors: torch.Tensor, squeeze: bool = False):
    flipped = [tensor.flip(-2) for tensor in tensors]
    if squeeze:
        flipped[-1] = flipped[-1].squeeze(-1)
    return tuple(flipped)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """The operators want v as wide as q and k; zero columns change nothing."""
    return F.pad(x, (0, width - x.size(-1))) if x.size(-1) < width else x
