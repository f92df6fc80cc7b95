"""Compressed KV (DeepSeek V4): keys that the model pools from windows of tokens, replicated on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterator, Sequence

import torch

from ds_cp.attention.exchange import Exchange, KVPair, unpack_rows
from ds_cp.attention.score import TileCoordinates
from ds_cp.attention.selected import SelectedKeys
from ds_cp.attention.terms import as_bias
from ds_cp.mask.schedule import Step


@dataclass(frozen=True, eq=False)
class CompressedKV:
    """The compressed KV of all documents of each batch row, side by side.

    A query sees those of its document whose window ends at its position or before.

    Attributes:
        keys: [B, 1, T, d], keys and values in one, with one head for all queries; requires grad.
        document_start: [B, T] int64, start of the document that each belongs to; -1 for padding.
        window_index: [B, T] int64, index of its window in the document.
        rate: Number of tokens in a window.
        origin: [B, S'] int64, start of each token's document.
        positions: [B, S'] int64, position of each token in its document.
        selected: Those that an indexer has selected, by ``window_index``; None without an indexer.
    """

    keys: torch.Tensor
    document_start: torch.Tensor
    window_index: torch.Tensor
    rate: int
    origin: torch.Tensor
    positions: torch.Tensor
    selected: SelectedKeys | None = None

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query sees a compressed key, -inf elsewhere, [B, 1 or H, m, n]."""
        origin, positions = (x[coordinates.batch][:, coordinates.q, None] for x in (self.origin, self.positions))
        start, window = (x[coordinates.batch][:, None, coordinates.k] for x in (self.document_start, self.window_index))
        seen = (start == origin) & (window < (positions + 1) // self.rate)
        bias = as_bias(seen, dtype).unsqueeze(1)
        return bias if self.selected is None else bias + self.selected.bias(coordinates, dtype)

    def of_heads(self, heads: slice) -> CompressedKV:
        return replace(self, selected=self.selected and self.selected.of_heads(heads))


class CompressedKVExchange:
    """An exchange with a last step for compressed KV, which need no communication.

    Args:
        exchange: Exchange of the other steps.
        steps: This rank's schedule, with the step for compressed KV last.
        keys: [B, 1, T, d], the compressed keys, which are the values, too.
    """

    def __init__(self, exchange: Exchange, steps: Sequence[Step], keys: torch.Tensor):
        self.steps, self._exchange, self._keys = steps, exchange, keys
        self._d_keys: torch.Tensor | None = None

    def received(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
        yield from self._exchange.received(key, value)
        yield self.steps[-1], self._keys, self._keys

    def return_gradients(self, step: Step, grad_rows: torch.Tensor, own_gradients: KVPair) -> None:
        if step is self.steps[-1]:
            dk, dv = unpack_rows(grad_rows, self._keys.size(-1))
            self._d_keys = (dk + dv).to(self._keys.dtype)
        else:
            self._exchange.return_gradients(step, grad_rows, own_gradients)

    def finish(self, own_gradients: KVPair) -> torch.Tensor | None:
        self._exchange.finish(own_gradients)
        return torch.zeros_like(self._keys) if self._d_keys is None else self._d_keys
