"""From segments to the two tables of a batch: rows and tiles.

All of it is integer ranges. A *segment* (:mod:`ds_cp.mask.rules`) says, in global positions, which keys a range of queries
sees; a *tile* is the part of a segment in which one rank's queries meet another rank's keys, in local indices. ``rows``
are the keys of a tile's owner that its queries need. Every mask, layout and method is data in these tables; no tensor
of S x S exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import numpy as np

from ds_cp.layout import Layout, Run
from ds_cp.mask.rules import BATCH_START, BATCH_STOP, K_START, K_STOP, LEFT, OPEN, Q_START, Q_STOP, RIGHT


class Tile(NamedTuple):
    """One rectangle of work in local indices: batch rows, query rows, key rows and the band inside it.

    Query ``i`` of the tile sees key ``j`` of the tile (both counted from the tile's corner) when ``lo <= j - i <= hi``;
    ``-OPEN`` and ``OPEN`` exclude nothing. Every query of a tile sees at least one key.
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
        """Number of (query, key) pairs that are computed, per head."""
        i = np.arange(self.q_stop - self.q_start)
        first, last = np.maximum(0, i + self.lo), np.minimum(self.k_stop - self.k_start - 1, i + self.hi)
        return int((last - first + 1).sum()) * (self.batch_stop - self.batch_start)


def find_tiles(segments: np.ndarray, q_runs: Sequence[Run], k_runs: Sequence[Run]) -> list[Tile]:
    """Tiles in which the queries of one owner meet the keys of another.

    Args:
        segments: int64 [n, 9], in global positions.
        q_runs, k_runs: what the two owners hold; local indices count through the runs in order.
    """
    if q_runs == k_runs and np.isin(segments[:, [LEFT, RIGHT]], (-1, 0, OPEN)).all():
        # A rule that only compares positions survives a monotone renumbering: one owner's own tokens are one run.
        segments = segments.copy()
        for column in (Q_START, Q_STOP, K_START, K_STOP):
            segments[:, column] = _local_index(segments[:, column], q_runs)
        q_runs = k_runs = ((0, count(q_runs)),)
    lines, to_q = _clip_to_runs(segments, Q_START, Q_STOP, q_runs)
    lines[:, K_START] = np.maximum(lines[:, K_START], lines[:, Q_START] - lines[:, LEFT])
    lines[:, K_STOP] = np.minimum(lines[:, K_STOP], lines[:, Q_STOP] + lines[:, RIGHT])
    lines, to_k, to_q = _clip_to_runs(lines, K_START, K_STOP, k_runs, to_q)
    return _coalesce(list(map(Tile._make, _tile_lines(lines, to_q, to_k).tolist())))


def _clip_to_runs(segments: np.ndarray, start: int, stop: int, runs: Sequence[Run], *more: np.ndarray):
    """For each segment and each run that its range in two columns meets, one line, clipped to the run.

    Returns:
        lines [m, 9]; what turns a position of the line's run into a local index [m]; ``more``, with a value per line.
    """
    held = np.array(runs).reshape(-1, 2)
    shift = np.cumsum(held[:, 1] - held[:, 0]) - held[:, 1]
    which, run = _meetings(segments[:, start], segments[:, stop], held)
    lines = segments[which]
    lines[:, start] = np.maximum(lines[:, start], held[run, 0])
    lines[:, stop] = np.minimum(lines[:, stop], held[run, 1])
    return lines, shift[run], *(value[which] for value in more)


def _meetings(start: np.ndarray, stop: np.ndarray, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of every range ``[start, stop)`` and of every run [r, 2] such that the two meet."""
    first = np.searchsorted(held[:, 1], start, side="right")
    met = np.maximum(np.searchsorted(held[:, 0], stop, side="left") - first, 0)
    which = np.repeat(np.arange(len(met)), met)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(met) - met - first, met)


def _tile_lines(lines: np.ndarray, to_q: np.ndarray, to_k: np.ndarray) -> np.ndarray:
    """Trim what sees nothing off segments of one run of queries and one of keys, and renumber; [m, 8]."""
    left, right = lines[:, LEFT], lines[:, RIGHT]
    q0, q1, k0, k1 = (lines[:, column] for column in (Q_START, Q_STOP, K_START, K_STOP))
    q0, q1 = np.maximum(q0, k0 - right), np.minimum(q1, k1 + left)
    k0, k1 = np.maximum(k0, q0 - left), np.minimum(k1, q1 + right)
    lo, hi = q0 - k0 - left, q0 - k0 + right
    lo = np.where(lo <= q0 - q1 + 1, -OPEN, lo)
    hi = np.where(hi >= k1 - k0 - 1, OPEN, hi)
    tiles = np.stack(
        [lines[:, BATCH_START], lines[:, BATCH_STOP], q0 + to_q, q1 + to_q, k0 + to_k, k1 + to_k, lo, hi], axis=1
    )
    return tiles[(q0 < q1) & (k0 < k1)]


def _coalesce(tiles: list[Tile]) -> list[Tile]:
    """Join full tiles that touch along one side: fewer launches, same work."""
    full = [tile for tile in tiles if tile.lo == -OPEN and tile.hi == OPEN]
    if len(full) > 1:
        others = [tile for tile in tiles if tile.lo != -OPEN or tile.hi != OPEN]
        for same, start, stop in (("k_start", "q_start", "q_stop"), ("q_start", "k_start", "k_stop")):
            full = _joined(full, same, start, stop)
        tiles = others + full
    return sorted(tiles)


def _joined(full: list[Tile], same: str, start: str, stop: str) -> list[Tile]:
    other = same.replace("start", "stop")
    joined: list[Tile] = []
    for tile in sorted(full, key=lambda t: (t.batch_start, getattr(t, same), getattr(t, other), getattr(t, start))):
        last = joined[-1] if joined else None
        if (
            last
            and last[:2] == tile[:2]
            and getattr(last, same) == getattr(tile, same)
            and getattr(last, other) == getattr(tile, other)
            and getattr(last, stop) == getattr(tile, start)
        ):
            joined[-1] = last._replace(**{stop: getattr(tile, stop)})
        else:
            joined.append(tile)
    return joined


def needed_rows(tiles: Iterable[Tile]) -> tuple[Run, ...]:
    """The union of the tiles' key ranges, as sorted runs of the key owner's local indices."""
    rows: list[list[int]] = []
    for start, stop in sorted((tile.k_start, tile.k_stop) for tile in tiles):
        if rows and start <= rows[-1][1]:
            rows[-1][1] = max(rows[-1][1], stop)
        else:
            rows.append([start, stop])
    return tuple((start, stop) for start, stop in rows)


def count(rows: Sequence[Run]) -> int:
    """Number of rows in a sequence of runs."""
    return sum(stop - start for start, stop in rows)


def lower(tile: Tile) -> Iterator[Tile]:
    """Split a tile into full ones, aligned causal squares (hi = 0) and aligned anti-causal squares (lo = 0).

    Exact and disjoint: a kernel that knows only "all" and "causal from the top left" can run any band, the
    anti-causal squares with both orders flipped.
    """
    n_q, n_k = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
    if tile.lo == -OPEN and tile.hi == OPEN:
        yield tile
    elif tile.lo == -OPEN:
        for (q0, q1, k0, k1), full in _under_diagonal(n_q, n_k, tile.hi):
            yield _inside(tile, q0, q1, k0, k1, -OPEN, OPEN if full else 0)
    elif tile.hi == OPEN:
        for (q0, q1, k0, k1), full in _under_diagonal(n_q, n_k, n_k - n_q - tile.lo):
            yield _inside(tile, n_q - q1, n_q - q0, n_k - k1, n_k - k0, -OPEN if full else 0, OPEN)
    else:
        width = tile.hi - tile.lo + 1
        for q0 in range(0, n_q, width):
            q1 = min(n_q, q0 + width)
            middle = min(n_k, q0 + tile.hi + 1)  # keys before it meet the left edge only, keys from it the right one
            for k0, k1, lo, hi in ((0, middle, tile.lo, OPEN), (middle, n_k, -OPEN, tile.hi)):
                for piece in _trim(q0, q1, k0, k1, lo, hi):
                    yield from lower(_inside(tile, *piece))


def blocks(tile: Tile, size: int) -> Iterator[Tile]:
    """Split a tile into tiles of at most ``size`` queries and keys; what sees nothing is left out."""
    n_q, n_k = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
    if max(n_q, n_k) <= size:
        yield tile
        return
    for q0 in range(0, n_q, size):
        for k0 in range(0, n_k, size):
            for piece in _trim(q0, min(n_q, q0 + size), k0, min(n_k, k0 + size), tile.lo, tile.hi):
                yield _inside(tile, *piece)


def intersect(tile: Tile, q_run: Run, k_run: Run) -> Iterator[Tile]:
    """The part of a tile in which queries of a run meet keys of a run, counted from the runs' starts; nothing where none
    does."""
    q0, q1 = max(tile.q_start, q_run[0]), min(tile.q_stop, q_run[1])
    k0, k1 = max(tile.k_start, k_run[0]), min(tile.k_stop, k_run[1])
    corner = tile._replace(q_start=tile.q_start - q_run[0], k_start=tile.k_start - k_run[0])
    if q0 < q1 and k0 < k1:
        for piece in _trim(
            q0 - tile.q_start, q1 - tile.q_start, k0 - tile.k_start, k1 - tile.k_start, tile.lo, tile.hi
        ):
            yield _inside(corner, *piece)


def _under_diagonal(n_q: int, n_k: int, hi: int) -> Iterator[tuple[tuple[int, int, int, int], bool]]:
    """Cover ``j <= i + hi`` of an n_q x n_k rectangle by one causal square and full rectangles."""
    corner = n_k - hi
    yield (0, corner, hi, n_k), False
    if hi:
        yield (0, corner, 0, hi), True
    if corner < n_q:
        yield (corner, n_q, 0, n_k), True


def _trim(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Cut rows and keys that see nothing off a rectangle under ``lo <= j - i <= hi`` and re-base the band."""
    q0, q1 = max(q0, k0 - hi), min(q1, k1 - lo)
    k0, k1 = max(k0, q0 + lo), min(k1, q1 + hi)
    if q0 < q1 and k0 < k1:
        lo, hi = lo + q0 - k0, hi + q0 - k0
        yield q0, q1, k0, k1, (-OPEN if lo <= q0 - q1 + 1 else lo), (OPEN if hi >= k1 - k0 - 1 else hi)


def _inside(tile: Tile, q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Tile:
    return tile._replace(
        q_start=tile.q_start + q0,
        q_stop=tile.q_start + q1,
        k_start=tile.k_start + k0,
        k_stop=tile.k_start + k1,
        lo=lo,
        hi=hi,
    )


def _local_index(position: np.ndarray, runs: Sequence[Run]) -> np.ndarray:
    """How many of an owner's tokens stand before a global position."""
    return sum(np.clip(position - start, 0, stop - start) for start, stop in runs)


REPLICATED = -1
"""The source of rows that every rank holds whole."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a rank's schedule.

    Attributes:
        source: ring rank whose keys are used; the rank itself in step 0; :data:`REPLICATED`.
        target: ring rank that uses this rank's keys in the same step.
        rows: the source's rows that arrive, in its local indices.
        target_rows: this rank's rows that the target needs.
        tiles: work on the rows that arrived; key ranges count through ``rows``.
        derived: what follows from the step, each found at its first use: calls of kernels, what they cover, blocks.
    """

    source: int
    target: int
    rows: tuple[Run, ...]
    target_rows: tuple[Run, ...]
    tiles: tuple[Tile, ...]
    derived: dict[Any, Any] = field(default_factory=dict)


def schedule(segments: np.ndarray, layout: Layout, ring_rank: int) -> tuple[Step, ...]:
    """What one rank of the ring computes, receives and sends, step by step.

    In step t a rank uses the keys of rank r - t, so that at each time every rank sends to one rank and receives from
    one: the rotation of ring attention (Liu et al. 2023), but each piece travels straight from its owner and holds
    only the rows that are needed.
    """
    runs = layout.ring_runs
    mine = np.array(runs[ring_rank])
    asking, asked = (
        segments[np.unique(_meetings(segments[:, start], segments[:, stop], mine)[0])]
        for start, stop in ((Q_START, Q_STOP), (K_START, K_STOP))
    )
    steps = []
    for t in range(layout.ring):
        source, target = (ring_rank - t) % layout.ring, (ring_rank + t) % layout.ring
        tiles = find_tiles(asking, runs[ring_rank], runs[source])
        if t == 0:
            everything = ((0, sum(stop - start for start, stop in runs[ring_rank])),)
            steps.append(Step(source, target, everything, everything, tuple(tiles)))
            continue
        rows = needed_rows(tiles)
        target_rows = needed_rows(find_tiles(asked, runs[target], runs[ring_rank]))
        steps.append(Step(source, target, rows, target_rows, tuple(_renumber(tile, rows) for tile in tiles)))
    return tuple(steps)


def _renumber(tile: Tile, rows: Sequence[Run]) -> Tile:
    """Count a tile's keys through the rows that arrive."""
    shift = tile.k_start - int(_local_index(np.int64(tile.k_start), rows))
    return tile._replace(k_start=tile.k_start - shift, k_stop=tile.k_stop - shift)


def with_compressed_kv(steps: Sequence[Step], batch: int, n_compressed: int) -> tuple[Step, ...]:
    """The schedule with one more step, for keys that every rank holds whole: all queries meet all of them, and a score rule
    hides what they do not see."""
    queries = count(steps[0].rows)
    tiles = (Tile(0, batch, 0, queries, 0, n_compressed, -OPEN, OPEN),) if n_compressed and queries else ()
    first = replace(steps[0], derived={})  # the calls of all steps are kept with the first, and here is one step more
    return first, *steps[1:], Step(REPLICATED, REPLICATED, ((0, n_compressed),), (), tiles)
