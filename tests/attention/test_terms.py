"""Terms of the score: ALiBi, learned biases by distance, mask functions and dense masks, compared with the formulas in fp64."""

import pytest
import torch

from ds_cp.attention.attend import attend
from ds_cp.attention.exchange import PeerExchange
from ds_cp.attention.kernels.reference import ReferenceKernel
from ds_cp.attention.score import Score
from ds_cp.attention.terms import ALiBi, BucketedBias, DenseMask, DistanceProfiles, MaskFunction
from ds_cp.cli.bench import in_process
from ds_cp.layout import Layout
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL, EVERYTHING, OPEN, Band
from ds_cp.mask.schedule import schedule
from harness.attention import (
    assert_equal,
    inputs,
    one_process,
    positions_of,
    shared_attention,
    whole_attention,
)

DOCUMENTS = [[17, 1, 1, 18], [5, 30, 2]]
LENGTH, HEADS = 37, 6


def slopes():
    return 2.0 ** -torch.arange(1, HEADS + 1, dtype=torch.float64)


def every_third(batch, head, q, k):
    return ((q + k + batch) % 3 != 1) | (q == k)


def random_mask(heads, kind):
    generator = torch.Generator().manual_seed(3)
    keep = torch.rand(2, heads, LENGTH, LENGTH, generator=generator) > 0.4
    keep |= torch.eye(LENGTH, dtype=torch.bool)
    if kind == "bool":
        return keep
    return torch.randn(keep.shape, dtype=torch.float64, generator=generator).masked_fill(~keep, -torch.inf)


def alibi():
    index = torch.arange(LENGTH, dtype=torch.float64)
    positions = torch.from_numpy(positions_of(DOCUMENTS))
    return (ALiBi(slopes(), positions),), slopes().view(1, -1, 1, 1) * (index[None, :] - index[:, None])


def rounded_alibi():
    positions = torch.from_numpy(positions_of(DOCUMENTS))
    bias = (slopes().bfloat16().view(1, -1, 1, 1) * positions.bfloat16()[:, None, None, :]).double() * 0.5
    return (ALiBi(slopes(), positions, 0.5, torch.bfloat16),), bias


def by_index():
    batch, index = torch.arange(2), torch.arange(LENGTH)
    keep = every_third(batch.view(-1, 1, 1, 1), 0, index.view(1, 1, -1, 1), index.view(1, 1, 1, -1))
    hidden = torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, -torch.inf)
    return (MaskFunction(every_third, torch.zeros(2, LENGTH, dtype=torch.int64)),), hidden


def by_index_in_the_document():
    position = torch.from_numpy(positions_of(DOCUMENTS))
    keep = every_third(torch.arange(2).view(-1, 1, 1, 1), 0, position[:, None, :, None], position[:, None, None, :])
    hidden = torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, -torch.inf)
    return (MaskFunction(every_third, torch.arange(LENGTH)[None] - position),), hidden


def given_whole(heads, kind):
    def make():
        mask = random_mask(heads, kind)
        bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if kind == "bool" else mask
        return (DenseMask(mask),), bias.double()

    return make


TERMS = {
    "alibi": alibi,
    "alibi rounded by the model": rounded_alibi,
    "by index": by_index,
    "by index in the document": by_index_in_the_document,
    "whole, bool": given_whole(1, "bool"),
    "whole, per head": given_whole(HEADS, "bool"),
    "whole, added": given_whole(1, "float"),
}


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", TERMS)
def test_terms_by_position_are_independent_of_the_sharding(name, ranks, layout):
    terms, bias = TERMS[name]()
    tensors = inputs(2, HEADS, 3, LENGTH, 16, 12)
    score = Score(0.3, terms=terms)
    got, _ = shared_attention(*tensors, DOCUMENTS, CAUSAL, Layout(LENGTH, ranks, 1, layout), "torch", score=score)
    assert_equal(got, one_process(*tensors, DOCUMENTS, CAUSAL, bias=bias), 1e-10)


def test_a_query_without_visible_keys_has_zero_output_and_zero_gradient():
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask[:, :, 5] = False
    tensors = inputs(1, HEADS, 3, LENGTH, 16, 16)
    score = Score(0.3, terms=(DenseMask(mask),))
    got, _ = shared_attention(*tensors, [[LENGTH]], EVERYTHING, Layout(LENGTH, 4, 1), "torch", score=score)
    assert all(torch.isfinite(x).all() for x in got)
    assert not got[0][:, :, 5].any() and not got[1][:, :, 5].any()
    mask[:, :, 5, 5] = True  # now the query sees a key, and its output has no gradient
    grad_out = tensors[3].clone()
    grad_out[:, :, 5] = 0
    tensors[3] = grad_out
    want = one_process(*tensors, [[LENGTH]], EVERYTHING, may_see=mask[0])
    got, _ = shared_attention(*tensors, [[LENGTH]], EVERYTHING, Layout(LENGTH, 4, 1), "torch", score=score)
    assert_equal(got, want, 1e-10)


@pytest.mark.parametrize("ranks, layout", [(1, "contiguous"), (2, "zigzag"), (4, "zigzag"), (3, "contiguous")])
def test_a_learned_bias_by_distance_and_its_table_equal_the_formulas(ranks, layout):
    """Every rank uses the whole table, so the gradients of the ranks add up to the gradient of the table."""
    q, k, v, grad_out = inputs(2, 4, 2, 37, 8, 8)
    table = torch.randn(9, 4, dtype=torch.float64)
    cut = Layout(37, ranks, 1, layout)
    segments = Documents.find(2, 37).segments(Band(OPEN, OPEN))

    def bucket(distance):
        return distance.clamp(-4, 4) + 4

    def rank(group):
        own = table.clone().requires_grad_()
        owned = [torch.cat([torch.arange(*run) for run in runs]) for runs in cut.ring_runs]
        out = attend(
            *(cut.shard(x, 2, group.rank) for x in (q, k, v)),
            lambda phase: PeerExchange(group, schedule(segments, cut, group.rank), 1, phase),
            ReferenceKernel(),
            Score(0.3, terms=(BucketedBias(own, bucket),)),
            owned.__getitem__,
        )
        out.backward(cut.shard(grad_out, 2, group.rank))
        return out.detach(), own.grad

    outs, gradients = zip(*in_process.run(ranks, rank, timeout=10))
    own = table.clone().requires_grad_()
    index = torch.arange(37)
    bias = own[bucket(index[None, :] - index[:, None])].permute(2, 0, 1)
    want = whole_attention(q, k, v, torch.ones(2, 37, 37, dtype=torch.bool), 0.3, bias=bias)
    want.backward(grad_out)
    whole = torch.cat(outs, dim=2).index_select(2, cut.unshard_index)
    assert (whole - want).norm() <= 1e-10 * want.norm()
    assert (sum(gradients) - own.grad).norm() <= 1e-10 * own.grad.norm()


def whole(query, key, value, table):
    """Attention of the whole sequence with the bias and the sinks that the last channels of `query` define."""
    q, weights, sinks = query.split([key.size(-1), table.size(0), 1], dim=-1)
    index = torch.arange(q.size(2))
    distance = index[:, None] - index[None, :]
    inside = (distance >= 0) & (distance < table.size(1))
    bias = torch.where(inside, (weights @ table)[..., index[:, None], distance.clamp(0, table.size(1) - 1)], 0)
    scores = (q @ key.transpose(-1, -2)) * 0.3 + bias
    scores = scores.masked_fill(distance < 0, -torch.inf)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1] @ value


@pytest.mark.parametrize("ranks, layout", [(1, "contiguous"), (2, "zigzag"), (3, "contiguous")])
def test_channels_concatenated_to_the_queries_equal_the_formulas(ranks, layout):
    length, extent, profiles = 37, 9, 3
    q, k, v, grad_out = inputs(2, 4, 4, length, 8, 8)
    q = torch.cat([q, torch.randn(2, 4, length, profiles + 1, dtype=torch.float64)], dim=-1)
    table = torch.randn(profiles, extent, dtype=torch.float64)
    cut, segments = Layout(length, ranks, 1, layout), Documents.find(2, length).segments(CAUSAL)

    def rank(group):
        own = table.clone().requires_grad_()
        local = [cut.shard(x, 2, group.rank).requires_grad_() for x in (q, k, v)]
        owned = [torch.cat([torch.arange(*run) for run in runs]) for runs in cut.ring_runs]
        out = attend(
            *local,
            lambda phase: PeerExchange(group, schedule(segments, cut, group.rank), 1, phase),
            ReferenceKernel(),
            Score(0.3, terms=(DistanceProfiles(own),), sinks_in_query=True),
            owned.__getitem__,
        )
        out.backward(cut.shard(grad_out, 2, group.rank))
        return [out.detach(), *(x.grad for x in local)], own.grad

    results, of_tables = zip(*in_process.run(ranks, rank, timeout=10))
    got = [torch.cat(parts, dim=2).index_select(2, cut.unshard_index) for parts in zip(*results)]
    want = [x.clone().requires_grad_() for x in (q, k, v, table)]
    out = whole(*want)
    out.backward(grad_out)
    for a, b in zip([*got, sum(of_tables)], [out.detach(), *(x.grad for x in want)], strict=True):
        assert (a - b).norm() <= 1e-10 * b.norm()
