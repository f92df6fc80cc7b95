"""This rank's queries grouped by document, for code that scores the keys of each document separately (indexers)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ds_cp.layout import Layout
from ds_cp.mask.documents import Documents


@dataclass(frozen=True)
class Queries:
    """A batch of n documents of similar length, with this rank's queries of each: m queries and k keys, after padding.

    Attributes:
        query_index: [n, m] int64, indices of the queries in this rank's flattened tokens [B * L].
        positions: [n, m] int64, index of the last key of the document that each query sees under a causal mask; -1 if
            there is none, and for padding.
        key_index: [n, k] int64, indices of the document's keys in the flattened batch [B * S], in order. Padding, at the end
            of shorter documents, has any index, because no causal query sees it.
    """

    query_index: torch.Tensor
    positions: torch.Tensor
    key_index: torch.Tensor

    @staticmethod
    def of(documents: Documents, layout: Layout, cp_rank: int, device: torch.device | str) -> tuple["Queries", ...]:
        """All queries of a rank that belong to a document, each once.

        Lengths of the documents in one batch differ by less than a factor of two.
        """
        local_positions = np.concatenate([np.arange(*run) for run in layout.runs(cp_rank)])
        batches = []
        for bucket in documents.by_length():
            per_document = []
            for row, start, stop, tokens in bucket:
                local = np.arange(*np.searchsorted(local_positions, (start, min(stop, layout.seq_len))))
                if len(local):
                    last_key = np.searchsorted(tokens, local_positions[local], side="right") - 1
                    query_index = row * len(local_positions) + local
                    per_document.append((query_index, last_key, row * layout.seq_len + tokens))
            if per_document:
                query_index, last_key, key_index = zip(*per_document)
                arrays = _padded(query_index, 0), _padded(last_key, -1), _padded(key_index, 0)
                batches.append(Queries(*(torch.from_numpy(array).to(device) for array in arrays)))
        return tuple(batches)


def _padded(rows: tuple[np.ndarray, ...], fill: int) -> np.ndarray:
    """Rows of different lengths as one array, padded on the right."""
    padded = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for line, row in zip(padded, rows):
        line[: len(row)] = row
    return padded
