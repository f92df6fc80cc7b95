"""Ulysses (Jacobs et al. 2023): trade a part of the sequence of all heads for all of it of a part of the heads.

An all-to-all before and one after the attention; in between the rank holds its ring shard's tokens in order and its
share of the heads, so the ring around it, if any, notices nothing. Whatever travels at the same time travels in one
message per rank, a row per token: what arrives is used where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from math import gcd
from typing import Iterator, Protocol, Sequence

import torch

from ds_cp.mesh import Group

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each ulysses rank computes.

    Attributes:
        query: query heads per rank.
        key: key/value heads per rank, after repetition.
        repeat: how often each key/value head is repeated before it is shared out.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    repeat: int

    @staticmethod
    def plan(query_heads: int, key_heads: int, ranks: int) -> "HeadSplit | None":
        """The cheapest split in which every rank's query heads meet their own key heads; None when there is none.

        With ``H % U == 0`` every rank gets H / U query heads, and key heads are repeated by the least factor that lets
        them divide too. Otherwise, with at least one key head per rank, whole key heads with their query heads are
        shared out, unevenly.
        """
        group = query_heads // key_heads
        if query_heads % ranks == 0:
            repeat = ranks // gcd(key_heads, ranks)
            repeat = repeat if group % repeat == 0 else group
            return HeadSplit((query_heads // ranks,) * ranks, (key_heads * repeat // ranks,) * ranks, repeat)
        if key_heads >= ranks:
            keys = tuple(key_heads // ranks + (u < key_heads % ranks) for u in range(ranks))
            return HeadSplit(tuple(k * group for k in keys), keys, 1)
        return None


class Heads(Protocol):
    """How the ranks of the ulysses axis share heads; the two ways are each other's inverse and adjoint."""

    def to_heads(self, word: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        """From this rank's tokens of all heads to its ring shard's tokens of this rank's heads.

        Args:
            word: "forward" or "backward", for counters and messages.
            queries: with query heads, [B, H, L, d] each, becomes [B, H_u, U*L, d].
            keys: with key/value heads, [B, h, L, d] each, becomes [B, h_u, U*L, d].

        Returns:
            ``queries``, then ``keys``.
        """

    def to_tokens(self, word: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        """Back; what was repeated is summed."""


class AllHeads:
    """An axis of one rank: every head is here."""

    def to_heads(self, word: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        return [*queries, *keys]

    to_tokens = to_heads


@dataclass(frozen=True)
class Ulysses:
    """Heads shared over a group, by one all-to-all each way."""

    split: HeadSplit
    group: Group

    def to_heads(self, word: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        if self.split.repeat > 1:
            keys = [x.repeat_interleave(self.split.repeat, dim=1) for x in keys]
        tensors, splits = self._with_splits(queries, keys)
        batch, _, length, _ = tensors[0].shape
        dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
        widths = [self._width(tensors, splits, rank) for rank in range(self.group.size)]
        parcels = tensors[0].new_empty(length * batch * sum(widths), dtype=dtype)
        starts = [list(accumulate(split, initial=0)) for split in splits]
        for rank, parcel in enumerate(parcels.split([length * batch * width for width in widths])):
            columns = self._columns(parcel.view(length, batch, -1), tensors, splits, rank)
            for x, start, column in zip(tensors, starts, columns):
                column.copy_(x[:, start[rank] : start[rank + 1]].permute(2, 0, 1, 3))
        mine = length * batch * widths[self.group.rank]
        received = self.group.all_to_all(
            parcels, [length * batch * width for width in widths], [mine] * self.group.size, f"{word} all-to-all"
        )
        rows = received.view(self.group.size * length, batch, -1)
        return [x.permute(1, 2, 0, 3) for x in self._columns(rows, tensors, splits, self.group.rank)]

    def to_tokens(self, word: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        tensors, splits = self._with_splits(queries, keys)
        batch, _, total, _ = tensors[0].shape
        length = total // self.group.size
        widths = [self._width(tensors, splits, rank) for rank in range(self.group.size)]
        columns = [x.permute(2, 0, 1, 3).flatten(2) for x in tensors]
        parcels = columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)
        counts = [length * batch * width for width in widths]
        received = self.group.all_to_all(
            parcels.reshape(-1), [counts[self.group.rank]] * self.group.size, counts, f"{word} all-to-all"
        )
        # [B, L, heads, d] underneath, so that a model's transpose back is free
        whole = [received.new_empty(batch, length, sum(split), x.size(-1)) for x, split in zip(tensors, splits)]
        for rank, parcel in enumerate(received.split(counts)):
            columns = self._columns(parcel.view(length, batch, -1), tensors, splits, rank)
            for x, split, column in zip(whole, splits, columns):
                start = sum(split[:rank])
                x[:, :, start : start + split[rank]] = column.transpose(0, 1)
        if self.split.repeat > 1:
            whole[len(queries) :] = [x.unflatten(2, (-1, self.split.repeat)).sum(3) for x in whole[len(queries) :]]
        return [x.transpose(1, 2) for x in whole]

    def _with_splits(self, queries: Tensors, keys: Tensors) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
        return [*queries, *keys], [self.split.query] * len(queries) + [self.split.key] * len(keys)

    @staticmethod
    def _width(tensors: Tensors, splits: Sequence[Sequence[int]], rank: int) -> int:
        """Elements of a token's row that belong to one rank."""
        return sum(split[rank] * x.size(-1) for x, split in zip(tensors, splits))

    @staticmethod
    def _columns(
        rows: torch.Tensor, tensors: Tensors, splits: Sequence[Sequence[int]], rank: int
    ) -> Iterator[torch.Tensor]:
        """The views [n, B, heads of the rank, d] of rows [n, B, width]: one per tensor, side by side."""
        start = 0
        for x, split in zip(tensors, splits):
            heads, dim = split[rank], x.size(-1)
            yield rows[..., start : start + heads * dim].unflatten(-1, (heads, dim))
            start += heads * dim
