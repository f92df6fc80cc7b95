"""Attention written out in plain torch: any band, any dtype, any score rule, one block of scores at a time."""

from __future__ import annotations

from typing import Iterable, Sequence

import torch

from ds_cp.attention.score import Score, TileCoordinates
from ds_cp.mask.rules import OPEN
from ds_cp.mask.tile import Tile, blocks

BLOCK = 1024
"""Number of queries, and of keys, in a block of scores."""


class ReferenceKernel:
    """The formulas, for tests and for calls that no fused kernel takes. Holds the scores of one block, [B, H, BLOCK, BLOCK]."""

    name = "reference"

    def lower(self, tile: Tile) -> Iterable[Tile]:
        return blocks(tile, BLOCK)

    def launches(self, tiles: Sequence[Tile], device: torch.device) -> Sequence[Tile]:
        return tiles

    def takes(self, k: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
        return True

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tile: Tile,
        score: Score,
        coordinates: TileCoordinates | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = _mask_band(score.apply(_products(q, k), coordinates), tile)
        lse = torch.logsumexp(scores, dim=-1)
        probabilities = score.apply_dropout(_probabilities(scores, lse), coordinates)
        return _grouped_matmul(probabilities, v.to(probabilities.dtype)), lse

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
        coordinates: TileCoordinates | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        products = _products(q, k)
        probabilities = _probabilities(_mask_band(score.apply(products, coordinates), tile), lse)
        q, k, v, grad_out, out = (x.to(probabilities.dtype) for x in (q, k, v, grad_out, out))
        d_probabilities = score.apply_dropout(_grouped_matmul(grad_out, v.transpose(-1, -2)), coordinates)
        d_scores = probabilities * (d_probabilities - (grad_out * out).sum(-1, keepdim=True))
        score.add_table_gradients(d_scores, coordinates)
        d_products = d_scores * score.derivative(products)
        dq = _grouped_matmul(d_products, k)
        dk = _sum_query_heads(d_products.transpose(-1, -2) @ q, k.size(1))
        dropped = score.apply_dropout(probabilities, coordinates)
        dv = _sum_query_heads(dropped.transpose(-1, -2) @ grad_out, v.size(1))
        return dq, dk, dv


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q k^T [B, H, m, n], in fp32 or fp64."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return _grouped_matmul(q.to(dtype), k.to(dtype).transpose(-1, -2))


def _mask_band(scores: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The scores, with -inf outside of the tile's band."""
    if tile.lo == -OPEN and tile.hi == OPEN:
        return scores
    i = torch.arange(scores.size(-2), device=scores.device).unsqueeze(-1)
    j = torch.arange(scores.size(-1), device=scores.device)
    return scores.masked_fill((j - i < tile.lo) | (j - i > tile.hi), float("-inf"))


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse); 0 where a term hides all keys of a query, whose lse is -inf."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1))


def _grouped_matmul(per_query_head: torch.Tensor, per_kv_head: torch.Tensor) -> torch.Tensor:
    """Matmul of [B, H, ...] with [B, h, ...], where H / h query heads share a KV head."""
    query_heads, kv_heads = per_query_head.size(1), per_kv_head.size(1)
    grouped = per_query_head.unflatten(1, (kv_heads, query_heads // kv_heads))
    product: torch.Tensor = grouped @ per_kv_head.unsqueeze(2)
    return product.flatten(1, 2)


def _sum_query_heads(per_query_head: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[B, H, ...] summed over the query heads that share a KV head, [B, h, ...]."""
    grouped: torch.Tensor = per_query_head.unflatten(1, (kv_heads, -1))
    return grouped.sum(2)
