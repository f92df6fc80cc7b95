"""The balanced layout: every rank of the ring holds equally many tokens and computes nearly the same attention area.

The *area* of a set of tokens is the number of (query, key) pairs that are computed for these queries. Slide a window of L
tokens over the row. Consecutive windows have the mean area on average, so some have less, some have more, and a window in
between has exactly the mean. Assign that window to a rank, remove its tokens, and continue with the rest, whose mean is the
same. R - 1 windows need at most 2(R - 1) cuts, so a rank has two runs on average. That one interval of a circle can hold its
share of two measures at once is a theorem (Stromquist and Woodall, "Sets on which several measures agree", 1985).

Of the windows whose area is close enough to the mean, the algorithm takes the one whose ends separate the fewest keys from
their queries, which keeps documents on one rank. For a row that is one causal document the result is zigzag.

All arithmetic is on integers, so that every rank of the ring computes the same layout from the same documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

import numpy as np

from ds_cp.layout import Layout, Run
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import BATCH_START, BATCH_STOP, CAUSAL, K_START, K_STOP, LEFT, Q_START, Q_STOP, RIGHT, Rule

LayerSegments = Sequence[tuple[np.ndarray, int]]
"""Segments of each rule, int64 [n, 9], and the number of layers with that rule."""

MAX_RUNS = 16
"""Largest number of runs per rank. Each pair of runs on two ranks needs kernel launches of its own."""

AREA_TOLERANCE = 200
"""A window's area may differ from the mean by 1 / AREA_TOLERANCE of it."""

MIN_GAIN = 50
"""The balanced layout is chosen if it saves more than 1 / MIN_GAIN."""

CELLS_PER_RANK = 256
"""Number of cells in every L tokens, before boundaries of documents are added. Windows start at boundaries of cells."""

MAX_DOCUMENTS = 128
"""Number of the longest documents whose boundaries are boundaries of cells, too."""

CUT_COST = 64
"""A cut costs as much as sending L / CUT_COST rows."""


def choose(
    seq_len: int,
    ring: int,
    ulysses: int,
    name: str,
    packed_name: str,
    documents: Documents,
    layers: Mapping[Rule, int] = {CAUSAL: 1},
) -> Layout:
    """Choose the layout of one batch.

    Args:
        seq_len: S.
        ring: R, number of ranks on the ring axis.
        ulysses: Number of ranks on the ulysses axis.
        name: Layout of a batch without packed documents.
        packed_name: Layout of a packed batch. If it is ``"balanced"`` and ``name`` is not, the balanced layout is used only
            if it lowers the largest area of a rank or, at the same area, the number of rows that are sent.
        documents: Documents of the batch.
        layers: Rules of the layers, and the number of layers with each rule.
    """
    requested = packed_name if documents.packed else name
    if requested != "balanced" or ring == 1:
        return Layout(seq_len, ring, ulysses, "contiguous" if requested == "balanced" else requested)
    layer_segments = [(documents.segments(rule), count) for rule, count in layers.items()]
    padded_len = Layout(seq_len, ring, ulysses, "contiguous").padded_len
    balanced = Layout(seq_len, ring, ulysses, "balanced", balanced_runs(layer_segments, padded_len, ring))
    if name == "balanced":
        return balanced
    usual = Layout(seq_len, ring, ulysses, name)
    area = AreaCurve.of(layer_segments)
    before, after = (max(area.of_runs(runs) for runs in layout.ring_runs) for layout in (usual, balanced))
    if not (_is_less(after, before) or _is_less(before, after)):
        before, after = (rows_sent(layer_segments, layout.ring_runs) for layout in (usual, balanced))
    return balanced if _is_less(after, before) else usual


def _is_less(new: int, old: int) -> bool:
    """Whether ``new`` is less than ``old`` by more than 1 / MIN_GAIN."""
    return new * MIN_GAIN < old * (MIN_GAIN - 1)


def balanced_runs(layer_segments: LayerSegments, padded_len: int, ring: int) -> tuple[tuple[Run, ...], ...]:
    """Runs of global positions of each ring rank, as in :attr:`ds_cp.layout.Layout.ring_runs`.

    Args:
        layer_segments: The attention to balance. Positions that no segment contains have no area.
        padded_len: S', a multiple of ``ring``.
        ring: R.
    """
    local_len = padded_len // ring
    offsets = _cell_offsets(layer_segments, local_len)
    cells_per_rank = len(offsets)
    starts = (np.arange(ring)[:, None] * local_len + offsets).ravel()
    edges = np.append(starts, padded_len)
    area = np.diff(AreaCurve.of(layer_segments).before(edges))
    cost = np.full(len(starts), sum(count for _, count in layer_segments) * local_len // CUT_COST)
    for segments, count in layer_segments:
        cost += count * _rows_separated(segments, starts)
    tolerance = int(area.sum()) // (AREA_TOLERANCE * ring)
    unassigned, shares = np.arange(ring * cells_per_rank), []
    for ranks in range(ring, 1, -1):
        first = _best_window(unassigned, cells_per_rank, ranks, area, cost, tolerance)
        last = first + cells_per_rank
        shares.append(unassigned[first:last])
        unassigned = np.concatenate([unassigned[:first], unassigned[last:]])
    shares.append(unassigned)
    return tuple(sorted(_runs_of(share, edges) for share in shares))


def _cell_offsets(layer_segments: LayerSegments, local_len: int) -> np.ndarray:
    """Where cells start within every L tokens.

    Cell boundaries repeat every L tokens, so any window with as many cells as a period has exactly L tokens, also after
    other windows have been removed from the row.
    """
    count = min(local_len, CELLS_PER_RANK)
    segments = np.concatenate([segments for segments, _ in layer_segments])
    longest = np.argsort(segments[:, Q_START] - segments[:, Q_STOP], kind="stable")[:MAX_DOCUMENTS]
    boundaries = segments[longest][:, [Q_START, Q_STOP]].ravel() % local_len
    return np.unique(np.concatenate([np.arange(count) * local_len // count, boundaries]))


def _best_window(
    unassigned: np.ndarray, size: int, ranks: int, area: np.ndarray, cost: np.ndarray, tolerance: int
) -> int:
    """First cell of the best window.

    Args:
        unassigned: [n], the cells that are left for ``ranks`` ranks, in increasing order.
        size: Number of cells per window.
        ranks: Number of ranks without a window.
        area: Area of each cell.
        cost: Cost of a cut before each cell.
        tolerance: Largest difference between the window's area and the mean.

    Returns:
        Index into ``unassigned``.
    """
    total = np.append(0, np.cumsum(area[unassigned]))
    difference = np.abs(ranks * (total[size:] - total[:-size]) - total[-1])  # from the mean, times ranks
    cut_before = np.ones(len(unassigned) + 1, dtype=bool)
    cut_before[1:-1] = np.diff(unassigned) != 1
    end_cost = np.append(cost[unassigned], 0)
    end_cost[cut_before] = 0
    window_cost = end_cost[:-size] + end_cost[size:]
    # The window has cuts_inside + 1 runs, and the other unassigned cells have cuts_outside runs. Both must stay within
    # MAX_RUNS, because the last rank gets what is left. The first window always does.
    cuts = np.cumsum(cut_before)
    cuts_in_and_at_ends = cuts[size:] - cuts[:-size] + cut_before[:-size]
    cuts_inside = cuts_in_and_at_ends - cut_before[:-size] - cut_before[size:]
    cuts_outside = cuts[-1] - cuts_in_and_at_ends
    allowed = (cuts_inside < MAX_RUNS) & (cuts_outside <= MAX_RUNS)
    close = np.flatnonzero(allowed & (difference <= ranks * tolerance))
    if not len(close):
        candidates = np.flatnonzero(allowed)
        return int(candidates[difference[candidates].argmin()])
    cheapest = close[window_cost[close] == window_cost[close].min()]
    return int(cheapest[difference[cheapest].argmin()])


def _runs_of(cells: np.ndarray, edges: np.ndarray) -> tuple[Run, ...]:
    """Runs of global positions that some cells, in increasing order, form."""
    breaks = np.flatnonzero(np.diff(cells) != 1)
    first, last = cells[np.append(0, breaks + 1)], cells[np.append(breaks, len(cells) - 1)]
    return tuple(zip(edges[first].tolist(), edges[last + 1].tolist()))


@dataclass(frozen=True)
class AreaCurve:
    """Area of the queries before a position, as a function of the position. It is piecewise quadratic.

    Attributes:
        position: First query of each piece, increasing.
        keys: Number of keys that the first query of the piece sees.
        slope: Number of keys that each following query sees more than the one before it.
        pairs: Area of the queries before the piece.
    """

    position: np.ndarray
    keys: np.ndarray
    slope: np.ndarray
    pairs: np.ndarray

    @staticmethod
    def of(layer_segments: LayerSegments) -> "AreaCurve":
        """The curve of all layers and batch rows together."""
        table = np.concatenate([segments for segments, _ in layer_segments])
        q0, q1, k0, k1 = (table[:, column] for column in (Q_START, Q_STOP, K_START, K_STOP))
        extent = int(table[:, [Q_STOP, K_STOP]].max(initial=0))  # replaces OPEN, to keep products small
        left, right = np.minimum(table[:, LEFT], extent), np.minimum(table[:, RIGHT], extent)
        layers = np.repeat([count for _, count in layer_segments], [len(segments) for segments, _ in layer_segments])
        rows = (table[:, BATCH_STOP] - table[:, BATCH_START]) * layers
        # Query i sees the keys of [k0, k1) up to i + right, minus those before i - left. That is a sum of four ramps
        # max(0, i - knee) with i in [q0, q1). Each ramp is recorded as the changes of keys and slope at its start and stop.
        positions, key_changes, slope_changes = (
            [np.zeros(1, np.int64)],
            [np.zeros(1, np.int64)],
            [np.zeros(1, np.int64)],
        )
        for knee, sign in ((k0 - right - 1, 1), (k1 - right - 1, -1), (k0 + left, -1), (k1 + left, 1)):
            rises = np.flatnonzero(knee < q1 - 1)
            knee, stop, weight = knee[rises], q1[rises], sign * rows[rises]
            start = np.maximum(q0[rises], knee)
            positions += [start, stop]
            key_changes += [weight * (start - knee), weight * (knee - stop)]
            slope_changes += [weight, -weight]
        order = np.argsort(np.concatenate(positions), kind="stable")
        position = np.concatenate(positions)[order]
        slope = np.cumsum(np.concatenate(slope_changes)[order])
        step, slope_before = np.diff(position, prepend=0), np.append(0, slope[:-1])
        keys = np.cumsum(np.concatenate(key_changes)[order] + slope_before * step)
        pairs = np.cumsum(np.append(0, keys[:-1]) * step + slope_before * (step * (step - 1) // 2))
        return AreaCurve(position, keys, slope, pairs)

    def before(self, positions: np.ndarray) -> np.ndarray:
        """Area of the queries before each position (0 or larger), int64 of the same shape."""
        piece = np.searchsorted(self.position, positions, side="right") - 1
        step = positions - self.position[piece]
        area: np.ndarray = self.pairs[piece] + self.keys[piece] * step + self.slope[piece] * (step * (step - 1) // 2)
        return area

    def of_runs(self, runs: Sequence[Run]) -> int:
        """Area of the queries in some runs."""
        first, last = self.before(np.array(runs).T)
        return int((last - first).sum())


def _rows_separated(segments: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Approximate number of K/V rows that must be sent because of a cut before each position, the largest over batch rows."""
    worst = np.zeros(len(positions), dtype=np.int64)
    for batch_row in np.unique(segments[:, BATCH_START]):
        lines = segments[segments[:, BATCH_START] == batch_row]
        lines = lines[np.argsort(lines[:, Q_START], kind="stable")]
        starts = lines[:, Q_START]
        line = np.maximum(np.searchsorted(starts, positions, side="right") - 1, 0)
        line = np.searchsorted(starts, starts[line])  # a document's first line, which has its first key
        keys_before = np.clip(positions - lines[line, K_START], 0, lines[line, LEFT])
        keys_after = np.clip(lines[line, K_STOP] - positions, 0, lines[line, RIGHT])
        inside = (starts[line] < positions) & (positions < lines[line, Q_STOP])
        np.maximum(worst, np.where(inside, keys_before + keys_after, 0), out=worst)
    return worst


def rows_sent(layer_segments: LayerSegments, ring_runs: Sequence[Sequence[Run]]) -> int:
    """Number of K/V rows that are sent in one forward pass, summed over layers and ranks."""
    return sum(count * _rows_received(segments, runs) for segments, count in layer_segments for runs in ring_runs)


def _rows_received(segments: np.ndarray, runs: Sequence[Run]) -> int:
    """Number of rows that the queries in a rank's runs need and that lie outside of the runs."""
    own_runs = np.array(runs)
    starts, stops = [own_runs[:, 0]], [own_runs[:, 1]]
    for start, stop in runs:
        q0, q1 = np.maximum(segments[:, Q_START], start), np.minimum(segments[:, Q_STOP], stop)
        k0 = np.maximum(segments[:, K_START], q0 - segments[:, LEFT])
        k1 = np.minimum(segments[:, K_STOP], q1 + segments[:, RIGHT])
        beyond = (q0 < q1) & (k0 < k1) & ((k0 < start) | (k1 > stop))
        starts.append(k0[beyond])
        stops.append(k1[beyond])
    return _covered(np.concatenate(starts), np.concatenate(stops)) - int((own_runs[:, 1] - own_runs[:, 0]).sum())


def _covered(starts: np.ndarray, stops: np.ndarray) -> int:
    """Number of positions in the union of some ranges."""
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(stops[order])
    return int((reach - np.maximum(starts, np.append(starts[0], reach[:-1]))).clip(0).sum())
