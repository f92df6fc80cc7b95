"""Rules: the keys that a layer's mask lets each query see inside its document.

A *segment* is a rectangle of queries and keys in global positions with a band inside it. A document starts as one
bidirectional segment per run of its keys, and rules *narrow* segments. ``a & b`` narrows by ``a``, then by ``b``. ``a | b``
adds to the segments of ``a`` those of ``b`` without what ``a`` shows, so that the segments of a query stay *disjoint*; the
merge of partial attention would count a shared key twice.

A *band* ``(left, right)`` lets query ``i`` see key ``j`` if ``i - left <= j <= i + right``. Causal is ``(OPEN, 0)``, a window
of w tokens that includes the query's own is ``(w - 1, 0)``, bidirectional is ``(OPEN, OPEN)``. Edges may be negative: causal
minus a window of w tokens is ``(OPEN, -w)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import numpy as np

OPEN = 1 << 40
"""Edge of a band that excludes nothing."""

BATCH_START, BATCH_STOP, Q_START, Q_STOP, K_START, K_STOP, LEFT, RIGHT, ORIGIN = range(9)
"""Columns of a segment. The origin is the start of its document, from which :class:`ChunkedAttention` counts."""


class Rule:
    """Which keys of its document a query sees. Rules are values: they are hashable, and equal ones compare equal."""

    def narrow(self, segments: np.ndarray) -> np.ndarray:
        """Part of the segments, int64 [n, 9], that the rule shows: [m, 9], disjoint if the segments are."""
        raise NotImplementedError

    @property
    def differs_by_row(self) -> bool:
        """Whether the rule differs between batch rows with equal documents."""
        return False

    def __and__(self, other: "Rule") -> "Rule":
        if isinstance(self, Band) and isinstance(other, Band):
            return Band(min(self.left, other.left), min(self.right, other.right))
        return Intersection(self, other)

    def __or__(self, other: "Rule") -> "Rule":
        if isinstance(self, Band) and isinstance(other, Band):
            for wide, narrow in ((self, other), (other, self)):
                if wide.left >= narrow.left and wide.right >= narrow.right:
                    return wide
        return Union(self, other)


@dataclass(frozen=True)
class Band(Rule):
    """``i - left <= j <= i + right``."""

    left: int = OPEN
    right: int = 0

    def narrow(self, segments: np.ndarray) -> np.ndarray:
        narrowed = segments.copy()
        narrowed[:, LEFT] = np.minimum(segments[:, LEFT], self.left)
        narrowed[:, RIGHT] = np.minimum(segments[:, RIGHT], self.right)
        return _without_empty(narrowed)


CAUSAL = Band()
EVERYTHING = Band(OPEN, OPEN)


@dataclass(frozen=True)
class ChunkedAttention(Rule):
    """Queries see the keys of their own chunk of ``size`` tokens, counted from the start of the document (Llama 4)."""

    size: int

    def narrow(self, segments: np.ndarray) -> np.ndarray:
        first_chunk = (segments[:, Q_START] - segments[:, ORIGIN]) // self.size
        last_chunk = (segments[:, Q_STOP] - 1 - segments[:, ORIGIN]) // self.size
        which, chunk = expand(first_chunk, last_chunk + 1)
        pieces = segments[which]
        start = pieces[:, ORIGIN] + chunk * self.size
        return _without_empty(_clip(pieces, start, start + self.size, start, start + self.size))


@dataclass(frozen=True)
class Blocks(Rule):
    """Tokens of one block see each other; tokens that belong to no block see nothing.

    Attributes:
        rows: For each batch row, or once for all rows, the runs of tokens ``(start, stop, block)``.
    """

    rows: tuple[tuple[tuple[int, int, int], ...], ...]

    @staticmethod
    def of(ids: np.ndarray) -> "Blocks":
        """Blocks of tokens with equal numbers.

        Args:
            ids: [B, S] or [1, S], the block of each token; negative if it belongs to none.
        """
        rows = []
        for row in ids:
            edges = np.flatnonzero(np.diff(row)) + 1
            bounds = zip([0, *edges.tolist()], [*edges.tolist(), len(row)])
            rows.append(tuple((start, stop, int(row[start])) for start, stop in bounds if row[start] >= 0))
        return Blocks(tuple(rows))

    @property
    def differs_by_row(self) -> bool:
        return len(self.rows) > 1

    def narrow(self, segments: np.ndarray) -> np.ndarray:
        return np.concatenate([self._narrow_row(part, row) for part, row in self._parts(segments)] or [segments])

    def _parts(self, segments: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if not self.differs_by_row:
            yield segments, self._pairs(self.rows[0])
            return
        for b in np.unique(segments[:, BATCH_START]):
            yield segments[segments[:, BATCH_START] == b], self._pairs(self.rows[b])

    @staticmethod
    def _pairs(runs: tuple[tuple[int, int, int], ...]) -> np.ndarray:
        """Rectangles ``(q_start, q_stop, k_start, k_stop)`` of all pairs of runs in one block, int64 [n, 4], sorted."""
        runs_of_block: dict[int, list[tuple[int, int]]] = {}
        for start, stop, block in runs:
            runs_of_block.setdefault(block, []).append((start, stop))
        pairs = sorted((*q, *k) for same_block in runs_of_block.values() for q in same_block for k in same_block)
        return np.array(pairs, dtype=np.int64).reshape(-1, 4)

    @staticmethod
    def _narrow_row(segments: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        segments = segments[np.argsort(segments[:, Q_START], kind="stable")]
        which_pair, which_segment = expand(*_overlapping(pairs[:, 0], pairs[:, 1], segments))
        return _without_empty(_clip(segments[which_segment], *pairs[which_pair].T))


@dataclass(frozen=True)
class _Pair(Rule):
    one: Rule
    other: Rule

    @property
    def differs_by_row(self) -> bool:
        return self.one.differs_by_row or self.other.differs_by_row


class Intersection(_Pair):
    """Shows what both rules show."""

    def narrow(self, segments: np.ndarray) -> np.ndarray:
        return self.other.narrow(self.one.narrow(segments))


class Union(_Pair):
    """Shows what at least one of the rules shows."""

    def narrow(self, segments: np.ndarray) -> np.ndarray:
        shown = self.one.narrow(segments)
        more = self.other.narrow(segments)
        return np.concatenate([shown, *(_subtract(part, others) for part, others in _by_batch(more, shown))])


def _by_batch(segments: np.ndarray, others: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both arrays for each range of batch rows. Rules do not change the range of a segment."""
    for b in np.unique(segments[:, BATCH_START]):
        yield segments[segments[:, BATCH_START] == b], others[others[:, BATCH_START] == b]


def _subtract(segments: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Part of the segments that none of the others shows."""
    others = others[np.argsort(others[:, Q_START], kind="stable")]
    first, last = _overlapping(segments[:, Q_START], segments[:, Q_STOP], others)
    done = []
    while len(segments):  # each round subtracts the next overlapping segment from every piece that is left
        busy = first < last
        done.append(segments[~busy])
        segments, first, last = segments[busy], first[busy], last[busy]
        pieces = _minus(segments, others[first])
        segments = np.concatenate(pieces)
        first, last = np.tile(first + 1, len(pieces)), np.tile(last, len(pieces))
        visible = _is_visible(segments)
        segments, first, last = _trimmed(segments[visible]), first[visible], last[visible]
    return np.concatenate(done) if done else segments


def _minus(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """``a[i]`` without ``b[i]`` for each i, as six arrays of disjoint segments, some of which are empty."""
    q0, q1 = np.maximum(a[:, Q_START], b[:, Q_START]), np.minimum(a[:, Q_STOP], b[:, Q_STOP])
    k0, k1 = np.maximum(a[:, K_START], b[:, K_START]), np.minimum(a[:, K_STOP], b[:, K_STOP])
    high, low = np.full(len(a), OPEN), np.full(len(a), -OPEN)
    queries_before = _clip(a, low, b[:, Q_START], low, high)
    queries_after = _clip(a, b[:, Q_STOP], high, low, high)
    keys_before = _clip(a, q0, q1, low, b[:, K_START])
    keys_after = _clip(a, q0, q1, b[:, K_STOP], high)
    left_of_band, right_of_band = _clip(a, q0, q1, k0, k1), _clip(a, q0, q1, k0, k1)
    left_of_band[:, RIGHT] = np.minimum(a[:, RIGHT], -b[:, LEFT] - 1)
    right_of_band[:, LEFT] = np.minimum(a[:, LEFT], -b[:, RIGHT] - 1)
    return [queries_before, queries_after, keys_before, keys_after, left_of_band, right_of_band]


def _overlapping(start: np.ndarray, stop: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each range of queries, the half-open range of indices of the segments whose queries may overlap it.

    Args:
        start: [n], starts of the ranges.
        stop: [n], stops of the ranges.
        others: Segments, sorted by the start of their queries.
    """
    reach = np.maximum.accumulate(others[:, Q_STOP]) if len(others) else others[:, Q_STOP]
    first = np.searchsorted(reach, start, side="right")
    return first, np.maximum(first, np.searchsorted(others[:, Q_START], stop, side="left"))


def expand(first: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs ``(i, j)`` with ``first[i] <= j < stop[i]``, as two arrays."""
    lengths = stop - first
    i = np.repeat(np.arange(len(lengths)), lengths)
    j = np.arange(len(i)) - np.repeat(np.cumsum(lengths) - lengths - first, lengths)
    return i, j


def _clip(segments: np.ndarray, q0: np.ndarray, q1: np.ndarray, k0: np.ndarray, k1: np.ndarray) -> np.ndarray:
    """Restrict each segment to the queries ``[q0, q1)`` and the keys ``[k0, k1)``."""
    clipped = segments.copy()
    clipped[:, Q_START], clipped[:, Q_STOP] = np.maximum(segments[:, Q_START], q0), np.minimum(segments[:, Q_STOP], q1)
    clipped[:, K_START], clipped[:, K_STOP] = np.maximum(segments[:, K_START], k0), np.minimum(segments[:, K_STOP], k1)
    return clipped


def _without_empty(segments: np.ndarray) -> np.ndarray:
    visible: np.ndarray = segments[_is_visible(segments)]
    return visible


def _is_visible(segments: np.ndarray) -> np.ndarray:
    """Whether each segment contains a (query, key) pair that its band shows."""
    trimmed = _trimmed(segments)
    visible: np.ndarray = (
        (segments[:, LEFT] + segments[:, RIGHT] >= 0)
        & (segments[:, Q_START] < segments[:, Q_STOP])
        & (segments[:, K_START] < segments[:, K_STOP])
        & (trimmed[:, Q_START] < trimmed[:, Q_STOP])
        & (trimmed[:, K_START] < trimmed[:, K_STOP])
    )
    return visible


def _trimmed(segments: np.ndarray) -> np.ndarray:
    """Remove queries at the edges that see no key, and keys at the edges that no query sees."""
    left, right = segments[:, LEFT], segments[:, RIGHT]
    trimmed = _clip(
        segments, segments[:, K_START] - right, segments[:, K_STOP] + left, segments[:, K_START], segments[:, K_STOP]
    )
    q0, q1 = trimmed[:, Q_START], trimmed[:, Q_STOP]
    return _clip(trimmed, q0, q1, q0 - left, q1 + right)
