"""DeepSpeed Ulysses (Jacobs et al. 2023): exchanges some tokens of all heads for all tokens of some heads.

One all-to-all runs before the attention and one after it. In between, a rank holds its ring shard's tokens in order and
its share of the heads, so ring attention works on them unchanged. All tensors that are exchanged at the same time share one
message per rank, with one row per token; received rows are used as views of the message.
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
        query_heads: Number of query heads of each rank.
        kv_heads: Number of KV heads of each rank, after repetition.
        repeat: How often each KV head is repeated before the heads are distributed.
    """

    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    repeat: int

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Runs of adjacent ranks with equal numbers of heads: (ranks, query heads, KV heads) each. An even split is one run."""
        return [(len(list(run)), *heads) for heads, run in groupby(zip(self.query_heads, self.kv_heads))]

    @staticmethod
    def plan(query_heads: int, kv_heads: int, ranks: int) -> HeadSplit | None:
        """The cheapest split in which every rank has the KV heads of its query heads; None if there is none.

        If ``H % U == 0``, every rank gets H / U query heads, and KV heads are repeated by the least factor that makes them
        divisible, too. Otherwise, with at least one KV head per rank, KV heads are distributed unevenly, each with all of
        its query heads.
        """
        queries_per_kv_head = query_heads // kv_heads
        if query_heads % ranks == 0:
            repeat = ranks // gcd(kv_heads, ranks)  # it divides queries_per_kv_head, because ranks divide query_heads
            return HeadSplit((query_heads // ranks,) * ranks, (kv_heads * repeat // ranks,) * ranks, repeat)
        if kv_heads >= ranks:
            per_rank = tuple(kv_heads // ranks + (u < kv_heads % ranks) for u in range(ranks))
            return HeadSplit(tuple(n * queries_per_kv_head for n in per_rank), per_rank, 1)
        return None


class HeadSharding(Protocol):
    """How a ulysses group shares heads. Each method is the adjoint of the other, and for query heads its inverse."""

    def to_heads(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        """Exchanges this rank's tokens of all heads for its ring shard's tokens of this rank's heads.

        Args:
            phase: "forward" or "backward", for counters and error messages.
            queries: Tensors with query heads; each [B, H, L, d] becomes [B, H_u, U*L, d].
            keys: Tensors with KV heads; each [B, h, L, d] becomes [B, h_u, U*L, d].

        Returns:
            ``queries``, then ``keys``.
        """

    def to_tokens(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        """The exchange back. Repeated KV heads are summed."""


class AllHeads:
    """The sharding without Ulysses: every rank computes all heads."""

    def to_heads(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        return [*queries, *keys]

    def to_tokens(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        return [*queries, *keys]


@dataclass(frozen=True)
class Ulysses:
    """Heads that are shared by a ulysses group, with one all-to-all in each direction.

    The message from one rank to another is [tokens, B, columns]. Its columns are the heads of all tensors, one tensor after
    the other.
    """

    split: HeadSplit
    group: Group

    def to_heads(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        if self.split.repeat > 1:
            keys = [x.repeat_interleave(self.split.repeat, dim=1) for x in keys]
        tensors, size, rank = [*queries, *keys], self.group.size, self.group.rank
        batch, _, length, _ = tensors[0].shape
        messages: list[torch.Tensor] = []
        send_counts: list[int] = []
        heads_before = [0] * len(tensors)
        for ranks, heads in self._runs(queries, keys):
            columns = []
            for i, (x, n) in enumerate(zip(tensors, heads)):
                part = x if ranks == size else x.narrow(1, heads_before[i], ranks * n)
                columns.append(part.reshape(batch, ranks, n, length, -1).permute(1, 3, 0, 2, 4).flatten(3))
                heads_before[i] += ranks * n
            messages.append(torch.cat(columns, dim=-1).view(-1))  # [ranks, L, B, columns]
            send_counts += [messages[-1].numel() // ranks] * ranks
        received = self.group.all_to_all(
            _cat(messages, 0), send_counts, [send_counts[rank]] * size, f"{phase} all-to-all"
        )
        own_heads = [self.split.query_heads[rank]] * len(queries) + [self.split.kv_heads[rank]] * len(keys)
        widths = [n * x.size(-1) for x, n in zip(tensors, own_heads)]
        per_tensor = received.view(size * length, batch, -1).split(widths, dim=-1)
        return [x.view(size * length, batch, n, -1).permute(1, 2, 0, 3) for x, n in zip(per_tensor, own_heads)]

    def to_tokens(self, phase: str, queries: Tensors, keys: Tensors = ()) -> list[torch.Tensor]:
        tensors, size = [*queries, *keys], self.group.size
        batch, _, total, _ = tensors[0].shape
        length, dims = total // size, [x.size(-1) for x in tensors]
        messages = _cat([x.permute(2, 0, 1, 3).flatten(2) for x in tensors], -1).reshape(-1)
        runs = self._runs(queries, keys)
        receive_counts = [length * batch * sum(map(mul, heads, dims)) for ranks, heads in runs for _ in range(ranks)]
        received = self.group.all_to_all(
            messages, [messages.numel() // size] * size, receive_counts, f"{phase} all-to-all"
        )
        parts: list[list[torch.Tensor]] = [[] for _ in tensors]
        start = 0
        for ranks, heads in runs:
            widths = list(map(mul, heads, dims))
            stop = start + ranks * length * batch * sum(widths)
            columns = received[start:stop].view(ranks, length, batch, -1).split(widths, dim=-1)
            # The memory is [B, L, heads, d], so that a model's transpose back is free.
            for parts_of_tensor, x, n, dim in zip(parts, columns, heads, dims):
                parts_of_tensor.append(x.permute(2, 1, 0, 3).reshape(batch, length, ranks * n, dim))
            start = stop
        all_heads = [_cat(parts_of_tensor, 2) for parts_of_tensor in parts]
        if self.split.repeat > 1:
            first = len(queries)
            all_heads[first:] = [x.unflatten(2, (-1, self.split.repeat)).sum(3) for x in all_heads[first:]]
        return [x.transpose(1, 2) for x in all_heads]

    def _runs(self, queries: Tensors, keys: Tensors) -> list[tuple[int, list[int]]]:
        """For each run of ranks with equal numbers of heads, which are copied together: (ranks, heads of each tensor)."""
        return [(ranks, [q] * len(queries) + [k] * len(keys)) for ranks, q, k in self.split.runs]


def _cat(parts: Tensors, dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)
