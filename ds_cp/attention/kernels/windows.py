"""Bands of tiles as FlashAttention's windows, and adjacent tiles with a common window as one varlen launch.

FlashAttention's window ``(left, right)`` is aligned bottom-right: query ``i`` of m sees key ``j`` of n when
``i + n - m - left <= j <= i + n - m + right``. A tile's band ``lo <= j - i <= hi`` is the window
``(n - m - lo, hi - n + m)``. Both numbers are >= 0, because every query of a tile sees a key and every key is seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Iterator, Sequence

import torch

from ds_cp.mask.rules import OPEN
from ds_cp.mask.tile import Tile

ALL = -1
"""A window's edge that excludes nothing."""

EdgeRange = tuple[float, float]
"""Range of the values (ends included) that one edge of a window may have: one for a closed edge, all from a number on for an open one."""


@dataclass(frozen=True, eq=False)
class Launch:
    """Tiles that one call of a kernel computes; its ranges are those of the rectangle that covers the tiles.

    Attributes:
        tiles: The tiles in order; queries and keys of each follow those of the one before.
        left, right: The window, which is the band of every tile.
        cu_q, cu_k: Cumulative lengths of the tiles' queries and keys, int32 [tiles + 1] on the device; None for one tile.
        max_q, max_k: Numbers of queries and of keys of the longest tile.
    """

    tiles: tuple[Tile, ...]
    left: int
    right: int
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    max_q: int
    max_k: int

    @property
    def batch_start(self) -> int:
        return self.tiles[0].batch_start

    @property
    def batch_stop(self) -> int:
        return self.tiles[0].batch_stop

    @property
    def q_start(self) -> int:
        return self.tiles[0].q_start

    @property
    def q_stop(self) -> int:
        return self.tiles[-1].q_stop

    @property
    def k_start(self) -> int:
        return self.tiles[0].k_start

    @property
    def k_stop(self) -> int:
        return self.tiles[-1].k_stop

    @property
    def varlen(self) -> bool:
        """Whether there are several tiles, so that batch and length share one dim and lengths are in ``cu_q`` and ``cu_k``."""
        return self.cu_q is not None

    @property
    def causal(self) -> bool:
        return (self.left, self.right) == (ALL, 0)


def window_edges(tile: Tile) -> tuple[EdgeRange, EdgeRange]:
    """The left and right edges of the windows that are a tile's band."""
    m, n = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
    left = (n - 1, inf) if tile.lo == -OPEN else (n - m - tile.lo,) * 2
    right = (m - 1, inf) if tile.hi == OPEN else (tile.hi - n + m,) * 2
    if left[0] < 0 or right[0] < 0:
        raise AssertionError(f"{tile} has queries that see no key, or keys that no query sees")
    return left, right


def split_to_windows(tile: Tile) -> Iterator[Tile]:
    """Splits a tile with many more queries than keys into tiles whose bands FlashAttention's windows can express.

    FlashAttention 2 treats an edge of at least n as open, which it is only while m <= n, and sets an open right edge to n
    when the left one is closed. Either would show keys that the band hides, or hide keys that it shows, without an error.
    """
    m, n = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
    if tile.hi < OPEN and tile.hi - n + m >= n:
        cut = n - 1 - tile.hi  # from this query on, the last key is seen
        first_key = max(0, tile.lo + cut)
        if cut > 0 and n > 1:
            yield _part(tile, 0, cut, 0, n - 1)
        yield from split_to_windows(_part(tile, cut, m, first_key, n, hi=OPEN))
    elif tile.lo > -OPEN and tile.hi == OPEN and m > n + 1:
        cut = 1 - tile.lo  # up to this query, all keys are seen
        yield _part(tile, 0, cut, 0, n, lo=-OPEN)
        yield _part(tile, cut, m, 1, n, hi=OPEN)
    else:
        yield tile


def _part(tile: Tile, q0: int, q1: int, k0: int, k1: int, lo: int | None = None, hi: int | None = None) -> Tile:
    """Part of a tile; edges of the band that exclude nothing in it become open."""
    lo = (tile.lo if tile.lo == -OPEN else tile.lo + q0 - k0) if lo is None else lo
    hi = (tile.hi if tile.hi == OPEN else tile.hi + q0 - k0) if hi is None else hi
    return tile._replace(
        q_start=tile.q_start + q0,
        q_stop=tile.q_start + q1,
        k_start=tile.k_start + k0,
        k_stop=tile.k_start + k1,
        lo=-OPEN if lo <= q0 - q1 + 1 else lo,
        hi=OPEN if hi >= k1 - k0 - 1 else hi,
    )


def launches(tiles: Sequence[Tile], device: torch.device, varlen: bool = True) -> list[Launch]:
    """Joins adjacent tiles that have a common window, such as the causal tiles of packed documents.

    A tile with several batch rows is not joined, because its rows are not contiguous in memory. Nor is a tile with one
    query or with many more queries than keys: FlashAttention versions have special cases for them.
    """
    launches: list[Launch] = []
    joined: list[Tile] = []
    left = right = (0.0, inf)
    for tile in tiles:
        tile_left, tile_right = window_edges(tile)
        common_left, common_right = _intersect(left, tile_left), _intersect(right, tile_right)
        if joined and varlen and _follows(joined[-1], tile) and common_left and common_right:
            joined.append(tile)
            left, right = common_left, common_right
        else:
            if joined:
                launches.append(_launch(joined, left, right, device))
            joined, left, right = [tile], tile_left, tile_right
    if joined:
        launches.append(_launch(joined, left, right, device))
    return launches


def _follows(last: Tile, tile: Tile) -> bool:
    """Whether a tile's queries and keys follow those of the last one in memory, and neither tile is a special case."""
    return (
        last[:2] == tile[:2]
        and tile.batch_stop - tile.batch_start == 1
        and last.q_stop == tile.q_start
        and last.k_stop == tile.k_start
        and all(t.q_stop - t.q_start <= t.k_stop - t.k_start + 1 for t in (last, tile))
    )


def _intersect(a: EdgeRange, b: EdgeRange) -> EdgeRange | None:
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return (low, high) if low <= high else None


def _launch(tiles: list[Tile], left: EdgeRange, right: EdgeRange, device: torch.device) -> Launch:
    q_lengths = [tile.q_stop - tile.q_start for tile in tiles]
    k_lengths = [tile.k_stop - tile.k_start for tile in tiles]

    def cumulative(lengths: list[int]) -> torch.Tensor | None:
        if len(tiles) == 1:
            return None
        sums = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return sums.to(device, non_blocking=True)

    return Launch(
        tiles=tuple(tiles),
        left=ALL if left[1] == inf else int(left[0]),
        right=ALL if right[1] == inf else int(right[0]),
        cu_q=cumulative(q_lengths),
        cu_k=cumulative(k_lengths),
        max_q=max(q_lengths),
        max_k=max(k_lengths),
    )
