"""Ulysses (Jacobs et al. 2023): trade a part of the sequence of all heads for all of it of a part of the heads.

An all-to-all before and one after the attention; in between the rank holds its ring shard's tokens in order and its
share of the heads, so the ring around it, if any, notices nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Sequence

import torch

from ds_cp.collectives import all_to_all
from ds_cp.mesh import Group


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


def split_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, split: HeadSplit, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, H, L, d] of all heads to [B, H_u, U*L, d] of this rank's heads, for q, k and v in one all-to-all each."""
    if split.repeat > 1:
        key, value = (x.repeat_interleave(split.repeat, dim=1) for x in (key, value))
    return (
        _scatter_heads(query, split.query, group),
        _scatter_heads(key, split.key, group),
        _scatter_heads(value, split.key, group),
    )


def join_heads(out: torch.Tensor, split: HeadSplit, group: Group) -> torch.Tensor:
    """[B, H_u, U*L, d] of this rank's heads back to [B, H, L, d] of all heads."""
    mine = split.query[group.rank]
    rows = out.unflatten(2, (group.size, -1)).permute(2, 1, 3, 0, 4).flatten(0, 1)
    rows = all_to_all(rows.contiguous(), [mine] * group.size, split.query, group)
    return rows.permute(2, 0, 1, 3)


def _scatter_heads(x: torch.Tensor, heads: Sequence[int], group: Group) -> torch.Tensor:
    rows = all_to_all(x.permute(1, 2, 0, 3).contiguous(), heads, [heads[group.rank]] * group.size, group)
    return rows.unflatten(0, (group.size, -1)).permute(3, 1, 0, 2, 4).flatten(2, 3)
