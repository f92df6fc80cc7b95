"""Terms that are added to the scores: each has data of the whole sequence and computes the bias of one tile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable

import torch

from ds_cp.attention.score import TileCoordinates


@dataclass(frozen=True, eq=False)
class ALiBi:
    """ALiBi (Press et al. 2022): a slope per head times the distance between key and query.

    Models add ``slope * k``; this adds ``slope * (k - q)``, which has the same softmax, because the difference is constant
    per query, and no large numbers.

    Attributes:
        slopes: [H], slope of each query head.
        positions: [B, S], position of each token inside its document.
        factor: Factor of the bias, applied after the rounding.
        rounded: Dtype that the model rounds ``slope * k`` to; None for no rounding. A rounded bias depends on where the
            document starts, so it stays ``slope * k``.
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

    def of_heads(self, heads: slice) -> ALiBi:
        return replace(self, slopes=self.slopes[heads])


@dataclass(frozen=True, eq=False)
class BucketedBias:
    """A learned bias per head and bucket of distances (T5, Raffel et al. 2020).

    Attributes:
        table: [buckets, H], the learned biases.
        bucket: Maps distances, key minus query, int64 [m, n], to buckets.
    """

    table: torch.Tensor
    bucket: Callable[[torch.Tensor], torch.Tensor]

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        return self.table[self._buckets(coordinates)].permute(2, 0, 1).unsqueeze(0).to(dtype)

    def of_heads(self, heads: slice) -> BucketedBias:
        return replace(self, table=self.table[:, heads])

    def gradient(self, d_scores: torch.Tensor, coordinates: TileCoordinates) -> torch.Tensor:
        """A tile's share of the table's gradient [buckets, H], from the gradient of its scores [B, H, m, n]."""
        per_pair = d_scores.sum(0).flatten(1).T
        return torch.zeros_like(self.table, dtype=d_scores.dtype).index_add_(
            0, self._buckets(coordinates).flatten(), per_pair
        )

    def _buckets(self, coordinates: TileCoordinates) -> torch.Tensor:
        return self.bucket(coordinates.k[None, :] - coordinates.q[:, None])


@dataclass(frozen=True, eq=False)
class DistanceProfiles:
    """A weighted sum, per query, of learned functions of the distance to earlier keys; 0 beyond their extent (Inkling).

    The weights are extra channels of the query, so they are exchanged and saved together with it.

    Attributes:
        table: [c, extent], c learned functions at distances 0 to extent - 1.
    """

    table: torch.Tensor

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        index, outside = self._index(coordinates)
        return (self._weights(coordinates, dtype) @ self.table.to(dtype)).gather(-1, index).masked_fill(outside, 0)

    def of_heads(self, heads: slice) -> DistanceProfiles:
        return self

    def gradient(self, d_scores: torch.Tensor, coordinates: TileCoordinates) -> torch.Tensor:
        """A tile's share of the table's gradient [c, extent]. Adds the gradient of the weights to the coordinates' sum."""
        assert coordinates.d_extra_query_channels is not None
        index, outside = self._index(coordinates)
        by_distance = d_scores.new_zeros((*d_scores.shape[:3], self.table.size(1)))
        by_distance.scatter_add_(-1, index, d_scores.masked_fill(outside, 0))
        coordinates.d_extra_query_channels[..., : self.table.size(0)] += by_distance @ self.table.to(d_scores.dtype).T
        return torch.einsum("bhmc,bhme->ce", self._weights(coordinates, d_scores.dtype), by_distance)

    def _weights(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        assert coordinates.extra_query_channels is not None
        return coordinates.extra_query_channels[..., : self.table.size(0)].to(dtype)

    def _index(self, coordinates: TileCoordinates) -> tuple[torch.Tensor, torch.Tensor]:
        """Distances, clamped to the table, int64 [B, H, m, n], and which distances are outside of it, bool [m, n]."""
        assert coordinates.extra_query_channels is not None
        distance = coordinates.q[:, None] - coordinates.k[None, :]
        index = distance.clamp(0, self.table.size(1) - 1)
        return index.expand(*coordinates.extra_query_channels.shape[:2], -1, -1), distance != index


@dataclass(frozen=True, eq=False)
class DenseMask:
    """A mask or bias of the whole sequence.

    Attributes:
        mask: [B or 1, H or 1, S, S]; bool, which hides keys where it is False, or a bias to add.
    """

    mask: torch.Tensor

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        batch = coordinates.batch if self.mask.size(0) > 1 else slice(None)
        return as_bias(self.mask[batch][:, :, coordinates.q[:, None], coordinates.k[None, :]], dtype)

    def of_heads(self, heads: slice) -> DenseMask:
        return self if self.mask.size(1) == 1 else replace(self, mask=self.mask[:, heads])


@dataclass(frozen=True, eq=False)
class MaskFunction:
    """A mask by index, evaluated per tile.

    Attributes:
        function: ``function(batch, head, q, k) -> bool``, as a mask function of transformers; it gets indices that broadcast
            to [B, 1, m, n], with head 0.
        origin: [B, S], subtracted from the positions: 0, or the start of each token's document.
    """

    function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    origin: torch.Tensor

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        batch = torch.arange(coordinates.batch.start, coordinates.batch.stop, device=coordinates.q.device).view(
            -1, 1, 1, 1
        )
        rows = self.origin[coordinates.batch]
        q = (coordinates.q - rows[:, coordinates.q])[:, None, :, None]
        k = (coordinates.k - rows[:, coordinates.k])[:, None, None, :]
        return as_bias(self.function(batch, torch.zeros_like(batch), q, k), dtype)

    def of_heads(self, heads: slice) -> MaskFunction:
        return self


def as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as a bias: 0 where a bool mask is True and -inf elsewhere; a mask of another dtype is the bias itself."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
