"""This rank's queries by the document that they stand in: for what looks a document's keys over by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ds_cp.layout import Layout
from ds_cp.mask.documents import Documents


@dataclass(frozen=True)
class Queries:
    """Documents of like length side by side, each with the queries that this rank holds of it.

    Attributes:
        own: [n, m] int64, the queries in this rank's flat tokens [B * L].
        positions: [n, m] int64, how many of the document's keys stand before each; -1 where a document has fewer queries.
        keys: [n, k] int64, the document's keys in the flat batch [B * S], in order; behind the last key of a shorter
            document anything, which no query sees that looks back only.
    """

    query_index: torch.Tensor
    positions: torch.Tensor
    key_index: torch.Tensor

    @staticmethod
    def of(documents: Documents, layout: Layout, cp_rank: int, device: torch.device | str) -> tuple["Queries", ...]:
        """All queries of a rank that stand in a document, each once. Lengths of documents side by side differ by less than
        a factor of two."""
        mine = np.concatenate([np.arange(*run) for run in layout.runs(cp_rank)])
        out = []
        for alike in documents.by_length():
            found = []
            for row, start, stop, tokens in alike:
                own = np.arange(*np.searchsorted(mine, (start, min(stop, layout.seq_len))))
                if len(own):
                    before = np.searchsorted(tokens, mine[own], side="right") - 1
                    found.append((row * len(mine) + own, before, row * layout.seq_len + tokens))
            if found:
                own, positions, keys = (_padded(each, fill) for each, fill in zip(zip(*found), (0, -1, 0)))
                out.append(Queries(*(torch.from_numpy(each).to(device) for each in (own, positions, keys))))
        return tuple(out)


def _padded(rows: tuple[np.ndarray, ...], fill: int) -> np.ndarray:
    out = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for line, row in zip(out, rows):
        line[: len(row)] = row
    return out
