"""Predicted time of attention: what is counted equals what a run sends, and published figures come out within 15%."""

from collections import Counter

import numpy as np
import pytest
import torch

from ds_cp import balance, cards, cost
from ds_cp.attention import kernels
from ds_cp.attention.attend import attend
from ds_cp.attention.exchange import PeerExchange
from ds_cp.attention.score import Score
from ds_cp.cli.bench import in_process
from ds_cp.cli.bench.simulate import predict, published_figures
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL, OPEN, Band
from ds_cp.mask.schedule import schedule
from ds_cp.mask.tile import Tile

LLAMA = cost.AttentionShape(32, 8)
H100, NVLINK = cards.CARDS["H100"], cards.LINKS["H100"]

PUBLISHED = {name: (predicted, published) for name, predicted, published, _ in published_figures()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures_are_predicted_within_15_percent(name):
    predicted, published = PUBLISHED[name]
    assert abs(predicted / published - 1) < 0.15


ROWS = {
    # documents of a row -> the fastest split of 8 ranks, and bounds of its time over the ideal
    "one document": ([131072], "ulysses", 1.00, 1.05),
    "64 documents of one length": ([2048] * 64, "ring (zigzag)", 1.00, 1.02),
    "4 documents": ([32768] * 4, "hybrid 4 x 2 (balanced)", 1.00, 1.25),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_fastest_split_follows_the_documents(row):
    documents, name, least, most = ROWS[row]
    best = min(predict(LLAMA, documents, 8, 8, "H100"), key=lambda split: split.time.total)
    assert best.name == name
    assert least <= best.time.total / best.ideal <= most


@pytest.mark.parametrize("rule", [CAUSAL, Band(7, 0)], ids=["causal", "window"])
@pytest.mark.parametrize("documents", [[64], [9, 30, 25], [16, 16, 16, 16]])
def test_bytes_and_messages_are_those_of_a_run(documents, rule):
    ring, heads, kv_heads, dim = 4, 4, 2, 8
    found = Documents.find(1, sum(documents), boundaries=np.cumsum([0, *documents]))
    layout = balance.choose(sum(documents), ring, 1, "zigzag", "balanced", found)
    segments = found.segments(rule)

    def rank(group):
        q = torch.randn(1, heads, layout.local_len, dim, requires_grad=True)
        k, v = (torch.randn(1, kv_heads, layout.local_len, dim, requires_grad=True) for _ in range(2))
        steps = schedule(segments, layout, group.rank)
        out = attend(q, k, v, lambda phase: PeerExchange(group, steps, 1, phase), kernels.make("torch"), Score(0.3))
        out.sum().backward()
        return Counter(group.sent), steps

    shape = cost.AttentionShape(heads, kv_heads, dim, dim, item=4)
    for sent, steps in in_process.run(ring, rank, timeout=20):
        counts = cost.attention_time(steps, 1, shape, H100, NVLINK).counts
        assert counts["bytes sent"] == sent["forward"] + sent["backward"]


def test_a_slower_link_exposes_more_and_a_faster_card_computes_faster():
    found = Documents.find(1, 65536)
    steps = schedule(found.segments(CAUSAL), balance.choose(65536, 8, 1, "zigzag", "zigzag", found), 3)
    usual = cost.attention_time(steps, 1, LLAMA, H100, NVLINK)
    slow = cost.attention_time(steps, 1, LLAMA, H100, cards.Link(NVLINK.bandwidth / 10))
    faster = cost.attention_time(steps, 1, LLAMA, cards.CARDS["B200"], NVLINK)
    assert slow.parts["exposed messages"] > usual.parts["exposed messages"]
    assert slow.parts["kernel forward"] == usual.parts["kernel forward"] > faster.parts["kernel forward"]
    assert usual.total == pytest.approx(sum(usual.parts.values()))


@pytest.mark.parametrize("low", [-OPEN, -7, -3, 0])
@pytest.mark.parametrize("high", [0, 3, 9, OPEN])
@pytest.mark.parametrize("queries, keys", [(1, 1), (5, 9), (9, 5), (8, 8)])
def test_pairs_of_a_tile_are_counted(queries, keys, low, high):
    j_minus_i = np.arange(keys)[None] - np.arange(queries)[:, None]
    work = cost._StepWork.of_tiles([Tile(0, 3, 10, 10 + queries, 20, 20 + keys, low, high)])
    assert work.area.tolist() == [3 * ((j_minus_i >= low) & (j_minus_i <= high)).sum()]
