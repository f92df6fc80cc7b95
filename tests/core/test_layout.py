"""Layouts: every token is on one rank, in order, for every length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_cp.layout import Layout

shapes = dict(
    length=st.integers(1, 70),
    ring=st.integers(1, 5),
    ulysses=st.integers(1, 4),
    name=st.sampled_from(["zigzag", "contiguous"]),
)


@settings(max_examples=200, deadline=None)
@given(**shapes)
def test_shards_hold_each_token_once_and_unshard_restores_their_order(length, ring, ulysses, name):
    layout = Layout(length, ring, ulysses, name)
    tokens = torch.arange(1, length + 1)
    shards = [layout.shard(tokens, 0, rank) for rank in range(ring * ulysses)]
    assert {len(shard) for shard in shards} == {layout.local_len}
    assert torch.equal(torch.cat(shards)[layout.unshard_index], tokens)
    for shard in shards:
        real = shard[shard > 0]
        assert (real.diff() > 0).all(), "local order is global order"
    assert layout.padded_len - length < ring * ulysses * (2 if name == "zigzag" else 1)


@settings(max_examples=50, deadline=None)
@given(**shapes)
def test_adjacent_ulysses_ranks_hold_their_ring_shard(length, ring, ulysses, name):
    layout = Layout(length, ring, ulysses, name)
    for r in range(ring):
        together = [p for u in range(ulysses) for run in layout.runs(r * ulysses + u) for p in range(*run)]
        assert together == [p for run in layout.ring_runs[r] for p in range(*run)]


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk():
    assert Layout(16, 2, 1, "zigzag").ring_runs == (((0, 4), (12, 16)), ((4, 12),))


def test_sharding_sends_gradients_back_to_their_tokens():
    layout = Layout(5, 2, 1, "zigzag")
    full = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    sum(layout.shard(full, 1, rank).sum() * (rank + 1) for rank in range(2)).backward()
    owner = torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0])  # 8 padded tokens: chunks 0 and 3 to rank 0, 1 and 2 to rank 1
    assert torch.equal(full.grad[0, :, 0], owner.double())


def test_padding_is_zeros_or_copies_of_the_last_token_without_a_gradient():
    layout = Layout(5, 2, 1, "zigzag")
    full = torch.arange(1.0, 6.0, requires_grad=True)
    assert layout.shard(full, 0, 0).tolist() == [1, 2, 0, 0]
    copies = layout.shard(full, 0, 0, pad_value=None)
    assert copies.tolist() == [1, 2, 5, 5]
    copies.sum().backward()
    assert full.grad.tolist() == [1, 1, 0, 0, 0]


def test_the_shard_of_a_rank_without_tokens_requires_a_gradient():
    """Otherwise the rank would skip the collective in the backward pass, and the other ranks would wait for it."""
    full = torch.randn(2, 2, 3, requires_grad=True)
    assert all(Layout(2, 3, 1, "zigzag").shard(full, 1, rank).requires_grad for rank in range(3))


def test_a_tensor_of_another_length_is_refused():
    with pytest.raises(ValueError, match="expected 5 tokens in dim 1"):
        Layout(5, 2, 1).shard(torch.zeros(1, 6), 1, 0)
