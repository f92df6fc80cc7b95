"""Ulysses (Jacobs et al. 2023): trade some tokens of all heads for all tokens of the ring shard of some heads.

An all-to-all before and one after the attention; in between the rank holds its ring shard's tokens in order and its
share of the heads, so the ring around it, if any, notices nothing. Whatever travels at the same time travels in one
message per rank, a row per token: what arrives is used where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import gcd
from operator import mul
from typing import Protocol, Sequence

import torch

from ds_cp.process_group import Group

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

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Ranks side by side that compute as many heads as each other: (ranks, query heads, key heads); one run if even."""
        return [(len(list(alike)), *heads) for heads, alike in groupby(zip(self.query, self.key))]

    @staticmethod
    def plan(query_heads: int, key_heads: int, ranks: int) -> "HeadSplit | None":
        """The cheapest split in which every rank's query heads meet their own key heads; None when there is none.

        With ``H % U == 0`` every rank gets H / U query heads, and key heads are repeated by the least factor that lets
        them divide too. Otherwise, with at least one key head per rank, whole key heads with their query heads are
        shared out, unevenly.
        """
        queries_per_kv_head = query_heads // key_heads
        if query_heads % ranks == 0:
            repeat = ranks // gcd(key_heads, ranks)  # it divides queries_per_kv_head, for ranks divide query_heads
            return HeadSplit((query_heads // ranks,) * ranks, (key_heads * repeat // ranks,) * ranks, repeat)
        if key_heads >= ranks:
            keys = tuple(key_heads // ranks + (u < key_heads % ranks) for u in range(ranks))
            return HeadSplit(tuple(k * queries_per_kv_head for k in keys), keys, 1)
        return None


class HeadSharding(Protocol):
    """How the ranks of the ulysses axis share heads; the two ways are each other's adjoint, and for query heads inverse."""

    def to_heads(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        """From this rank's tokens of all heads to its ring shard's tokens of this rank's heads.

        Args:
            phase: "forward" or "backward", for counters and messages.
            queries: with query heads, [B, H, L, d] each, becomes [B, H_u, U*L, d].
            keys: with key/value heads, [B, h, L, d] each, becomes [B, h_u, U*L, d].

        Returns:
            ``queries``, then ``keys``.
        """

    def to_tokens(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        """Back; what was repeated is summed."""


class AllHeads:
    """An axis of one rank: every head is here."""

    def to_heads(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        return [*queries, *keys]

    to_tokens = to_heads


@dataclass(frozen=True)
class Ulysses:
    """Heads shared over a group, by one all-to-all each way."""

    split: HeadSplit
    group: Group

    def to_heads(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        if self.split.repeat > 1:
            keys = [x.repeat_interleave(self.split.repeat, dim=1) for x in keys]
        tensors, size, me = [*queries, *keys], self.group.size, self.group.rank
        batch, _, length, _ = tensors[0].shape
        parcels, counts, heads_before = [], [], [0] * len(tensors)
        for ranks, heads in self._runs(queries, keys):
            columns = []
            for i, (x, n) in enumerate(zip(tensors, heads)):
                part = x if ranks == size else x.narrow(1, heads_before[i], ranks * n)
                columns.append(part.reshape(batch, ranks, n, length, -1).permute(1, 3, 0, 2, 4).flatten(3))
                heads_before[i] += ranks * n
            parcels.append(torch.cat(columns, dim=-1).view(-1))  # [ranks, L, B, width]
            counts += [parcels[-1].numel() // ranks] * ranks
        received = self.group.all_to_all(_joined(parcels, 0), counts, [counts[me]] * size, f"{phase} all-to-all")
        mine = [self.split.query[me]] * len(queries) + [self.split.key[me]] * len(keys)
        columns = received.view(size * length, batch, -1).split([n * x.size(-1) for x, n in zip(tensors, mine)], dim=-1)
        return [x.view(size * length, batch, n, -1).permute(1, 2, 0, 3) for x, n in zip(columns, mine)]

    def to_tokens(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        tensors, size = [*queries, *keys], self.group.size
        batch, _, total, _ = tensors[0].shape
        length, dims = total // size, [x.size(-1) for x in tensors]
        parcels = _joined([x.permute(2, 0, 1, 3).flatten(2) for x in tensors], -1).reshape(-1)
        runs = self._runs(queries, keys)
        counts = [length * batch * sum(map(mul, heads, dims)) for ranks, heads in runs for _ in range(ranks)]
        received = self.group.all_to_all(parcels, [parcels.numel() // size] * size, counts, f"{phase} all-to-all")
        whole, start = [[] for _ in tensors], 0
        for ranks, heads in runs:
            widths = list(map(mul, heads, dims))
            stop = start + ranks * length * batch * sum(widths)
            columns = received[start:stop].view(ranks, length, batch, -1).split(widths, dim=-1)
            # [B, L, heads, d] underneath, so that a model's transpose back is free
            for parts, x, n, dim in zip(whole, columns, heads, dims):
                parts.append(x.permute(2, 1, 0, 3).reshape(batch, length, ranks * n, dim))
            start = stop
        whole = [_joined(parts, 2) for parts in whole]
        if self.split.repeat > 1:
            whole[len(queries) :] = [x.unflatten(2, (-1, self.split.repeat)).sum(3) for x in whole[len(queries) :]]
        return [x.transpose(1, 2) for x in whole]

    def _runs(self, queries: Tensors, keys: Tensors) -> list[tuple[int, list[int]]]:
        """Neighbours with as many heads as each other travel in one copy: (how many ranks, heads of each per tensor)."""
        return [(ranks, [q] * len(queries) + [k] * len(keys)) for ranks, q, k in self.split.runs]


def _joined(parts: Tensors, dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)
