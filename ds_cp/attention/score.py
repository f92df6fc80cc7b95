"""What happens to q k^T between the product and the softmax, and to the probabilities behind it, as data for the kernels.

In order: scale, softcap, terms (ALiBi, a mask by index, ...), softmax with an optional sink, dropout. What depends on
where a token stands is given global positions (by :mod:`.attend`), so it does not matter how the sequence is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch


class TileCoordinates(NamedTuple):
    """Which part of the whole batch a tile is.

    Attributes:
        batch: its rows.
        q, k: global positions of its queries [m] and keys [n]; of entries their indices.
        extra_query_channels: [B, H, m, c], the channels of its queries behind those that meet the keys; a term may read them.
        d_extra_query_channels, gradients: in the backward pass where to add the gradients of ``extra_query_channels`` and of :attr:`Score.tables`.
    """

    batch: slice
    q: torch.Tensor
    k: torch.Tensor
    extra_query_channels: torch.Tensor | None = None
    d_extra_query_channels: torch.Tensor | None = None
    gradients: tuple[torch.Tensor, ...] = ()


class Term(Protocol):
    """Something that is added to the scores; -inf hides a key.

    One that learns has its parameters as ``table``, and ``gradient(d_scores, where)``, the table's from that of a tile.
    """

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        """What is added to a tile's scores, of a shape that broadcasts to [B, H, m, n]."""

    def of_heads(self, heads: slice) -> "Term":
        """The same for some of the query heads."""


class CompressedKVTerm(Term, Protocol):
    """Keys that every rank holds whole, which are values, too; as a term it hides them, by their index, from some queries."""

    keys: torch.Tensor
    """[B, 1, T, d], one head for all queries, with a gradient."""


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention probabilities, by a counter: a pair of global positions is kept or not, whoever computes it.

    Attributes:
        rate: share of the probabilities that become 0; the others grow by ``1 / (1 - rate)``.
        seed: equal on all ranks of a group, different per layer and forward.
        first_head: the index of this rank's first query head.
    """

    rate: float
    seed: int
    first_head: int = 0

    def keep(self, coordinates: TileCoordinates, heads: int) -> torch.Tensor:
        """Whether each pair is kept, bool [B, heads, m, n]."""
        device = coordinates.q.device
        batch = torch.arange(coordinates.batch.start, coordinates.batch.stop, device=device).view(-1, 1, 1, 1)
        head = torch.arange(self.first_head, self.first_head + heads, device=device).view(1, -1, 1, 1)
        word = self.seed & _WORD  # a number until positions come in: nothing of it waits for the device
        for part in (self.seed >> 32, batch, head, coordinates.q.view(1, 1, -1, 1), coordinates.k.view(1, 1, 1, -1)):
            word = _mix(word + part * 0x9E3779B1)
        return _mix(word) >= int(self.rate * 2**32)


_WORD = 0xFFFFFFFF


def _mix(word: Any) -> Any:
    """A bijection of 32-bit words whose every output bit depends on every input bit (multiply and xor-shift)."""
    word = word & _WORD
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return word ^ (word >> 16)


@dataclass(frozen=True, eq=False)
class Score:
    """A layer's score rule.

    Attributes:
        scale: factor on q k^T.
        softcap: c in ``c tanh(s / c)``; None for none.
        terms: what is added to the scores.
        dropout: of the probabilities.
        sinks: [H], a score per query head that takes part in the softmax and has no value; it is folded in after the merge,
            kernels never see it.
        sinks_in_query: whether each query has such a score of its own instead, its last channel.
        compressed_kv: further keys, which stand for many tokens each and which every rank holds whole.
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
        """The terms' tensors that want a gradient, in order."""
        return tuple(term.table for term in self._learning)

    def collect(self, d_scores: torch.Tensor, coordinates: TileCoordinates | None) -> None:
        """Add a tile's share to the gradients of :attr:`tables`; d_scores is [B, H, m, n], by the scores before softmax."""
        for term, total in zip(self._learning, coordinates.gradients if coordinates else ()):
            total += term.gradient(d_scores, coordinates)

    @property
    def _learning(self) -> list[Any]:
        return [term for term in self.terms if hasattr(term, "table")]

    @property
    def extras(self) -> frozenset[str]:
        """What a kernel must be able to do beyond scaling."""
        asked = {
            "softcap": self.softcap,
            "terms": self.terms,
            "dropout": self.dropout,
            "compressed_kv": self.compressed_kv,
        }
        return frozenset(name for name, value in asked.items() if value)

    @property
    def needs_positions(self) -> bool:
        return bool(self.terms or self.dropout or self.compressed_kv)

    def of_heads(self, start: int, stop: int) -> "Score":
        """The rule for the query heads ``start`` to ``stop``; itself where heads do not matter."""
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

    def for_compressed_kv(self) -> "Score":
        """The rule for the entries, which say themselves who sees them. Their indices are no positions of tokens, so dropout
        counts them apart."""
        dropout = self.dropout and replace(self.dropout, seed=self.dropout.seed + 1)
        return replace(self, terms=(self.compressed_kv,), dropout=dropout)

    def apply(self, products: torch.Tensor, coordinates: TileCoordinates | None) -> torch.Tensor:
        """Scores [B, H, m, n] from q k^T of a tile, which must say where it is if the rule :attr:`needs_positions`."""
        scores = products * self.scale
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        for term in self.terms:
            scores = scores + term.bias(coordinates, scores.dtype)
        return scores

    def slope(self, products: torch.Tensor) -> torch.Tensor | float:
        """The derivative of the scores by q k^T."""
        if not self.softcap:
            return self.scale
        return (1 - torch.tanh(products * self.scale / self.softcap).square()) * self.scale

    def dropped(self, probabilities: torch.Tensor, coordinates: TileCoordinates | None) -> torch.Tensor:
        """Dropout on a tile's probabilities, or on their gradients: the same pairs in forward and backward."""
        if self.dropout is None:
            return probabilities
        keep = self.dropout.keep(coordinates, probabilities.size(1))
        return probabilities * keep / (1 - self.dropout.rate)
