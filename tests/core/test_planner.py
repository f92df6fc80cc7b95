"""The planner resolves every "auto": the method from heads and node size, the layout, and the bytes exchanged."""

import os
import time

import pytest
import torch

from ds_cp.config import ConfigError, read
from ds_cp.planner import ModelFacts, exchanged_bytes, resolve
from ds_cp.process_group import GroupError
from harness import subject
from harness.models import ModelSpec
from harness.workers import workers


def plan(query_heads, key_heads, node=8, **value):
    return resolve(read(value), ModelFacts("TestModel", ((query_heads, key_heads),)), node, "cpu")


CHOICES = [
    # (heads, node, key) -> (method, ring, ulysses, layout)
    ((32, 8), 8, {"size": 8}, ("ulysses", 1, 8, "contiguous")),
    ((32, 2), 8, {"size": 8}, ("ulysses", 1, 8, "contiguous")),
    ((32, 8), 8, {"size": 16}, ("hybrid", 2, 8, "zigzag")),
    ((32, 8), 4, {"size": 8}, ("hybrid", 2, 4, "zigzag")),
    ((12, 4), 8, {"size": 8}, ("hybrid", 2, 4, "zigzag")),
    ((12, 12), 6, {"size": 4}, ("hybrid", 2, 2, "zigzag")),  # a group of ranks 4 to 7 would span two nodes
    ((24, 24), 8, {"size": 12}, ("hybrid", 3, 4, "zigzag")),
    ((9, 3), 8, {"size": 2}, ("ring", 2, 1, "zigzag")),
    ((9, 3), 6, {"size": 6}, ("hybrid", 2, 3, "zigzag")),
    ((9, 3), 8, {"size": 6}, ("ring", 6, 1, "zigzag")),
    ((7, 7), 8, {"size": 8}, ("ring", 8, 1, "zigzag")),
    ((8, 8), 8, {"size": 4, "method": "ring"}, ("ring", 4, 1, "zigzag")),
    ((8, 8), 8, {"size": 4, "method": "allgather", "layout": "contiguous"}, ("allgather", 4, 1, "contiguous")),
    ((8, 8), 8, {"size": 4, "method": "hybrid", "ulysses_size": 2}, ("hybrid", 2, 2, "zigzag")),
    ((8, 8), 8, {"size": 4, "ulysses_size": 2}, ("hybrid", 2, 2, "zigzag")),
    ((9, 3), 8, {"size": 3, "method": "ulysses"}, ("ulysses", 1, 3, "contiguous")),
    ((9, 3), 8, {"size": 2, "method": "ulysses"}, ("ulysses", 1, 2, "contiguous")),
]


@pytest.mark.parametrize("heads, node, value, want", CHOICES)
def test_the_method_follows_from_heads_and_node(heads, node, value, want):
    got = plan(*heads, node=node, **value)
    assert (got.method, got.ring, got.ulysses, got.layout) == want
    assert got.size == value["size"] and got.reasons["method"]


REFUSED = [
    ((9, 3), {"size": 4, "method": "ulysses"}, r'9 query and 3 key/value heads.*"ring", or "hybrid" with "ulysses_size" in \[2\]'),
    ((7, 7), {"size": 8, "method": "hybrid", "ulysses_size": 8}, r"7 query and 7 key/value heads"),
    ((5, 1), {"size": 4, "method": "hybrid"}, r'no split of 4 ranks .* Use "ring"'),
    ((8, 8), {"size": 4, "method": "ring", "ulysses_size": 2}, r'"context_parallel.method" is "ring", which would ignore it'),
]  # fmt: skip


@pytest.mark.parametrize("heads, value, message", REFUSED)
def test_a_method_that_the_heads_do_not_allow_is_refused_with_an_alternative(heads, value, message):
    with pytest.raises(ConfigError, match=message):
        plan(*heads, **value)


def test_bytes_are_the_published_formulas():
    size, heads, dim, local, item = 8, (32, 8), 128, 1024, 2
    assert exchanged_bytes(8, 1, local, heads, (dim, dim), item) == 7 * 2 * local * 8 * dim * item
    assert exchanged_bytes(1, 8, local, heads, (dim, dim), item) == 7 / 8 * item * local * dim * (64 + 16)
    few = exchanged_bytes(1, 8, local, (32, 2), (dim, dim), item)
    assert few == 7 / 8 * item * local * dim * (64 + 2 * size)  # two key heads repeated to one per rank
    both = exchanged_bytes(2, 4, local, heads, (dim, dim), item)
    assert both == 3 / 4 * item * local * dim * 80 + 1 * 2 * (4 * local) * 2 * dim * item


def one_asks_for(*by_rank, local_sizes=()):
    rank = torch.distributed.get_rank()
    if local_sizes:
        os.environ["LOCAL_SIZE"] = str(local_sizes[rank])
    if by_rank[rank] is not None:
        subject.changed_model(ModelSpec("llama"), by_rank[rank])


RING, ULYSSES = ({"size": 2, "method": method, "timeout": 20} for method in ("ring", "ulysses"))
DISAGREE = {
    "another JSON on a node": ((RING, ULYSSES), {}, r"\(rank 0: ring 2, ulysses 1, .*; rank 1: ring 1, ulysses 2, .*\)"),
    "nodes of other sizes": (({"size": 4},) * 4, {"local_sizes": (4, 4, 2, 2)},
                             r'rank 0 and 1 more: ring 1.*; rank 2 and 1 more: ring 2.*set "context_parallel.method"'),
    "a kernel that one cannot run": ((RING, RING | {"kernel": "flash_attention_2"}), {}, r'"context_parallel.kernel".*found on rank 1'),
}  # fmt: skip


@pytest.mark.parametrize("name", DISAGREE)
def test_ranks_with_different_plans_all_raise_before_any_group_is_created(name):
    by_rank, nodes, message = DISAGREE[name]
    workers(len(by_rank)).run_expecting_error(one_asks_for, message, *by_rank, **nodes)


def test_a_rank_that_does_not_attach_is_named():
    def waits():
        if torch.distributed.get_rank() == 1:
            return time.sleep(3)
        with pytest.raises(GroupError, match="waited 1 s .* for rank 1 to share the same model.*DS_CP_DISABLE"):
            one_asks_for(RING | {"timeout": 1}, None)

    workers(2).run(waits)
