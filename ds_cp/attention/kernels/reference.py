"""Attention written out in plain torch: any band, any dtype, any score rule, one small score matrix after the other."""

from __future__ import annotations

from typing import Iterable, Sequence

import torch

from ds_cp.attention.score import Score
from ds_cp.mask.rules import OPEN
from ds_cp.mask.tile import Tile, blocks

BLOCK = 1024
"""Queries and keys whose scores exist at once, per head."""


class ReferenceKernel:
    """The formulas, for tests and for what no fused kernel takes. Holds a block's scores: [B, H, BLOCK, BLOCK]."""

    name = "reference"

    def lower(self, tile: Tile) -> Iterable[Tile]:
        return blocks(tile, BLOCK)

    def launches(self, tiles: Sequence[Tile], device: torch.device) -> Sequence[Tile]:
        return tiles

    def takes(self, q: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
        return True

    def forward(self, q, k, v, work, score, coordinates=None):
        scores = _hidden(score.apply(_products(q, k), coordinates), work)
        lse = torch.logsumexp(scores, dim=-1)
        probabilities = score.dropped(_probabilities(scores, lse), coordinates)
        return _by_group(probabilities, v.to(probabilities.dtype)), lse

    def backward(self, grad_out, q, k, v, out, lse, work, score, coordinates=None):
        products = _products(q, k)
        probabilities = _probabilities(_hidden(score.apply(products, coordinates), work), lse)
        q, k, v, grad_out, out = (x.to(probabilities.dtype) for x in (q, k, v, grad_out, out))
        d_probabilities = score.dropped(_by_group(grad_out, v.transpose(-1, -2)), coordinates)
        d_scores = probabilities * (d_probabilities - (grad_out * out).sum(-1, keepdim=True))
        score.collect(d_scores, coordinates)
        d_products = d_scores * score.slope(products)
        dq = _by_group(d_products, k)
        dk = _sum_groups(d_products.transpose(-1, -2) @ q, k.size(1))
        dv = _sum_groups(score.dropped(probabilities, coordinates).transpose(-1, -2) @ grad_out, v.size(1))
        return dq, dk, dv


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return _by_group(q.to(dtype), k.to(dtype).transpose(-1, -2))


def _hidden(scores: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The scores with -inf outside of the tile's band."""
    if tile.lo == -OPEN and tile.hi == OPEN:
        return scores
    i = torch.arange(scores.size(-2), device=scores.device).unsqueeze(-1)
    j = torch.arange(scores.size(-1), device=scores.device)
    return scores.masked_fill((j - i < tile.lo) | (j - i > tile.hi), float("-inf"))


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse); 0 where a term hides every key of a query, whose lse is -inf."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1))


def _by_group(per_query_head: torch.Tensor, per_key_head: torch.Tensor) -> torch.Tensor:
    """Matmul of [B, H, ...] with [B, h, ...]: each key head serves H / h query heads."""
    heads, groups = per_query_head.size(1), per_key_head.size(1)
    grouped = per_query_head.unflatten(1, (groups, heads // groups))
    return (grouped @ per_key_head.unsqueeze(2)).flatten(1, 2)


def _sum_groups(per_query_head: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum [B, H, ...] over the query heads that share a key head."""
    return per_query_head.unflatten(1, (groups, -1)).sum(2)
