"""Attention written out in plain torch: any band, any dtype, one score matrix per tile."""

from __future__ import annotations

from typing import Iterable

import torch

from ds_cp.attention.score import Score
from ds_cp.mask import OPEN, Tile


class ReferenceKernel:
    """The formulas, for tests and for what no fused kernel takes. Holds a tile's scores: [B, H, m, n]."""

    name = "reference"

    def lower(self, tile: Tile) -> Iterable[Tile]:
        return (tile,)

    def takes(self, q: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
        return True

    def forward(self, q, k, v, tile, score):
        scores = self._scores(q, k, tile, score)
        lse = torch.logsumexp(scores, dim=-1)
        probabilities = torch.exp(scores - lse.unsqueeze(-1))
        return _by_group(probabilities, v.to(probabilities.dtype)), lse

    def backward(self, grad_out, q, k, v, out, lse, tile, score):
        probabilities = torch.exp(self._scores(q, k, tile, score) - lse.unsqueeze(-1))
        q, k, v, grad_out, out = (x.to(probabilities.dtype) for x in (q, k, v, grad_out, out))
        d_scores = probabilities * (
            _by_group(grad_out, v.transpose(-1, -2)) - (grad_out * out).sum(-1, keepdim=True)
        )
        dq = _by_group(d_scores, k) * score.scale
        dk = _sum_groups(d_scores.transpose(-1, -2) @ q, k.size(1)) * score.scale
        dv = _sum_groups(probabilities.transpose(-1, -2) @ grad_out, v.size(1))
        return dq, dk, dv

    @staticmethod
    def _scores(q: torch.Tensor, k: torch.Tensor, tile: Tile, score: Score) -> torch.Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = _by_group(q.to(dtype), k.to(dtype).transpose(-1, -2)) * score.scale
        if tile.lo > -OPEN or tile.hi < OPEN:
            i = torch.arange(q.size(-2), device=q.device).unsqueeze(-1)
            j = torch.arange(k.size(-2), device=q.device)
            scores = scores.masked_fill((j - i < tile.lo) | (j - i > tile.hi), float("-inf"))
        return scores


def _by_group(per_query_head: torch.Tensor, per_key_head: torch.Tensor) -> torch.Tensor:
    """Matmul of [B, H, ...] with [B, h, ...]: each key head serves H / h query heads."""
    heads, groups = per_query_head.size(1), per_key_head.size(1)
    grouped = per_query_head.unflatten(1, (groups, heads // groups))
    return (grouped @ per_key_head.unsqueeze(2)).flatten(1, 2)


def _sum_groups(per_query_head: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum [B, H, ...] over the query heads that share a key head."""
    return per_query_head.unflatten(1, (groups, -1)).sum(2)
