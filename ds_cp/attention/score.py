"""The score rule of a layer: what is applied to q k^T before the softmax, and to the probabilities after it.

In order: scale, softcap, terms (ALiBi, a mask by index, ...), softmax with an optional sink, dropout. Kernels apply it. What
depends on positions gets the global positions of a tile's queries and keys (from :mod:`ds_cp.attention.attend`), so results
do not depend on how the sequence is sharded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeGuard, TypeVar

import torch


class TileCoordinates(NamedTuple):
    """Where a tile is in the whole batch, and what terms need of its queries.

    Attributes:
        batch: Batch rows of the tile.
        q: Global positions of its queries, [m].
        k: Global positions of its keys, [n]; in compressed KV, their indices.
        extra_query_channels: [B, H, m, c], channels of the queries that do not meet the keys; terms may read them. None if
            queries have none.
        d_extra_query_channels: Sum to which the backward pass adds the gradient of ``extra_query_channels``.
        d_tables: Sums to which the backward pass adds the gradients of :attr:`Score.tables`.
    """

    batch: slice
    q: torch.Tensor
    k: torch.Tensor
    extra_query_channels: torch.Tensor | None = None
    d_extra_query_channels: torch.Tensor | None = None
    d_tables: tuple[torch.Tensor, ...] = ()


class Term(Protocol):
    """A bias that is added to the scores; -inf hides a key."""

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        """The bias of a tile, in a shape that broadcasts to [B, H, m, n]."""

    def of_heads(self, heads: slice) -> Term:
        """The same term for some of the query heads."""


class LearnedTerm(Term, Protocol):
    """A term with a learned table."""

    table: torch.Tensor

    def gradient(self, d_scores: torch.Tensor, coordinates: TileCoordinates) -> torch.Tensor:
        """A tile's share of the table's gradient, from the gradient of its scores [B, H, m, n]."""


def _is_learned(term: Term) -> TypeGuard[LearnedTerm]:
    return hasattr(term, "table")


class CompressedKVTerm(Term, Protocol):
    """Further keys, replicated on every rank, which are values, too. The term hides them, by index, from some queries."""

    keys: torch.Tensor
    """[B, 1, T, d], one head for all queries; requires grad."""

    def of_heads(self, heads: slice) -> CompressedKVTerm: ...


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention probabilities by a counter-based random number of each (batch row, head, query, key).

    Whether a pair is dropped depends on its global positions, and not on the rank or the tile that computes it.

    Attributes:
        rate: Share of the probabilities that become 0; the others are multiplied by ``1 / (1 - rate)``.
        seed: Seed, equal on all ranks of a context-parallel group, different for each layer and forward pass.
        first_head: Index of this rank's first query head.
    """

    rate: float
    seed: int
    first_head: int = 0

    def keep(self, coordinates: TileCoordinates, heads: int) -> torch.Tensor:
        """Whether each pair is kept, bool [B, heads, m, n]."""
        device = coordinates.q.device
        batch = torch.arange(coordinates.batch.start, coordinates.batch.stop, device=device).view(-1, 1, 1, 1)
        head = torch.arange(self.first_head, self.first_head + heads, device=device).view(1, -1, 1, 1)
        q, k = coordinates.q.view(1, 1, -1, 1), coordinates.k.view(1, 1, 1, -1)
        seed = _mix(
            (self.seed & _32_BITS) + (self.seed >> 32) * _GOLDEN_RATIO
        )  # a Python number: no device is involved
        bits = _mix(seed + batch * _GOLDEN_RATIO)
        for index in (head, q, k):
            bits = _mix(bits + index * _GOLDEN_RATIO)
        return _mix(bits) >= int(self.rate * 2**32)


_32_BITS = 0xFFFFFFFF
_GOLDEN_RATIO = 0x9E3779B1

_Bits = TypeVar("_Bits", int, torch.Tensor)


def _mix(bits: _Bits) -> _Bits:
    """A bijection of 32-bit numbers whose every output bit depends on every input bit (multiply and xor-shift)."""
    bits = bits & _32_BITS
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _32_BITS
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _32_BITS
    return bits ^ (bits >> 16)


@dataclass(frozen=True, eq=False)
class Score:
    """A layer's score rule.

    Attributes:
        scale: Factor of q k^T.
        softcap: c in ``c tanh(s / c)``; None for no softcap.
        terms: Biases that are added to the scores.
        dropout: Dropout of the probabilities; None for none.
        sinks: [H], one score per query head that takes part in the softmax without a value. They are added after the
            merge, so kernels do not see them.
        sinks_in_query: Whether each query has a sink of its own, in its last channel, instead.
        compressed_kv: Further keys that stand for windows of tokens, replicated on every rank; None for none.
    """

    scale: float
    softcap: float | None = None
    terms: tuple[Term, ...] = ()
    dropout: Dropout | None = None
    sinks: torch.Tensor | None = None
    sinks_in_query: bool = False
    compressed_kv: CompressedKVTerm | None = None

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """The tables of the learned terms, in order."""
        return tuple(term.table for term in self.terms if _is_learned(term))

    @property
    def features(self) -> frozenset[str]:
        """Names of what a kernel must support besides the scale."""
        used = {
            "softcap": self.softcap,
            "terms": self.terms,
            "dropout": self.dropout,
            "compressed_kv": self.compressed_kv,
        }
        return frozenset(name for name, value in used.items() if value)

    @property
    def needs_positions(self) -> bool:
        """Whether the rule depends on positions, so that it needs the coordinates of each tile."""
        return bool(self.terms or self.dropout or self.compressed_kv)

    def of_heads(self, start: int, stop: int) -> Score:
        """The rule for query heads ``start`` to ``stop``; the same object if it is equal for all heads."""
        if self.sinks is None and not self.needs_positions:
            return self
        heads = slice(start, stop)
        return replace(
            self,
            terms=tuple(term.of_heads(heads) for term in self.terms),
            dropout=self.dropout and replace(self.dropout, first_head=self.dropout.first_head + start),
            sinks=None if self.sinks is None else self.sinks[heads],
            compressed_kv=self.compressed_kv and self.compressed_kv.of_heads(heads),
        )

    def for_compressed_kv(self) -> Score:
        """The rule for the compressed KV, whose only term hides them from queries.

        Dropout gets another seed, because the indices of compressed KV are not positions of tokens.
        """
        assert self.compressed_kv is not None
        dropout = self.dropout and replace(self.dropout, seed=self.dropout.seed + 1)
        return replace(self, terms=(self.compressed_kv,), dropout=dropout)

    def apply(self, products: torch.Tensor, coordinates: TileCoordinates | None) -> torch.Tensor:
        """Scores [B, H, m, n] of a tile from its q k^T; ``coordinates`` is needed if :attr:`needs_positions`."""
        scores = products * self.scale
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        for term in self.terms:
            scores = scores + term.bias(_needed(coordinates), scores.dtype)
        return scores

    def derivative(self, products: torch.Tensor) -> torch.Tensor | float:
        """Derivative of the scores with respect to q k^T."""
        if not self.softcap:
            return self.scale
        return (1 - torch.tanh(products * self.scale / self.softcap).square()) * self.scale

    def apply_dropout(self, probabilities: torch.Tensor, coordinates: TileCoordinates | None) -> torch.Tensor:
        """Drops the same pairs of a tile each time: of its probabilities, and of their gradients."""
        if self.dropout is None:
            return probabilities
        keep = self.dropout.keep(_needed(coordinates), probabilities.size(1))
        return probabilities * keep / (1 - self.dropout.rate)

    def add_table_gradients(self, d_scores: torch.Tensor, coordinates: TileCoordinates | None) -> None:
        """Adds a tile's share to the gradients of :attr:`tables`.

        Args:
            d_scores: [B, H, m, n], gradient of the scores before the softmax.
            coordinates: Coordinates of the tile, which hold the sums.
        """
        if coordinates is not None:
            learned = (term for term in self.terms if _is_learned(term))
            for term, total in zip(learned, coordinates.d_tables):
                total += term.gradient(d_scores, coordinates)


def _needed(coordinates: TileCoordinates | None) -> TileCoordinates:
    assert coordinates is not None, "this score rule needs the coordinates of each tile"
    return coordinates
