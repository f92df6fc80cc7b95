"""From segments to the schedule of a batch: which rows of K and V are exchanged, and which tiles are computed.

A *segment* (:mod:`ds_cp.mask.rules`) says, in global positions, which keys a range of queries sees. A *tile* is the part of a
segment that lies between the queries of one rank and the keys of another, in local indices. *Rows* are the keys of that other
rank that some query of the tiles sees. All of these are integer ranges: every mask, layout and method is data in these tables,
and no S x S tensor exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Iterable, Sequence

import numpy as np

from ds_cp.layout import Layout, Run, total_length
from ds_cp.mask.rules import BATCH_START, BATCH_STOP, K_START, K_STOP, LEFT, OPEN, Q_START, Q_STOP, RIGHT, expand
from ds_cp.mask.tile import Tile


def find_tiles(segments: np.ndarray, q_runs: Sequence[Run], k_runs: Sequence[Run]) -> list[Tile]:
    """Tiles between the queries of one rank and the keys of another.

    A *line* in this file is a row of an array of segments, in the making of a tile.

    Args:
        segments: int64 [n, 9], in global positions.
        q_runs: Runs of global positions of the queries. Local indices count through the runs in order.
        k_runs: Runs of global positions of the keys.
    """
    if q_runs == k_runs and np.isin(segments[:, [LEFT, RIGHT]], (-1, 0, OPEN)).all():
        # Bidirectional, causal and strictly causal bands only compare positions, so they hold for local indices, too, which
        # grow with the positions. A rank's own tokens then are one run.
        segments = segments.copy()
        for column in (Q_START, Q_STOP, K_START, K_STOP):
            segments[:, column] = _local_index(segments[:, column], q_runs)
        q_runs = k_runs = ((0, total_length(q_runs)),)
    lines, to_local_q = _clip_to_runs(segments, Q_START, Q_STOP, q_runs)
    # Keys that no query of a line sees would become lines of their own, in runs that nobody needs.
    lines[:, K_START] = np.maximum(lines[:, K_START], lines[:, Q_START] - lines[:, LEFT])
    lines[:, K_STOP] = np.minimum(lines[:, K_STOP], lines[:, Q_STOP] + lines[:, RIGHT])
    lines, to_local_k, to_local_q = _clip_to_runs(lines, K_START, K_STOP, k_runs, to_local_q)
    return _coalesce(list(map(Tile._make, _tile_lines(lines, to_local_q, to_local_k).tolist())))


def _clip_to_runs(
    segments: np.ndarray, start: int, stop: int, runs: Sequence[Run], *per_segment: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Restrict the queries or the keys of segments to runs: one line for each segment and each run that overlap.

    Args:
        segments: int64 [n, 9].
        start: Column of the start of the range that is restricted.
        stop: Column of its stop.
        runs: Runs of global positions.
        per_segment: Arrays [n] to repeat for the lines.

    Returns:
        Lines [m, 9]; what to add to a position in each line's run for its local index [m]; ``per_segment``, [m] each.
    """
    run_table = np.array(runs).reshape(-1, 2)
    run_start, run_stop = run_table.T
    to_local = np.cumsum(run_stop - run_start) - run_stop
    which, run = _overlaps(segments[:, start], segments[:, stop], run_table)
    lines = segments[which]
    lines[:, start] = np.maximum(lines[:, start], run_start[run])
    lines[:, stop] = np.minimum(lines[:, stop], run_stop[run])
    return lines, to_local[run], *(values[which] for values in per_segment)


def _overlaps(start: np.ndarray, stop: np.ndarray, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of all pairs of a range ``[start, stop)`` and a run of ``runs`` [r, 2] that overlap."""
    first = np.searchsorted(runs[:, 1], start, side="right")
    return expand(first, np.maximum(first, np.searchsorted(runs[:, 0], stop, side="left")))


def _tile_lines(lines: np.ndarray, to_local_q: np.ndarray, to_local_k: np.ndarray) -> np.ndarray:
    """Segments, each of one run of queries and one run of keys, as the fields of tiles, [m, 8].

    Queries at the edges that see no key, and keys at the edges that no query sees, are removed. What is left is a rectangle
    with the band ``lo <= j - i <= hi``, which is the segment's ``-left <= k - q <= right`` counted from the corner (q0, k0).
    """
    left, right = lines[:, LEFT], lines[:, RIGHT]
    q0, q1, k0, k1 = (lines[:, column] for column in (Q_START, Q_STOP, K_START, K_STOP))
    q0, q1 = np.maximum(q0, k0 - right), np.minimum(q1, k1 + left)
    k0, k1 = np.maximum(k0, q0 - left), np.minimum(k1, q1 + right)
    lo, hi = q0 - k0 - left, q0 - k0 + right
    lo = np.where(lo <= q0 - q1 + 1, -OPEN, lo)
    hi = np.where(hi >= k1 - k0 - 1, OPEN, hi)
    local = q0 + to_local_q, q1 + to_local_q, k0 + to_local_k, k1 + to_local_k
    tiles: np.ndarray = np.stack([lines[:, BATCH_START], lines[:, BATCH_STOP], *local, lo, hi], axis=1)
    tiles = tiles[(q0 < q1) & (k0 < k1)]
    return tiles


def _coalesce(tiles: list[Tile]) -> list[Tile]:
    """Join tiles without a band that share a whole side, for fewer kernel launches."""
    full = [tile for tile in tiles if tile.lo == -OPEN and tile.hi == OPEN]
    if len(full) > 1:
        others = [tile for tile in tiles if tile.lo != -OPEN or tile.hi != OPEN]
        for same, start, stop in (("k_start", "q_start", "q_stop"), ("q_start", "k_start", "k_stop")):
            full = _join(full, same, start, stop)
        tiles = others + full
    return sorted(tiles)


def _join(full: list[Tile], same: str, start: str, stop: str) -> list[Tile]:
    """Join tiles along one axis.

    Args:
        full: Tiles without a band.
        same: Field that starts the range that joined tiles share.
        start: Field that starts the range along which they are joined.
        stop: Field that ends that range.
    """
    same_stop = same.replace("start", "stop")

    def shared(tile: Tile) -> tuple[int, ...]:
        return tile.batch_start, tile.batch_stop, getattr(tile, same), getattr(tile, same_stop)

    joined: list[Tile] = []
    for tile in sorted(full, key=lambda tile: (*shared(tile), getattr(tile, start))):
        last = joined[-1] if joined else None
        if last and shared(last) == shared(tile) and getattr(last, stop) == getattr(tile, start):
            joined[-1] = last._replace(**{stop: getattr(tile, stop)})
        else:
            joined.append(tile)
    return joined


def needed_rows(tiles: Iterable[Tile]) -> tuple[Run, ...]:
    """Union of the tiles' key ranges, as sorted runs of local indices of the rank that owns the keys."""
    rows: list[list[int]] = []
    for start, stop in sorted((tile.k_start, tile.k_stop) for tile in tiles):
        if rows and start <= rows[-1][1]:
            rows[-1][1] = max(rows[-1][1], stop)
        else:
            rows.append([start, stop])
    return tuple((start, stop) for start, stop in rows)


def _local_index(position: np.ndarray, runs: Sequence[Run]) -> np.ndarray:
    """Number of tokens in the runs before each global position."""
    index = np.zeros_like(position)
    for start, stop in runs:
        index += np.clip(position - start, 0, stop - start)
    return index


REPLICATED = -1
"""Source of rows that are replicated on every rank."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a rank's schedule.

    Attributes:
        source: Ring rank whose keys are used: this rank in step 0, or :data:`REPLICATED`.
        target: Ring rank that uses this rank's keys in the same step.
        rows: Rows that are received, as local indices of the source. In step 0 the rank's own rows, which are its queries and,
            unless K and V are in host memory, its keys.
        target_rows: Rows of this rank that are sent to the target, as local indices.
        tiles: Tiles that are computed. Their key ranges count through ``rows``.
        derived: Cache for data that is computed from the step at its first use, such as kernel calls.
    """

    source: int
    target: int
    rows: tuple[Run, ...]
    target_rows: tuple[Run, ...]
    tiles: tuple[Tile, ...]
    derived: dict[Any, Any] = field(default_factory=dict)


def schedule(segments: np.ndarray, layout: Layout, ring_rank: int) -> tuple[Step, ...]:
    """What one rank of the ring computes, receives and sends, step by step.

    In step t a rank uses the keys of rank r - t, so that in each step every rank sends to one rank and receives from one: the
    rotation of ring attention (Liu et al. 2023). Rows are sent directly by their owner, and only those that are needed.

    Args:
        segments: int64 [n, 9].
        layout: Layout of the batch.
        ring_rank: Index of the rank on the ring axis.
    """
    runs = layout.ring_runs
    own = np.array(runs[ring_rank])
    of_queries, of_keys = (  # segments that contain queries of this rank, and keys of this rank
        segments[np.unique(_overlaps(segments[:, start], segments[:, stop], own)[0])]
        for start, stop in ((Q_START, Q_STOP), (K_START, K_STOP))
    )
    steps = []
    for t in range(layout.ring):
        source, target = (ring_rank - t) % layout.ring, (ring_rank + t) % layout.ring
        tiles = find_tiles(of_queries, runs[ring_rank], runs[source])
        if t == 0:
            all_rows = ((0, total_length(runs[ring_rank])),)
            steps.append(Step(source, target, all_rows, all_rows, tuple(tiles)))
            continue
        rows = needed_rows(tiles)
        target_rows = needed_rows(find_tiles(of_keys, runs[target], runs[ring_rank]))
        steps.append(Step(source, target, rows, target_rows, tuple(_renumber(tile, rows) for tile in tiles)))
    return tuple(steps)


def _renumber(tile: Tile, rows: Sequence[Run]) -> Tile:
    """Count a tile's keys through the received rows. The keys of a tile lie in one run of rows."""
    before = 0
    for start, stop in rows:
        if tile.k_start < stop:
            shift = start - before
            return tile._replace(k_start=tile.k_start - shift, k_stop=tile.k_stop - shift)
        before += stop - start
    raise AssertionError("rows contain the keys of every tile")


def with_compressed_kv(steps: Sequence[Step], batch: int, n_compressed: int) -> tuple[Step, ...]:
    """The schedule with one more step, for compressed KV that is replicated on every rank.

    All queries meet all compressed keys in it, and a term of the score hides the keys that a query does not see.
    """
    queries = total_length(steps[0].rows)
    tiles = (Tile(0, batch, 0, queries, 0, n_compressed, -OPEN, OPEN),) if n_compressed and queries else ()
    first = replace(steps[0], derived={})  # the first step caches the kernel calls of all steps, which now are one more
    return first, *steps[1:], Step(REPLICATED, REPLICATED, ((0, n_compressed),), (), tiles)
