"""From documents and a rule to segments, and from segments to the two tables of a batch: rows and tiles.

All of it is integer ranges. A *segment* says, in global positions, which keys a range of queries sees; a *tile* is the
part of a segment in which one rank's queries meet another rank's keys, in local indices. ``rows`` are the keys of a
tile's owner that its queries need. Every mask, layout and method is data in these tables; no tensor of S x S exists.

A *band* ``(left, right)`` lets query ``i`` see key ``j`` when ``i - left <= j <= i + right``: causal is
``(OPEN, 0)``, a window of w tokens that counts the token itself is ``(w - 1, 0)``, bidirectional is ``(OPEN, OPEN)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Iterator, NamedTuple, Sequence

import numpy as np

from ds_cp.layout import Layout, Run

OPEN = 1 << 40
"""An edge of a band that excludes nothing."""

BATCH_START, BATCH_STOP, Q_START, Q_STOP, K_START, K_STOP, LEFT, RIGHT = range(8)


@dataclass(frozen=True)
class Rule:
    """What a layer's mask lets a query see inside its own document, as a band."""

    left: int = OPEN
    right: int = 0


CAUSAL = Rule()


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


@dataclass(frozen=True)
class Documents:
    """Which tokens belong together.

    Attributes:
        ranges: for each batch row an int64 array [n, 4] of ``(start, stop, key_start, key_stop)``: queries of
            ``[start, stop)`` may see keys of ``[key_start, key_stop)``. A document with holes has one line per run of
            unmasked tokens.
    """

    ranges: tuple[np.ndarray, ...]

    @staticmethod
    def find(
        batch: int,
        seq_len: int,
        positions: np.ndarray | None = None,
        unmasked: np.ndarray | None = None,
        boundaries: np.ndarray | None = None,
        seq_idx: np.ndarray | None = None,
    ) -> "Documents":
        """Recognise packed documents and padding.

        Args:
            batch: B.
            seq_len: S.
            positions: [B, S] or [1, S]; a document starts where the position does not go on counting.
            unmasked: [B, S] bool, False where a token is padding (a key that nobody sees).
            boundaries: ``cu_seqlens``, [n + 1] from 0 to S, over a batch of one row.
            seq_idx: [B, S] or [1, S], a number per document.

        Raises:
            ValueError: the boundaries do not cover the row, or come with more than one row.
        """
        index = np.arange(seq_len)
        starts_by_hand = np.zeros(seq_len, dtype=bool)
        if boundaries is not None:
            if batch != 1 or boundaries[0] != 0 or boundaries[-1] != seq_len or (np.diff(boundaries) < 0).any():
                raise ValueError(
                    f"cu_seqlens {boundaries.tolist()} must rise from 0 to the row's {seq_len} tokens, in a batch of one "
                    f"row (this one has {batch}); otherwise documents would see each other."
                )
            starts_by_hand[boundaries[:-1][np.diff(boundaries) > 0]] = True
        rows = []
        for b in range(batch):
            real = index if unmasked is None else np.flatnonzero(unmasked[b])
            starts = starts_by_hand[real].copy()
            for numbers, step in ((positions, 1), (seq_idx, 0)):
                if numbers is not None and len(real):
                    row = numbers[b if len(numbers) > 1 else 0][real]
                    jump = np.diff(row)
                    goes_on = jump == step
                    if step:  # a position that counts masked tokens too still goes on
                        goes_on |= jump == np.diff(real)
                    starts[1:] |= ~goes_on
            rows.append(_ranges(real, starts, seq_len))
        return Documents(tuple(rows))

    def segments(self, rule: Rule) -> np.ndarray:
        """The segments of a rule, int64 [n, 8] (see the column names), equal neighbouring batch rows taken together."""
        out, b = [], 0
        while b < len(self.ranges):
            stop = b + 1
            while stop < len(self.ranges) and np.array_equal(self.ranges[b], self.ranges[stop]):
                stop += 1
            start, end, k_start, k_stop = self.ranges[b].T
            block = np.empty((len(start), 8), dtype=np.int64)
            block[:, BATCH_START], block[:, BATCH_STOP] = b, stop
            block[:, Q_START], block[:, Q_STOP] = start, end
            block[:, K_START], block[:, K_STOP] = k_start, k_stop
            block[:, LEFT], block[:, RIGHT] = rule.left, rule.right
            out.append(block)
            b = stop
        return np.concatenate(out) if out else np.empty((0, 8), dtype=np.int64)


def _ranges(real: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    """Lines of :class:`Documents` for one batch row from its unmasked tokens and where documents start among them."""
    if not len(real):
        return np.empty((0, 4), dtype=np.int64)
    starts[0] = True
    run_starts = starts.copy()
    run_starts[1:] |= np.diff(real) != 1
    first = np.flatnonzero(run_starts)
    last = np.append(first[1:], len(real)) - 1
    document = np.cumsum(starts)[first] - 1
    doc_start = real[starts]
    doc_stop = np.append(doc_start[1:], seq_len)  # masked tokens after a document may still query it
    return np.stack([doc_start[document], doc_stop[document], real[first], real[last] + 1], axis=1).astype(np.int64)


def find_tiles(segments: np.ndarray, q_runs: Sequence[Run], k_runs: Sequence[Run]) -> list[Tile]:
    """Tiles in which the queries of one owner meet the keys of another.

    Args:
        segments: int64 [n, 8], in global positions.
        q_runs, k_runs: what the two owners hold; local indices count through the runs in order.
    """
    order_only = bool(np.isin(segments[:, [LEFT, RIGHT]], (0, OPEN)).all())
    if order_only and q_runs == k_runs:
        # A rule that only compares positions survives a monotone renumbering: one owner's own tokens are one run.
        segments = segments.copy()
        for column in (Q_START, Q_STOP, K_START, K_STOP):
            segments[:, column] = _local_index(segments[:, column], q_runs)
        total = sum(stop - start for start, stop in q_runs)
        q_runs = k_runs = ((0, total),)
    found = [
        _meet(segments, q_run, q_offset, k_run, k_offset)
        for q_run, q_offset in _with_offsets(q_runs)
        for k_run, k_offset in _with_offsets(k_runs)
    ]
    return _coalesce([Tile(*line) for line in np.concatenate(found).tolist()])


def _meet(segments: np.ndarray, q_run: Run, q_offset: int, k_run: Run, k_offset: int) -> np.ndarray:
    """Clip every segment to a run of queries and a run of keys, trim what sees nothing, and renumber; [m, 8]."""
    left, right = segments[:, LEFT], segments[:, RIGHT]
    q0, q1 = np.maximum(segments[:, Q_START], q_run[0]), np.minimum(segments[:, Q_STOP], q_run[1])
    k0, k1 = np.maximum(segments[:, K_START], k_run[0]), np.minimum(segments[:, K_STOP], k_run[1])
    q0, q1 = np.maximum(q0, k0 - right), np.minimum(q1, k1 + left)
    k0, k1 = np.maximum(k0, q0 - left), np.minimum(k1, q1 + right)
    lo, hi = q0 - k0 - left, q0 - k0 + right
    lo = np.where(lo <= q0 - q1 + 1, -OPEN, lo)
    hi = np.where(hi >= k1 - k0 - 1, OPEN, hi)
    to_q, to_k = q_offset - q_run[0], k_offset - k_run[0]
    lines = np.stack(
        [segments[:, BATCH_START], segments[:, BATCH_STOP], q0 + to_q, q1 + to_q, k0 + to_k, k1 + to_k, lo, hi], axis=1
    )
    return lines[(q0 < q1) & (k0 < k1)]


def _coalesce(tiles: list[Tile]) -> list[Tile]:
    """Join full tiles that touch along one side: fewer launches, same work."""
    for same, start, stop in (("k_start", "q_start", "q_stop"), ("q_start", "k_start", "k_stop")):
        other = same.replace("start", "stop")
        joined: list[Tile] = []
        for tile in sorted(tiles, key=lambda t: (t.batch_start, getattr(t, same), getattr(t, other), getattr(t, start))):
            last = joined[-1] if joined else None
            if (
                last
                and last.lo == tile.lo == -OPEN
                and last.hi == tile.hi == OPEN
                and last[:2] == tile[:2]
                and getattr(last, same) == getattr(tile, same)
                and getattr(last, other) == getattr(tile, other)
                and getattr(last, stop) == getattr(tile, start)
            ):
                joined[-1] = last._replace(**{stop: getattr(tile, stop)})
            else:
                joined.append(tile)
        tiles = joined
    return tiles


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


def _with_offsets(runs: Sequence[Run]) -> Iterator[tuple[Run, int]]:
    offset = 0
    for run in runs:
        yield run, offset
        offset += run[1] - run[0]


class Step(NamedTuple):
    """One step of a rank's schedule.

    Attributes:
        source: ring rank whose keys are used; the rank itself in step 0.
        target: ring rank that uses this rank's keys in the same step.
        rows: the source's rows that arrive, in its local indices.
        target_rows: this rank's rows that the target needs.
        tiles: work on the rows that arrived; key ranges count through ``rows``.
    """

    source: int
    target: int
    rows: tuple[Run, ...]
    target_rows: tuple[Run, ...]
    tiles: tuple[Tile, ...]


def schedule(segments: np.ndarray, layout: Layout, ring_rank: int) -> tuple[Step, ...]:
    """What one rank of the ring computes, receives and sends, step by step.

    In step t a rank uses the keys of rank r - t, so that at each time every rank sends to one rank and receives from
    one: the rotation of ring attention (Liu et al. 2023), but each piece travels straight from its owner and holds
    only the rows that are needed.
    """
    runs = layout.ring_runs
    steps = []
    for t in range(layout.ring):
        source, target = (ring_rank - t) % layout.ring, (ring_rank + t) % layout.ring
        tiles = find_tiles(segments, runs[ring_rank], runs[source])
        if t == 0:
            everything = ((0, sum(stop - start for start, stop in runs[ring_rank])),)
            steps.append(Step(source, target, everything, everything, tuple(tiles)))
            continue
        rows = needed_rows(tiles)
        target_rows = needed_rows(find_tiles(segments, runs[target], runs[ring_rank]))
        steps.append(Step(source, target, rows, target_rows, tuple(_renumber(tile, rows) for tile in tiles)))
    return tuple(steps)


def _renumber(tile: Tile, rows: Sequence[Run]) -> Tile:
    """Count a tile's keys through the rows that arrive."""
    shift = tile.k_start - int(_local_index(np.int64(tile.k_start), rows))
    return tile._replace(k_start=tile.k_start - shift, k_stop=tile.k_stop - shift)
