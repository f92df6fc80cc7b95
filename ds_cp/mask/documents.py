"""Which tokens belong together: packed documents and padding, recognised from what a batch says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterator, NamedTuple

import numpy as np

from ds_cp.mask.rules import OPEN, Rule


class Document(NamedTuple):
    """One document of a batch.

    Attributes:
        row: of the batch.
        start, stop: where its queries stand in the row, tokens of padding behind it among them.
        tokens: int64 [n], where its unmasked tokens stand in the row.
    """

    row: int
    start: int
    stop: int
    tokens: np.ndarray


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
            positions: [B, S] or [1, S]; a document starts where the position does not go on counting, or, when there
                is a mask as well, where it restarts (:func:`_under_a_mask`).
            unmasked: [B, S] bool, False where a token is padding (a key that nobody sees).
            boundaries: ``cu_seqlens``, [n + 1] from 0 to S, over a batch of one row.
            seq_idx: [B, S] or [1, S], a number per document.

        Raises:
            ValueError: the boundaries do not cover the row, or come with more than one row.
        """
        given_starts = np.empty(0, dtype=np.int64)
        if boundaries is not None:
            if batch != 1 or boundaries[0] != 0 or boundaries[-1] != seq_len or (np.diff(boundaries) < 0).any():
                raise ValueError(
                    f"cu_seqlens {boundaries.tolist()} must rise from 0 to the row's {seq_len} tokens, in a batch of one "
                    f"row (this one has {batch}); otherwise documents would see each other."
                )
            given_starts = boundaries[:-1].astype(np.int64)
        rows = []
        for b in range(batch):
            mask = None if unmasked is None or unmasked[b].all() else unmasked[b]
            runs = np.array([[0, seq_len]]) if mask is None else _runs_of(mask)
            breaks = [_next_unmasked(given_starts, runs)]
            if positions is not None:
                row = positions[b if len(positions) > 1 else 0]
                goes_on = _counts if unmasked is None else _under_a_mask(row[unmasked[b]])
                breaks.append(_breaks(row, goes_on, runs, mask))
            if seq_idx is not None:
                breaks.append(_breaks(seq_idx[b if len(seq_idx) > 1 else 0], np.equal, runs, mask))
            rows.append(_ranges(runs, np.concatenate(breaks), seq_len))
        return Documents(tuple(rows))

    def each(self) -> Iterator[Document]:
        """All documents, row by row."""
        for row, lines in enumerate(self.ranges):
            first = np.flatnonzero(np.diff(lines[:, 0], prepend=-1))
            for part in np.split(lines, first[1:]) if len(lines) else ():
                yield Document(row, *part[0, :2].tolist(), np.concatenate([np.arange(*run) for run in part[:, 2:]]))

    def by_length(self) -> list[list[Document]]:
        """Documents of like length together, shortest first: lengths differ by less than a factor of two, and there are at most
        log2(S) + 1 lists."""
        alike: dict[int, list[Document]] = {}
        for document in self.each():
            alike.setdefault(len(document.tokens).bit_length(), []).append(document)
        return [documents for _, documents in sorted(alike.items())]

    def segments(self, rule: Rule) -> np.ndarray:
        """The segments of a rule, int64 [n, 9] (see :mod:`ds_cp.mask.rules`), equal neighbouring batch rows taken together."""
        out, b = [], 0
        while b < len(self.ranges):
            stop = b + 1
            while not rule.by_row and stop < len(self.ranges) and np.array_equal(self.ranges[b], self.ranges[stop]):
                stop += 1
            out.append(_whole_documents(self.ranges[b], b, stop))
            b = stop
        return rule.narrow(np.concatenate(out)) if out else np.empty((0, 9), dtype=np.int64)

    @property
    def packed(self) -> bool:
        """Whether a row holds more than one document."""
        return any((lines[1:, 0] != lines[:-1, 0]).any() for lines in self.ranges)

    def rank_in_document(self, seq_len: int) -> np.ndarray:
        """How many unmasked tokens of its document stand before each unmasked token, int64 [B, S]; 0 for masked ones."""
        rank = np.zeros((len(self.ranges), seq_len), dtype=np.int64)
        for b, lines in enumerate(self.ranges):
            document, before = -1, 0
            for start, _, k_start, k_stop in lines.tolist():
                before = before if start == document else 0
                document = start
                rank[b, k_start:k_stop] = np.arange(before, before + k_stop - k_start)
                before += k_stop - k_start
        return rank

    def unmasked(self, seq_len: int) -> np.ndarray:
        """Which tokens are no padding, bool [B, S]."""
        unmasked = np.zeros((len(self.ranges), seq_len), dtype=bool)
        for b, lines in enumerate(self.ranges):
            for _, _, k_start, k_stop in lines.tolist():
                unmasked[b, k_start:k_stop] = True
        return unmasked

    def origin(self, seq_len: int) -> np.ndarray:
        """Where each token's document starts, int64 [B, S]; 0 before the first one."""
        origin = np.zeros((len(self.ranges), seq_len), dtype=np.int64)
        for b, lines in enumerate(self.ranges):
            for start, stop, *_ in lines.tolist():
                origin[b, start:stop] = start
        return origin


def _whole_documents(ranges: np.ndarray, batch_start: int, batch_stop: int) -> np.ndarray:
    """Segments in which every query sees all unmasked tokens of its document. Masked tokens before the first document
    query it too: where a rule looks ahead they see what it holds, as in transformers."""
    start, stop, k_start, k_stop = ranges.T
    shared = np.ones_like(start)
    first = np.where(start == start[:1], 0, start)
    return np.stack(
        [batch_start * shared, batch_stop * shared, first, stop, k_start, k_stop, OPEN * shared, OPEN * shared, start],
        axis=1,
    )


def _runs_of(mask: np.ndarray) -> np.ndarray:
    """Runs of True in a bool array, [n, 2]."""
    return np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)


def _next_unmasked(positions: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Each position, or the first unmasked one after it; those with none are left out."""
    run = np.searchsorted(runs[:, 1], positions, side="right")
    found = run < len(runs)
    return np.maximum(positions[found], runs[run[found], 0])


GoesOn = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Whether a document goes on, given the numbers of neighbouring tokens: (before, after) -> bool."""


def _counts(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """What transformers asks of positions where there is no mask (``masking_utils.find_packed_sequence_indices``)."""
    return after == before + 1


def _under_a_mask(positions: np.ndarray) -> GoesOn:
    """How positions go on where there is a mask: transformers then looks for no packing, so only a restart counts.

    A restart is a drop, or the row's smallest position once more: a document of one token stands before another start.
    Any other number may repeat or skip ahead, as tokens of an image do. Where all are equal, as in models that use no
    positions, nothing restarts.

    Args:
        positions: of a row's unmasked tokens.
    """
    start = positions.min() if len(positions) else 0
    all_equal = bool((positions == start).all())
    return lambda before, after: (after > before) | ((after == before) & ((after != start) | all_equal))


def _breaks(numbers: np.ndarray, goes_on: GoesOn, runs: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Unmasked tokens [n] whose number does not go on from that of the unmasked token before."""
    inside = np.flatnonzero(~goes_on(numbers[:-1], numbers[1:])) + 1
    if mask is None:
        return inside
    inside = inside[mask[inside] & mask[inside - 1]]
    before, after = runs[:-1, 1] - 1, runs[1:, 0]
    return np.concatenate([inside, after[~goes_on(numbers[before], numbers[after])]])


def _ranges(runs: np.ndarray, breaks: np.ndarray, seq_len: int) -> np.ndarray:
    """Lines of :class:`Documents` for one batch row from its runs of unmasked tokens and where documents start in them."""
    if not len(runs):
        return np.empty((0, 4), dtype=np.int64)
    starts = np.unique(np.append(breaks, runs[0, 0]))
    first = np.union1d(starts, runs[:, 0])
    last = np.minimum(np.append(first[1:], seq_len), runs[np.searchsorted(runs[:, 0], first, side="right") - 1, 1])
    document = np.searchsorted(starts, first, side="right") - 1
    doc_stop = np.append(starts[1:], seq_len)  # masked tokens after a document may still query it
    return np.stack([starts[document], doc_stop[document], first, last], axis=1).astype(np.int64)
