"""Terms that are added to the scores: each knows whole-sequence facts and gives a tile its part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable

import torch

from ds_cp.attention.score import TileCoordinates


@dataclass(frozen=True, eq=False)
class ALiBi:
    """ALiBi (Press et al. 2022): a slope per head times the distance between key and query.

    A constant per query drops out of the softmax, so ``slope * (k - q)`` is ``slope * k`` without large numbers.

    Attributes:
        slopes: [H].
        positions: [B, S], where each token stands inside its document.
        factor: on the bias, once it is rounded.
        rounded: the bias is ``slope * k`` rounded to this dtype, as a model defines it; a rounded bias does depend on
            where the document starts.
    """

    slopes: torch.Tensor
    positions: torch.Tensor
    factor: float = 1.0
    rounded: torch.dtype | None = None

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        rows = self.positions[coordinates.batch]
        k = rows[:, coordinates.k][:, None, None, :]
        slopes = self.slopes.view(1, -1, 1, 1)
        if self.rounded is not None:
            return (slopes.to(self.rounded) * k.to(self.rounded)).to(dtype) * self.factor
        return slopes.to(dtype) * self.factor * (k - rows[:, coordinates.q][:, None, :, None])

    def of_heads(self, heads: slice) -> "ALiBi":
        return replace(self, slopes=self.slopes[heads])


@dataclass(frozen=True, eq=False)
class BucketedBias:
    """A learned bias per bucket of distance and head (Raffel et al. 2020), with its table's gradient.

    Attributes:
        table: [buckets, H].
        bucket: maps distances, key minus query, int64 [m, n], to buckets of the table.
    """

    table: torch.Tensor
    bucket: Callable[[torch.Tensor], torch.Tensor]

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        return self.table[self._buckets(coordinates)].permute(2, 0, 1).unsqueeze(0).to(dtype)

    def of_heads(self, heads: slice) -> "BucketedBias":
        return replace(self, table=self.table[:, heads])

    def gradient(self, d_scores: torch.Tensor, coordinates: TileCoordinates) -> torch.Tensor:
        """The table's gradient [buckets, H] from that of a tile's scores [B, H, m, n]."""
        per_pair = d_scores.sum(0).flatten(1).T
        return torch.zeros_like(self.table, dtype=d_scores.dtype).index_add_(
            0, self._buckets(coordinates).flatten(), per_pair
        )

    def _buckets(self, coordinates: TileCoordinates) -> torch.Tensor:
        return self.bucket(coordinates.k[None, :] - coordinates.q[:, None])


@dataclass(frozen=True, eq=False)
class DistanceProfiles:
    """A bias that each query mixes out of learned profiles over the distance to the keys before it; 0 beyond them.

    The weights of the mix are channels of the query behind those that meet the keys, so they travel with it.

    Attributes:
        table: [c, extent], c profiles of the bias at distances 0 to extent - 1.
    """

    table: torch.Tensor

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        index, outside = self._index(coordinates)
        return (self._weights(coordinates, dtype) @ self.table.to(dtype)).gather(-1, index).masked_fill(outside, 0)

    def of_heads(self, heads: slice) -> "DistanceProfiles":
        return self

    def gradient(self, d_scores: torch.Tensor, coordinates: TileCoordinates) -> torch.Tensor:
        """The table's gradient [c, extent] from that of a tile's scores [B, H, m, n]; adds that of the weights."""
        index, outside = self._index(coordinates)
        by_distance = d_scores.new_zeros((*d_scores.shape[:3], self.table.size(1)))
        by_distance.scatter_add_(-1, index, d_scores.masked_fill(outside, 0))
        coordinates.d_extra_query_channels[..., : self.table.size(0)] += by_distance @ self.table.to(d_scores.dtype).T
        return torch.einsum("bhmc,bhme->ce", self._weights(coordinates, d_scores.dtype), by_distance)

    def _weights(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        return coordinates.extra_query_channels[..., : self.table.size(0)].to(dtype)

    def _index(self, coordinates: TileCoordinates) -> tuple[torch.Tensor, torch.Tensor]:
        """Distances as far as profiles go, int64 [B, H, m, n], and which are none of theirs, [m, n]."""
        distance = coordinates.q[:, None] - coordinates.k[None, :]
        index = distance.clamp(0, self.table.size(1) - 1)
        return index.expand(*coordinates.extra_query_channels.shape[:2], -1, -1), distance != index


@dataclass(frozen=True, eq=False)
class DenseMask:
    """A mask or bias that is given whole, [B or 1, H or 1, S, S], and cut per tile; bool hides where it is False."""

    mask: torch.Tensor

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        batch = coordinates.batch if self.mask.size(0) > 1 else slice(None)
        return as_bias(self.mask[batch][:, :, coordinates.q[:, None], coordinates.k[None, :]], dtype)

    def of_heads(self, heads: slice) -> "DenseMask":
        return self if self.mask.size(1) == 1 else replace(self, mask=self.mask[:, heads])


@dataclass(frozen=True, eq=False)
class MaskFunction:
    """A mask by index, ``function(batch, head, q, k) -> bool`` as transformers' mask functions are, asked per tile.

    Attributes:
        function: takes indices that broadcast to [B, 1, m, n].
        origin: [B, S], subtracted from the positions: 0, or where each token's document starts.
    """

    function: Callable
    origin: torch.Tensor

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        batch = torch.arange(coordinates.batch.start, coordinates.batch.stop, device=coordinates.q.device).view(
            -1, 1, 1, 1
        )
        rows = self.origin[coordinates.batch]
        q = (coordinates.q - rows[:, coordinates.q])[:, None, :, None]
        k = (coordinates.k - rows[:, coordinates.k])[:, None, None, :]
        return as_bias(self.function(batch, torch.zeros_like(batch), q, k), dtype)

    def of_heads(self, heads: slice) -> "MaskFunction":
        return self


def as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores for a mask: 0 where a bool one is True, -inf elsewhere; any other as it is."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
