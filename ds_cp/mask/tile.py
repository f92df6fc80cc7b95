"""Tiles, the rectangles of attention that kernels compute, and how to split them."""

from __future__ import annotations

from typing import Iterator, NamedTuple

import numpy as np

from ds_cp.layout import Run
from ds_cp.mask.rules import OPEN


class Tile(NamedTuple):
    """A rectangle of batch rows, queries and keys in local indices, with a band inside it.

    Query ``i`` of the tile sees key ``j`` of the tile, both counted from the tile's corner, if ``lo <= j - i <= hi``. ``-OPEN``
    and ``OPEN`` exclude nothing. Every query of a tile sees at least one key.
    """

    batch_start: int
    batch_stop: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int
    hi: int

    @property
    def area(self) -> int:
        """Number of visible (query, key) pairs per head."""
        i = np.arange(self.q_stop - self.q_start)
        first, last = np.maximum(0, i + self.lo), np.minimum(self.k_stop - self.k_start - 1, i + self.hi)
        return int((last - first + 1).sum()) * (self.batch_stop - self.batch_start)


def lower(tile: Tile) -> Iterator[Tile]:
    """Split a tile into disjoint tiles without a band, causal squares (hi = 0) and anti-causal squares (lo = 0).

    A kernel that has only no mask and a causal mask aligned to the top left corner can so run any band: an anti-causal square
    is a causal one with the orders of queries and keys reversed.
    """
    n_q, n_k = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
    if tile.lo == -OPEN and tile.hi == OPEN:
        yield tile
    elif tile.lo == -OPEN:
        for (q0, q1, k0, k1), full in _under_diagonal(n_q, n_k, tile.hi):
            yield _sub_tile(tile, q0, q1, k0, k1, -OPEN, OPEN if full else 0)
    elif tile.hi == OPEN:
        for (q0, q1, k0, k1), full in _under_diagonal(n_q, n_k, n_k - n_q - tile.lo):
            yield _sub_tile(tile, n_q - q1, n_q - q0, n_k - k1, n_k - k0, -OPEN if full else 0, OPEN)
    else:
        width = tile.hi - tile.lo + 1
        for q0 in range(0, n_q, width):
            q1 = min(n_q, q0 + width)
            # Only the left edge of the band excludes keys before the middle, and only the right edge keys after it.
            middle = min(n_k, q0 + tile.hi + 1)
            for k0, k1, lo, hi in ((0, middle, tile.lo, OPEN), (middle, n_k, -OPEN, tile.hi)):
                for piece in _trim(q0, q1, k0, k1, lo, hi):
                    yield from lower(_sub_tile(tile, *piece))


def blocks(tile: Tile, size: int) -> Iterator[Tile]:
    """Split a tile into tiles of at most ``size`` queries and keys, without parts in which no pair is visible."""
    n_q, n_k = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
    if max(n_q, n_k) <= size:
        yield tile
        return
    for q0 in range(0, n_q, size):
        for k0 in range(0, n_k, size):
            for piece in _trim(q0, min(n_q, q0 + size), k0, min(n_k, k0 + size), tile.lo, tile.hi):
                yield _sub_tile(tile, *piece)


def intersect(tile: Tile, q_run: Run, k_run: Run) -> Iterator[Tile]:
    """Part of a tile in a run of queries and a run of keys, with indices counted from the starts of the runs.

    Yields one tile, or none if no pair is visible.
    """
    q0, q1 = max(tile.q_start, q_run[0]), min(tile.q_stop, q_run[1])
    k0, k1 = max(tile.k_start, k_run[0]), min(tile.k_stop, k_run[1])
    corner = tile._replace(q_start=tile.q_start - q_run[0], k_start=tile.k_start - k_run[0])
    if q0 < q1 and k0 < k1:
        for piece in _trim(
            q0 - tile.q_start, q1 - tile.q_start, k0 - tile.k_start, k1 - tile.k_start, tile.lo, tile.hi
        ):
            yield _sub_tile(corner, *piece)


def _under_diagonal(n_q: int, n_k: int, hi: int) -> Iterator[tuple[tuple[int, int, int, int], bool]]:
    """Cover the pairs ``j <= i + hi`` of an n_q x n_k rectangle by one causal square and full rectangles.

    Yields ``(q0, q1, k0, k1)``, and whether the rectangle is full.
    """
    corner = n_k - hi
    yield (0, corner, hi, n_k), False
    if hi:
        yield (0, corner, 0, hi), True
    if corner < n_q:
        yield (corner, n_q, 0, n_k), True


def _trim(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Remove queries that see no key, and keys that no query sees, from a rectangle with the band ``lo <= j - i <= hi``.

    Yields ``(q0, q1, k0, k1, lo, hi)``, with the band relative to the new corner, or nothing if no pair is visible.
    """
    q0, q1 = max(q0, k0 - hi), min(q1, k1 - lo)
    k0, k1 = max(k0, q0 + lo), min(k1, q1 + hi)
    if q0 < q1 and k0 < k1:
        lo, hi = lo + q0 - k0, hi + q0 - k0
        yield q0, q1, k0, k1, (-OPEN if lo <= q0 - q1 + 1 else lo), (OPEN if hi >= k1 - k0 - 1 else hi)


def _sub_tile(tile: Tile, q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Tile:
    return tile._replace(
        q_start=tile.q_start + q0,
        q_stop=tile.q_start + q1,
        k_start=tile.k_start + k0,
        k_stop=tile.k_start + k1,
        lo=lo,
        hi=hi,
    )
