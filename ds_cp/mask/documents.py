"""Packed documents and padding of a batch, recognised from its positions, masks and document boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterator, NamedTuple

import numpy as np

from ds_cp.mask.rules import OPEN, Rule


class Document(NamedTuple):
    """One document of a batch.

    Attributes:
        row: Index of the batch row.
        start: Position in the row of its first query.
        stop: End of its queries, which include masked tokens after the document.
        tokens: int64 [n], positions in the row of its unmasked tokens.
    """

    row: int
    start: int
    stop: int
    tokens: np.ndarray


@dataclass(frozen=True)
class Documents:
    """The documents of a batch.

    Attributes:
        ranges: For each batch row an int64 array [n, 4] of lines ``(start, stop, key_start, key_stop)``: queries in
            ``[start, stop)`` may see keys in ``[key_start, key_stop)``. A document in which some tokens are masked has one
            line per run of unmasked tokens, with the same ``start`` and ``stop``.
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
            positions: [B, S] or [1, S]. Without a mask, a document starts wherever a position is not its predecessor plus 1.
                With a mask, it starts where positions restart (:func:`_continues_under_mask`).
            unmasked: [B, S] bool, False for padding, which is a key that no query sees.
            boundaries: ``cu_seqlens``, [n + 1] from 0 to S, for a batch of one row.
            seq_idx: [B, S] or [1, S], a number per document.

        Raises:
            ValueError: The boundaries do not cover the row, or the batch has more than one row.
        """
        starts = np.empty(0, dtype=np.int64)
        if boundaries is not None:
            if batch != 1 or boundaries[0] != 0 or boundaries[-1] != seq_len or (np.diff(boundaries) < 0).any():
                raise ValueError(
                    f"cu_seqlens {boundaries.tolist()} must rise from 0 to the row's {seq_len} tokens, in a batch of one "
                    f"row (this one has {batch}); otherwise documents would see each other."
                )
            starts = boundaries[:-1].astype(np.int64)
        rows = []
        for b in range(batch):
            mask = None if unmasked is None or unmasked[b].all() else unmasked[b]
            runs = np.array([[0, seq_len]]) if mask is None else _runs_of(mask)
            row_starts = [_next_unmasked(starts, runs)]
            if positions is not None:
                row = positions[b if len(positions) > 1 else 0]
                continues = _is_next if unmasked is None else _continues_under_mask(row[unmasked[b]])
                row_starts.append(_starts(row, continues, runs, mask))
            if seq_idx is not None:
                row_starts.append(_starts(seq_idx[b if len(seq_idx) > 1 else 0], np.equal, runs, mask))
            rows.append(_ranges(runs, np.concatenate(row_starts), seq_len))
        return Documents(tuple(rows))

    def each(self) -> Iterator[Document]:
        """All documents, row by row."""
        for row, lines in enumerate(self.ranges):
            first = np.flatnonzero(np.diff(lines[:, 0], prepend=-1))
            for part in np.split(lines, first[1:]) if len(lines) else ():
                start, stop = part[0, :2].tolist()
                yield Document(row, start, stop, np.concatenate([np.arange(*run) for run in part[:, 2:]]))

    def by_length(self) -> list[list[Document]]:
        """Documents in buckets of similar length, shortest first.

        Lengths in a bucket differ by less than a factor of two, and there are at most log2(S) + 1 buckets.
        """
        buckets: dict[int, list[Document]] = {}
        for document in self.each():
            buckets.setdefault(len(document.tokens).bit_length(), []).append(document)
        return [documents for _, documents in sorted(buckets.items())]

    def segments(self, rule: Rule) -> np.ndarray:
        """Segments that a rule shows, int64 [n, 9] (:mod:`ds_cp.mask.rules`). Adjacent batch rows with equal documents share
        their segments."""
        segments, b = [], 0
        while b < len(self.ranges):
            stop = b + 1
            while (
                not rule.differs_by_row
                and stop < len(self.ranges)
                and np.array_equal(self.ranges[b], self.ranges[stop])
            ):
                stop += 1
            segments.append(_bidirectional_segments(self.ranges[b], b, stop))
            b = stop
        return rule.narrow(np.concatenate(segments)) if segments else np.empty((0, 9), dtype=np.int64)

    @property
    def packed(self) -> bool:
        """Whether a row holds more than one document."""
        return any((lines[1:, 0] != lines[:-1, 0]).any() for lines in self.ranges)

    def position_in_document(self, seq_len: int) -> np.ndarray:
        """Number of unmasked tokens of the same document before each unmasked token, int64 [B, S]; 0 for masked tokens."""
        position = np.zeros((len(self.ranges), seq_len), dtype=np.int64)
        for b, lines in enumerate(self.ranges):
            document, before = -1, 0
            for start, _, k_start, k_stop in lines.tolist():
                before = before if start == document else 0
                document = start
                position[b, k_start:k_stop] = np.arange(before, before + k_stop - k_start)
                before += k_stop - k_start
        return position

    def unmasked(self, seq_len: int) -> np.ndarray:
        """Whether each token is unmasked, bool [B, S]."""
        unmasked = np.zeros((len(self.ranges), seq_len), dtype=bool)
        for b, lines in enumerate(self.ranges):
            for _, _, k_start, k_stop in lines.tolist():
                unmasked[b, k_start:k_stop] = True
        return unmasked

    def origin(self, seq_len: int) -> np.ndarray:
        """Start of each token's document, int64 [B, S]; 0 before the first document."""
        origin = np.zeros((len(self.ranges), seq_len), dtype=np.int64)
        for b, lines in enumerate(self.ranges):
            for start, stop, *_ in lines.tolist():
                origin[b, start:stop] = start
        return origin


def _bidirectional_segments(ranges: np.ndarray, batch_start: int, batch_stop: int) -> np.ndarray:
    """Segments in which each query sees all unmasked tokens of its document.

    Masked tokens before the first document are queries of it, too. If a rule looks ahead they see its keys, as in
    transformers.
    """
    start, stop, k_start, k_stop = ranges.T
    ones = np.ones_like(start)
    q_start = np.where(start == start[:1], 0, start)
    return np.stack(
        [batch_start * ones, batch_stop * ones, q_start, stop, k_start, k_stop, OPEN * ones, OPEN * ones, start], axis=1
    )


def _runs_of(mask: np.ndarray) -> np.ndarray:
    """Runs of True in a bool array, [n, 2]."""
    return np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)


def _next_unmasked(positions: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Replace each masked position by the next unmasked one, and drop it if there is none.

    Args:
        positions: [n].
        runs: [m, 2], the runs of unmasked tokens.
    """
    run = np.searchsorted(runs[:, 1], positions, side="right")
    exists = run < len(runs)
    unmasked: np.ndarray = np.maximum(positions[exists], runs[run[exists], 0])
    return unmasked


Continues = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Whether two adjacent tokens belong to one document: (number of the first, number of the second) -> bool."""


def _is_next(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The criterion of transformers without a mask (``masking_utils.find_packed_sequence_indices``)."""
    is_next: np.ndarray = after == before + 1
    return is_next


def _continues_under_mask(positions: np.ndarray) -> Continues:
    """The criterion with a mask. transformers does not look for packing then, so only restarts of the positions count.

    A restart is a decrease, or the row's smallest position a second time: a document of one token is followed by the start of
    another. Other positions may repeat or skip ahead, as tokens of an image do. If all positions are equal, as in models that
    use no positions, there is no restart.

    Args:
        positions: Positions of a row's unmasked tokens.
    """
    start = positions.min() if len(positions) else 0
    all_equal = bool((positions == start).all())
    return lambda before, after: (after > before) | ((after == before) & ((after != start) | all_equal))


def _starts(numbers: np.ndarray, continues: Continues, runs: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Unmasked tokens [n] that do not continue the document of the unmasked token before them.

    Args:
        numbers: [S], positions or document numbers.
        continues: Criterion for two adjacent unmasked tokens.
        runs: [m, 2], the runs of unmasked tokens.
        mask: [S] bool, True for unmasked tokens; None if all are.
    """
    inside = np.flatnonzero(~continues(numbers[:-1], numbers[1:])) + 1
    if mask is None:
        return inside
    inside = inside[mask[inside] & mask[inside - 1]]
    before, after = runs[:-1, 1] - 1, runs[1:, 0]
    return np.concatenate([inside, after[~continues(numbers[before], numbers[after])]])


def _ranges(runs: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    """Lines of :attr:`Documents.ranges` for one batch row.

    Args:
        runs: [m, 2], the runs of unmasked tokens.
        starts: Positions at which documents start.
        seq_len: S.
    """
    if not len(runs):
        return np.empty((0, 4), dtype=np.int64)
    starts = np.unique(np.append(starts, runs[0, 0]))
    key_start = np.union1d(starts, runs[:, 0])
    run = np.searchsorted(runs[:, 0], key_start, side="right") - 1
    key_stop = np.minimum(np.append(key_start[1:], seq_len), runs[run, 1])
    document = np.searchsorted(starts, key_start, side="right") - 1
    stops = np.append(starts[1:], seq_len)  # masked tokens after a document are queries of it
    return np.stack([starts[document], stops[document], key_start, key_stop], axis=1).astype(np.int64)
