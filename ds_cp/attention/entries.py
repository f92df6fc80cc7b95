"""Entries: keys that stand for a window of tokens each, pooled by the model, and that every rank holds whole (DeepSeek V4)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ds_cp.attention.score import Where
from ds_cp.attention.selected import Selected


@dataclass(frozen=True, eq=False)
class Pooled:
    """The entries of all documents of each row, side by side. A query sees those of its document whose window is complete.

    Attributes:
        keys: [B, h, T, d], which are values, too; with a gradient.
        start: [B, T] int64, where the document of each starts; -1 for none.
        number: [B, T] int64, the how many-th of its document it is.
        rate: tokens of a window.
        origin, positions: [B, S'] int64, where each token's document starts, and where it stands in it.
        selected: those that an indexer has chosen, by number; None where it chooses none.
    """

    keys: torch.Tensor
    start: torch.Tensor
    number: torch.Tensor
    rate: int
    origin: torch.Tensor
    positions: torch.Tensor
    selected: Selected | None = None

    def of(self, where: Where, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query sees the entry, -inf elsewhere, [B, 1, m, n]."""
        origin, positions = (x[where.batch][:, where.q, None] for x in (self.origin, self.positions))
        start, number = (x[where.batch][:, None, where.k] for x in (self.start, self.number))
        seen = (start == origin) & (number < (positions + 1) // self.rate)
        hidden = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, float("-inf")).unsqueeze(1)
        return hidden if self.selected is None else hidden + self.selected.of(where, dtype)

    def of_heads(self, heads: slice) -> "Pooled":
        return replace(self, selected=self.selected and self.selected.of_heads(heads))
