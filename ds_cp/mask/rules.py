"""What a layer's mask lets a query see, as values that can be hashed, and how they cut segments.

A *segment* is a rectangle of queries and keys in global positions with a band inside it. Documents are segments to
begin with; a rule narrows them. ``and`` narrows one after the other; ``or`` takes the second rule's segments without
what the first one shows already, so that the segments of a query stay *disjoint*: the merge would count a key twice.

A *band* ``(left, right)`` lets query ``i`` see key ``j`` when ``i - left <= j <= i + right``: causal is
``(OPEN, 0)``, a window of w tokens that counts the token itself is ``(w - 1, 0)``, bidirectional is ``(OPEN, OPEN)``.
Edges may be negative: what is left of causal when a window of w is taken out is ``(OPEN, -w)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import numpy as np

OPEN = 1 << 40
"""An edge of a band that excludes nothing."""

BATCH_START, BATCH_STOP, Q_START, Q_STOP, K_START, K_STOP, LEFT, RIGHT, ORIGIN = range(9)
"""Columns of a segment; the origin is where its document starts, from which chunks are counted."""


class Rule:
    """What a query may see inside its own document. Equal rules are equal and hash alike."""

    def narrow(self, segments: np.ndarray) -> np.ndarray:
        """The part of the segments, int64 [n, 9], that the rule shows; [m, 9], disjoint if the segments are."""
        raise NotImplementedError

    @property
    def by_row(self) -> bool:
        """Whether rows of the batch with equal documents may still see different keys."""
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
        return _seen(narrowed)


CAUSAL = Band()
EVERYTHING = Band(OPEN, OPEN)


@dataclass(frozen=True)
class ChunkedAttention(Rule):
    """Queries see their own chunk of ``size`` tokens, counted from the start of the document."""

    size: int

    def narrow(self, segments: np.ndarray) -> np.ndarray:
        first = (segments[:, Q_START] - segments[:, ORIGIN]) // self.size
        last = (segments[:, Q_STOP] - 1 - segments[:, ORIGIN]) // self.size
        pieces = np.repeat(segments, last - first + 1, axis=0)
        number = np.arange(len(pieces)) - np.repeat(np.cumsum(last - first + 1) - (last + 1), last - first + 1)
        start = pieces[:, ORIGIN] + number * self.size
        return _seen(_clip(pieces, start, start + self.size, start, start + self.size))


@dataclass(frozen=True)
class Blocks(Rule):
    """Tokens of one block see each other; tokens of no block see nothing.

    Attributes:
        rows: for each batch row (or one for all) its runs of tokens ``(start, stop, block)``.
    """

    rows: tuple[tuple[tuple[int, int, int], ...], ...]

    @staticmethod
    def of(ids: np.ndarray) -> "Blocks":
        """From a number per token, [B, S] or [1, S]; negative numbers are no block."""
        rows = []
        for row in ids:
            edges = np.flatnonzero(np.diff(row)) + 1
            bounds = zip([0, *edges.tolist()], [*edges.tolist(), len(row)])
            rows.append(tuple((start, stop, int(row[start])) for start, stop in bounds if row[start] >= 0))
        return Blocks(tuple(rows))

    @property
    def by_row(self) -> bool:
        return len(self.rows) > 1

    def narrow(self, segments: np.ndarray) -> np.ndarray:
        return np.concatenate([self._narrow_row(part, row) for part, row in self._parts(segments)] or [segments])

    def _parts(self, segments: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if not self.by_row:
            yield segments, self._pairs(self.rows[0])
            return
        for b in np.unique(segments[:, BATCH_START]):
            yield segments[segments[:, BATCH_START] == b], self._pairs(self.rows[b])

    @staticmethod
    def _pairs(runs: tuple[tuple[int, int, int], ...]) -> np.ndarray:
        """Rectangles (q0, q1, k0, k1) of all pairs of runs that are one block, by increasing q0."""
        members: dict[int, list[tuple[int, int]]] = {}
        for start, stop, block in runs:
            members.setdefault(block, []).append((start, stop))
        pairs = sorted((*q, *k) for same in members.values() for q in same for k in same)
        return np.array(pairs, dtype=np.int64).reshape(-1, 4)

    @staticmethod
    def _narrow_row(segments: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        segments = segments[np.argsort(segments[:, Q_START], kind="stable")]
        first, last = _neighbours(blocks[:, 0], blocks[:, 1], segments)
        pieces = np.repeat(blocks, last - first, axis=0)
        which = (
            first.repeat(last - first)
            + np.arange(len(pieces))
            - np.repeat(np.cumsum(last - first) - (last - first), last - first)
        )
        return _seen(_clip(segments[which], *pieces.T))


@dataclass(frozen=True)
class _Pair(Rule):
    one: Rule
    other: Rule

    @property
    def by_row(self) -> bool:
        return self.one.by_row or self.other.by_row


class Intersection(_Pair):
    """What both rules show."""

    def narrow(self, segments: np.ndarray) -> np.ndarray:
        return self.other.narrow(self.one.narrow(segments))


class Union(_Pair):
    """What at least one of the rules shows."""

    def narrow(self, segments: np.ndarray) -> np.ndarray:
        shown = self.one.narrow(segments)
        more = self.other.narrow(segments)
        return np.concatenate([shown, *(_without(part, taken) for part, taken in _by_batch(more, shown))])


def _by_batch(segments: np.ndarray, others: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both arrays, one range of batch rows after the other; rules never change a segment's batch range."""
    for b in np.unique(segments[:, BATCH_START]):
        yield segments[segments[:, BATCH_START] == b], others[others[:, BATCH_START] == b]


def _without(segments: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """The part of the segments that none of the taken ones shows."""
    taken = taken[np.argsort(taken[:, Q_START], kind="stable")]
    first, last = _neighbours(segments[:, Q_START], segments[:, Q_STOP], taken)
    done = []
    while len(segments):  # one more neighbour is taken out in each round
        busy = first < last
        done.append(segments[~busy])
        segments, first, last = segments[busy], first[busy], last[busy]
        pieces = _minus(segments, taken[first])
        count = len(pieces)
        segments = np.concatenate(pieces)
        first, last = np.tile(first + 1, count), np.tile(last, count)
        kept = _is_seen(segments)
        segments, first, last = _trimmed(segments[kept]), first[kept], last[kept]
    return np.concatenate(done) if done else segments


def _minus(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """``a`` without ``b``, line by line, as six arrays of disjoint segments, some of them empty."""
    q0, q1 = np.maximum(a[:, Q_START], b[:, Q_START]), np.minimum(a[:, Q_STOP], b[:, Q_STOP])
    k0, k1 = np.maximum(a[:, K_START], b[:, K_START]), np.minimum(a[:, K_STOP], b[:, K_STOP])
    every, low = np.full(len(a), OPEN), np.full(len(a), -OPEN)
    before = _clip(a, low, b[:, Q_START], low, every)
    after = _clip(a, b[:, Q_STOP], every, low, every)
    left = _clip(a, q0, q1, low, b[:, K_START])
    right = _clip(a, q0, q1, b[:, K_STOP], every)
    under, over = _clip(a, q0, q1, k0, k1), _clip(a, q0, q1, k0, k1)
    under[:, RIGHT] = np.minimum(a[:, RIGHT], -b[:, LEFT] - 1)
    over[:, LEFT] = np.minimum(a[:, LEFT], -b[:, RIGHT] - 1)
    return [before, after, left, right, under, over]


def _neighbours(start: np.ndarray, stop: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each range of queries which of the others, sorted by their start, may meet it: a range of their indices."""
    reach = np.maximum.accumulate(others[:, Q_STOP]) if len(others) else others[:, Q_STOP]
    first = np.searchsorted(reach, start, side="right")
    return first, np.maximum(first, np.searchsorted(others[:, Q_START], stop, side="left"))


def _clip(segments: np.ndarray, q0: np.ndarray, q1: np.ndarray, k0: np.ndarray, k1: np.ndarray) -> np.ndarray:
    clipped = segments.copy()
    clipped[:, Q_START], clipped[:, Q_STOP] = np.maximum(segments[:, Q_START], q0), np.minimum(segments[:, Q_STOP], q1)
    clipped[:, K_START], clipped[:, K_STOP] = np.maximum(segments[:, K_START], k0), np.minimum(segments[:, K_STOP], k1)
    return clipped


def _seen(segments: np.ndarray) -> np.ndarray:
    return segments[_is_seen(segments)]


def _is_seen(segments: np.ndarray) -> np.ndarray:
    """Which segments hold a visible pair."""
    trimmed = _trimmed(segments)
    return (
        (segments[:, LEFT] + segments[:, RIGHT] >= 0)
        & (segments[:, Q_START] < segments[:, Q_STOP])
        & (segments[:, K_START] < segments[:, K_STOP])
        & (trimmed[:, Q_START] < trimmed[:, Q_STOP])
        & (trimmed[:, K_START] < trimmed[:, K_STOP])
    )


def _trimmed(segments: np.ndarray) -> np.ndarray:
    """Without queries and keys at the edges that see, or are seen by, nothing."""
    left, right = segments[:, LEFT], segments[:, RIGHT]
    trimmed = _clip(
        segments, segments[:, K_START] - right, segments[:, K_STOP] + left, segments[:, K_START], segments[:, K_STOP]
    )
    q0, q1 = trimmed[:, Q_START], trimmed[:, Q_STOP]
    return _clip(trimmed, q0, q1, q0 - left, q1 + right)
