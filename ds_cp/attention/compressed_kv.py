"""Entries: keys that stand for a window of tokens each, pooled by the model, and that every rank holds whole (DeepSeek V4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterator, Sequence

import torch

from ds_cp.attention.exchange import Exchange, Pair, as_heads
from ds_cp.attention.score import TileCoordinates
from ds_cp.attention.selected import Selected
from ds_cp.attention.terms import as_bias
from ds_cp.mask.schedule import Step


@dataclass(frozen=True, eq=False)
class CompressedKV:
    """The entries of all documents of each row, side by side. A query sees those of its document whose window is complete.

    Attributes:
        keys: [B, 1, T, d], one head for all queries, which are values, too; with a gradient.
        start: [B, T] int64, where the document of each starts; -1 for none.
        number: [B, T] int64, the index of its window within the document.
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

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query sees the entry, -inf elsewhere, [B, 1, m, n]."""
        origin, positions = (x[coordinates.batch][:, coordinates.q, None] for x in (self.origin, self.positions))
        start, number = (x[coordinates.batch][:, None, coordinates.k] for x in (self.start, self.number))
        seen = (start == origin) & (number < (positions + 1) // self.rate)
        hidden = as_bias(seen, dtype).unsqueeze(1)
        return hidden if self.selected is None else hidden + self.selected.bias(coordinates, dtype)

    def of_heads(self, heads: slice) -> "CompressedKV":
        return replace(self, selected=self.selected and self.selected.of_heads(heads))


class CompressedKVExchange:
    """An exchange with one more step, whose keys are here already; their gradient stays here.

    Args:
        exchange: of the other steps.
        steps: this rank's schedule, the entries' step last.
        keys: [B, 1, T, d], of the entries; their values, too.
    """

    def __init__(self, exchange: Exchange, steps: Sequence[Step], keys: torch.Tensor):
        self.steps, self._exchange, self._keys, self._gradient = steps, exchange, keys, None

    def received(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
        yield from self._exchange.received(key, value)
        yield self.steps[-1], self._keys, self._keys

    def return_gradients(self, step: Step, grad_rows: torch.Tensor, own_gradients: Pair) -> None:
        if step is self.steps[-1]:
            d_keys, d_values = as_heads(grad_rows, self._keys.size(-1))
            self._gradient = (d_keys + d_values).to(self._keys.dtype)
        else:
            self._exchange.return_gradients(step, grad_rows, own_gradients)

    def finish(self, own_gradients: Pair) -> torch.Tensor | None:
        self._exchange.finish(own_gradients)
        return torch.zeros_like(self._keys) if self._gradient is None else self._gradient
