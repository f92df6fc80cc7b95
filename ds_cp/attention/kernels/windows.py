"""Bands of tiles as FlashAttention's windows, and neighbouring tiles of one window as one varlen launch.

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
"""An edge of a window that excludes nothing."""

Edge = tuple[float, float]
"""The values of one edge of a window that draw a tile's band: one number, or all from some number on."""


@dataclass(frozen=True, eq=False)
class Launch:
    """Tiles that one call of a kernel computes; indexes like the tile that covers them.

    Attributes:
        tiles: in order, queries and keys of each right behind those of the one before.
        left, right: the window that draws every tile's band.
        cu_q, cu_k: where tiles start and end among the launch's queries and keys, int32 [n + 1] on the device; None
            for a single tile.
        max_q, max_k: of the longest tile.
    """

    tiles: tuple[Tile, ...]
    left: int
    right: int
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    max_q: int
    max_k: int

    batch_start = property(lambda self: self.tiles[0].batch_start)
    batch_stop = property(lambda self: self.tiles[0].batch_stop)
    q_start = property(lambda self: self.tiles[0].q_start)
    q_stop = property(lambda self: self.tiles[-1].q_stop)
    k_start = property(lambda self: self.tiles[0].k_start)
    k_stop = property(lambda self: self.tiles[-1].k_stop)
    several = property(lambda self: self.cu_q is not None)
    causal = property(lambda self: (self.left, self.right) == (ALL, 0))


def edges(tile: Tile) -> tuple[Edge, Edge]:
    """The windows (left, right) that draw the band of a tile."""
    m, n = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
    left = (n - 1, inf) if tile.lo == -OPEN else (n - m - tile.lo,) * 2
    right = (m - 1, inf) if tile.hi == OPEN else (tile.hi - n + m,) * 2
    if left[0] < 0 or right[0] < 0:
        raise AssertionError(f"{tile} has queries that see no key, or keys that no query sees")
    return left, right


def fit(tile: Tile) -> Iterator[Tile]:
    """Split what FlashAttention's windows cannot say off a tile with many more queries than keys.

    FlashAttention 2 takes an edge of at least n for open, which it is only while m <= n, and gives an open right edge
    the value n when the left one is closed. Both would show keys that the band hides, or hide what it shows, without
    a word.
    """
    m, n = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
    if tile.hi < OPEN and tile.hi - n + m >= n:
        cut = n - 1 - tile.hi  # from this query on the last key is seen
        yield from _piece(tile, 0, cut, 0, n - 1)
        skip = max(0, tile.lo + cut)
        yield from fit(_only(tile, cut, m, skip, n, hi=OPEN))
    elif tile.lo > -OPEN and tile.hi == OPEN and m > n + 1:
        cut = 1 - tile.lo  # up to this query all keys are seen
        yield _only(tile, 0, cut, 0, n, lo=-OPEN)
        yield _only(tile, cut, m, 1, n, hi=OPEN)
    else:
        yield tile


def _piece(tile: Tile, q0: int, q1: int, k0: int, k1: int) -> Iterator[Tile]:
    if q0 < q1 and k0 < k1:
        yield _only(tile, q0, q1, k0, k1)


def _only(tile: Tile, q0: int, q1: int, k0: int, k1: int, lo: int | None = None, hi: int | None = None) -> Tile:
    """A part of a tile; edges of the band that exclude nothing in it are opened."""
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
    """Join neighbours that one window draws, for example the documents of a packed row, causal each.

    A tile with more than one batch row, one query or many more queries than keys stays alone: its rows do not follow
    each other in memory, or old FlashAttention takes a road of its own for it.
    """
    launches: list[Launch] = []
    together: list[Tile] = []
    left: Edge = (0, inf)
    right: Edge = (0, inf)
    for tile in tiles:
        more_left, more_right = edges(tile)
        both_left, both_right = _meet(left, more_left), _meet(right, more_right)
        joins = together and varlen and _follows(together[-1], tile) and both_left and both_right
        if together and not joins:
            launches.append(_launch(together, left, right, device))
            together, both_left, both_right = [], more_left, more_right
        elif not together:
            both_left, both_right = more_left, more_right
        together.append(tile)
        left, right = both_left, both_right
    if together:
        launches.append(_launch(together, left, right, device))
    return launches


def _follows(last: Tile, tile: Tile) -> bool:
    return (
        last[:2] == tile[:2]
        and tile.batch_stop - tile.batch_start == 1
        and last.q_stop == tile.q_start
        and last.k_stop == tile.k_start
        and all(t.q_stop - t.q_start <= t.k_stop - t.k_start + 1 for t in (last, tile))
    )


def _meet(a: Edge, b: Edge) -> Edge | None:
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return (low, high) if low <= high else None


def _launch(tiles: list[Tile], left: Edge, right: Edge, device: torch.device) -> Launch:
    lengths_q = [tile.q_stop - tile.q_start for tile in tiles]
    lengths_k = [tile.k_stop - tile.k_start for tile in tiles]
    alone = len(tiles) == 1

    def boundaries(lengths: list[int]) -> torch.Tensor | None:
        if alone:
            return None
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return ends.to(device, non_blocking=True)

    return Launch(
        tiles=tuple(tiles),
        left=ALL if left[1] == inf else int(left[0]),
        right=ALL if right[1] == inf else int(right[0]),
        cu_q=boundaries(lengths_q),
        cu_k=boundaries(lengths_k),
        max_q=max(lengths_q),
        max_k=max(lengths_k),
    )
