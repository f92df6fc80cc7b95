"""The split of one batch: which ring and ulysses axes its attention uses, and the layout on the ring.

A context-parallel group is one set of ranks; a ring over all of them, a ulysses axis over all of them, and hybrids are
views of it. With packed documents the ring needs little communication, without them the ulysses axis is faster, so with
``"method": "auto"`` each packed batch takes the split whose slowest rank has the least predicted time (:mod:`ds_cp.cost`).
"""

from __future__ import annotations

from typing import Mapping, Sequence

import numpy as np

from ds_cp import balance, cost
from ds_cp.cards import CARDS, LINKS
from ds_cp.layout import Layout
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import Rule
from ds_cp.mask.schedule import schedule
from ds_cp.planner import Plan, Split

RANKS_COMPARED = 2
"""Ranks of a ring whose time is predicted: those with the most attention area."""


def choose(plan: Plan, seq_len: int, documents: Documents, layers: Mapping[Rule, int]) -> tuple[Split, Layout]:
    """Choose the split and the layout of one batch. The same on all ranks that have the same documents.

    Args:
        plan: The plan of the model.
        seq_len: S.
        documents: Documents of the batch.
        layers: Number of layers by rule.
    """
    splits = plan.splits if documents.packed and len(plan.splits) > 1 else plan.splits[:1]
    layouts = [balance.choose(seq_len, *split, documents, layers) for split in splits]
    if len(splits) == 1:
        return splits[0], layouts[0]
    tables = [(documents.segments(rule), times) for rule, times in layers.items()]
    area = balance.AreaCurve.of(tables)
    times = [
        _seconds(plan, split, layout, tables, area, len(documents.ranges)) for split, layout in zip(splits, layouts)
    ]
    best = int(np.argmin(times))  # the first of equal ones: the plan's own
    return splits[best], layouts[best]


def _seconds(
    plan: Plan,
    split: Split,
    layout: Layout,
    tables: Sequence[tuple[np.ndarray, int]],
    area: balance.AreaCurve,
    batch: int,
) -> float:
    """Predicted seconds of all attention layers on the slowest of the busiest ranks."""
    query_heads, kv_heads, dim, value_dim = plan.attention
    shape = cost.AttentionShape(query_heads, kv_heads, dim, value_dim, 4 if plan.card == "CPU" else 2)
    card, link = CARDS[plan.card], LINKS[plan.card]
    busiest = sorted(range(split.ring), key=lambda rank: -area.of_runs(layout.ring_runs[rank]))[:RANKS_COMPARED]
    return max(
        sum(
            times * cost.attention_time(schedule(segments, layout, rank), split.ulysses, shape, card, link, batch).total
            for segments, times in tables
        )
        for rank in busiest
    )
