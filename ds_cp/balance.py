"""The balanced layout: equally many tokens and nearly equal attention area for every rank of the ring.

Slide a window of L tokens over the row: the windows side by side have the mean area on average, so some have less,
some have more, and between them one has just the mean. Give that window to a rank, close the gap, and go on with what
is left: its mean is still the same. R - 1 windows need at most 2(R - 1) cuts, so two runs per rank on average. That
one interval of a circle can hold its share of two measures at once is a theorem (Stromquist and Woodall, "Sets on
which several measures agree", 1985); of the windows whose area is near enough the one is taken whose ends tear the
fewest keys from their queries, which keeps documents together. A dense causal row comes out as zigzag.

All is integers, so that every rank of the ring computes the same cut from the same documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

import numpy as np

from ds_cp.layout import Layout, Run
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import BATCH_START, BATCH_STOP, CAUSAL, K_START, K_STOP, LEFT, Q_START, Q_STOP, RIGHT, Rule

Tables = Sequence[tuple[np.ndarray, int]]
"""The segments of each rule, int64 [n, 9], and how many layers have it; areas add up over layers and batch rows."""

MAX_RUNS = 16
"""Runs per rank: each is a row of launches."""

SLACK = 200
"""A window's area may miss the mean of what is left by one part in this many."""

WORTH = 50
"""Balance pays where it saves more than one part in this many."""

CELLS = 256
"""Cells per rank between which windows start, besides the borders of the longest documents."""

BORDERS = 128
"""How many of the longest documents have their borders among the cells."""

RUN_PRICE = 64
"""A new cut costs as much as sending one row in this many of a rank's tokens."""


def choose(
    seq_len: int,
    ring: int,
    ulysses: int,
    name: str,
    packed_name: str,
    documents: Documents,
    layers: Mapping[Rule, int] = {CAUSAL: 1},
) -> Layout:
    """The layout of one batch.

    Args:
        seq_len: S.
        ring, ulysses: ranks on the two axes.
        name: the layout of a batch without packed documents.
        packed_name: the layout of a packed batch. Where it is ``"balanced"`` and ``name`` is not, balance must pay:
            it lowers the largest area of a rank, or at the same area the rows that are sent.
        documents: which tokens belong together.
        layers: the rules that layers have, and how many have each.
    """
    wanted = packed_name if documents.packed else name
    if wanted != "balanced" or ring == 1:
        return Layout(seq_len, ring, ulysses, "contiguous" if wanted == "balanced" else wanted)
    tables = [(documents.segments(rule), times) for rule, times in layers.items()]
    padded_len = Layout(seq_len, ring, ulysses, "contiguous").padded_len
    balanced = Layout(seq_len, ring, ulysses, "balanced", cut(tables, padded_len, ring))
    if name == "balanced":
        return balanced
    usual = Layout(seq_len, ring, ulysses, name)
    area = AreaCurve.of(tables)
    before, after = (max(area.of_runs(runs) for runs in layout.ring_runs) for layout in (usual, balanced))
    if not (_is_less(after, before) or _is_less(before, after)):
        before, after = (rows_sent(tables, layout.ring_runs) for layout in (usual, balanced))
    return balanced if _is_less(after, before) else usual


def _is_less(new: int, old: int) -> bool:
    return new * WORTH < old * (WORTH - 1)


def cut(tables: Tables, padded_len: int, ring: int) -> tuple[tuple[Run, ...], ...]:
    """For each ring rank the runs of global positions that it holds, in the form of ``Layout.ring_runs``.

    Args:
        tables: what is to be balanced; positions that no segment covers have no area.
        padded_len: S', a multiple of ``ring``.
        ring: ranks.
    """
    local = padded_len // ring
    offsets = _cell_offsets(tables, local)
    n = len(offsets)
    starts = (np.arange(ring)[:, None] * local + offsets).ravel()
    edges = np.append(starts, padded_len)
    area = np.diff(AreaCurve.of(tables).before(edges))
    torn = sum(times * _torn(segments, starts) for segments, times in tables)
    price = torn + sum(times for _, times in tables) * local // RUN_PRICE
    slack = int(area.sum()) // (SLACK * ring)
    left, shares = np.arange(ring * n), []
    for ranks in range(ring, 1, -1):
        first = _best_window(left, n, ranks, area, price, slack)
        shares.append(left[first : first + n])
        left = np.concatenate([left[:first], left[first + n :]])
    shares.append(left)
    return tuple(sorted(_runs_of(share, edges) for share in shares))


def _cell_offsets(tables: Tables, local: int) -> np.ndarray:
    """Where cells start within every L tokens.

    With a period of L every window of as many cells as a period has is exactly L tokens long, also after gaps of L
    tokens were closed.
    """
    count = min(local, CELLS)
    table = np.concatenate([segments for segments, _ in tables])
    longest = np.argsort(table[:, Q_START] - table[:, Q_STOP], kind="stable")[:BORDERS]
    borders = table[longest][:, [Q_START, Q_STOP]].ravel() % local
    return np.unique(np.concatenate([np.arange(count) * local // count, borders]))


def _best_window(left: np.ndarray, n: int, ranks: int, area: np.ndarray, price: np.ndarray, slack: int) -> int:
    """Index into ``left``, the cells that ``ranks`` ranks still have to share, of the first of the best n cells."""
    total = np.append(0, np.cumsum(area[left]))
    off = np.abs(ranks * (total[n:] - total[:-n]) - total[-1])
    cut_before = np.ones(len(left) + 1, dtype=bool)
    cut_before[1:-1] = np.diff(left) != 1
    ends = np.append(price[left], 0)
    ends[cut_before] = 0
    cost = ends[:-n] + ends[n:]
    # Bounded: the window's own pieces, and those that remain, which the last rank gets. The first window always is.
    cuts = np.cumsum(cut_before)
    touched = cuts[n:] - cuts[:-n] + cut_before[:-n]
    inside = touched - cut_before[:-n] - cut_before[n:]
    bounded = (inside < MAX_RUNS) & (cuts[-1] - touched <= MAX_RUNS)
    near = np.flatnonzero(bounded & (off <= ranks * slack))
    if not len(near):
        allowed = np.flatnonzero(bounded)
        return int(allowed[off[allowed].argmin()])
    cheap = near[cost[near] == cost[near].min()]
    return int(cheap[off[cheap].argmin()])


def _runs_of(cells: np.ndarray, edges: np.ndarray) -> tuple[Run, ...]:
    breaks = np.flatnonzero(np.diff(cells) != 1)
    first, last = cells[np.append(0, breaks + 1)], cells[np.append(breaks, len(cells) - 1)]
    return tuple(zip(edges[first].tolist(), edges[last + 1].tolist()))


@dataclass(frozen=True)
class AreaCurve:
    """How many (query, key) pairs are seen before a position: piecewise quadratic.

    Attributes:
        at: positions where the number of keys per query changes its course, increasing.
        keys, slope: keys that the query at ``at`` sees, and how many more each query after it.
        pairs: pairs of the queries before ``at``.
    """

    at: np.ndarray
    keys: np.ndarray
    slope: np.ndarray
    pairs: np.ndarray

    @staticmethod
    def of(tables: Tables) -> "AreaCurve":
        """The curve of all layers and batch rows together."""
        table = np.concatenate([segments for segments, _ in tables])
        q0, q1, k0, k1 = (table[:, column] for column in (Q_START, Q_STOP, K_START, K_STOP))
        span = int(table[:, [Q_STOP, K_STOP]].max(initial=0))
        left, right = np.minimum(table[:, LEFT], span), np.minimum(table[:, RIGHT], span)
        layers = np.repeat([times for _, times in tables], [len(segments) for segments, _ in tables])
        rows = (table[:, BATCH_STOP] - table[:, BATCH_START]) * layers
        # Query i sees the keys of [k0, k1) up to i + right, less those before i - left: four ramps max(0, i - knee).
        at, keys, slope = [], [], []
        for knee, sign in ((k0 - right - 1, 1), (k1 - right - 1, -1), (k0 + left, -1), (k1 + left, 1)):
            rises = np.flatnonzero(knee < q1 - 1)
            knee, stop, weight = knee[rises], q1[rises], sign * rows[rises]
            start = np.maximum(q0[rises], knee)
            at += [start, stop]
            keys += [weight * (start - knee), weight * (knee - stop)]
            slope += [weight, -weight]
        order = np.argsort(np.concatenate([*at, [0]]), kind="stable")
        at = np.concatenate([*at, [0]])[order]
        slope = np.cumsum(np.concatenate([*slope, [0]])[order])
        step, slope_before = np.diff(at, prepend=0), np.append(0, slope[:-1])
        keys = np.cumsum(np.concatenate([*keys, [0]])[order] + slope_before * step)
        pairs = np.cumsum(np.append(0, keys[:-1]) * step + slope_before * (step * (step - 1) // 2))
        return AreaCurve(at, keys, slope, pairs)

    def before(self, positions: np.ndarray) -> np.ndarray:
        """Pairs whose query stands before each position (from 0), int64 of the same shape."""
        piece = np.searchsorted(self.at, positions, side="right") - 1
        step = positions - self.at[piece]
        return self.pairs[piece] + self.keys[piece] * step + self.slope[piece] * (step * (step - 1) // 2)

    def of_runs(self, runs: Sequence[Run]) -> int:
        """Pairs whose query stands in one of the runs."""
        first, last = self.before(np.array(runs).T)
        return int((last - first).sum())


def _torn(segments: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """About how many rows must travel because of a cut before each position, [len(positions)]."""
    worst = np.zeros(len(positions), dtype=np.int64)
    for batch_row in np.unique(segments[:, BATCH_START]):
        lines = segments[segments[:, BATCH_START] == batch_row]
        lines = lines[np.argsort(lines[:, Q_START], kind="stable")]
        starts = lines[:, Q_START]
        line = np.maximum(np.searchsorted(starts, positions, side="right") - 1, 0)
        line = np.searchsorted(starts, starts[line])  # of a document's lines the one with its first key
        keys_before = np.clip(positions - lines[line, K_START], 0, lines[line, LEFT])
        keys_after = np.clip(lines[line, K_STOP] - positions, 0, lines[line, RIGHT])
        inside = (starts[line] < positions) & (positions < lines[line, Q_STOP])
        np.maximum(worst, np.where(inside, keys_before + keys_after, 0), out=worst)
    return worst


def rows_sent(tables: Tables, ring_runs: Sequence[Sequence[Run]]) -> int:
    """Rows of K and V that travel in one forward, summed over layers and ranks: what queries need and their rank lacks."""
    return sum(times * _rows_lacked(segments, runs) for segments, times in tables for runs in ring_runs)


def _rows_lacked(segments: np.ndarray, runs: Sequence[Run]) -> int:
    held = np.array(runs)
    starts, stops = [held[:, 0]], [held[:, 1]]
    for start, stop in runs:
        q0, q1 = np.maximum(segments[:, Q_START], start), np.minimum(segments[:, Q_STOP], stop)
        k0 = np.maximum(segments[:, K_START], q0 - segments[:, LEFT])
        k1 = np.minimum(segments[:, K_STOP], q1 + segments[:, RIGHT])
        beyond = (q0 < q1) & (k0 < k1) & ((k0 < start) | (k1 > stop))
        starts.append(k0[beyond])
        stops.append(k1[beyond])
    return _covered(np.concatenate(starts), np.concatenate(stops)) - int((held[:, 1] - held[:, 0]).sum())


def _covered(starts: np.ndarray, stops: np.ndarray) -> int:
    """Length of a union of ranges."""
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(stops[order])
    return int((reach - np.maximum(starts, np.append(starts[0], reach[:-1]))).clip(0).sum())
