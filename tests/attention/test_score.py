"""Softcap, sinks and dropout compared with the formulas in fp64; memory and synchronization of attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ds_cp.attention import kernels
from ds_cp.attention.attend import attend
from ds_cp.attention.exchange import PeerExchange
from ds_cp.attention.kernels import reference
from ds_cp.attention.score import Dropout, Score, TileCoordinates
from ds_cp.attention.terms import ALiBi, BucketedBias, MaskFunction
from ds_cp.layout import Layout
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL, EVERYTHING, Band
from ds_cp.mask.schedule import schedule
from ds_cp.process_group import Group
from harness.attention import (
    KERNELS,
    Largest,
    assert_equal,
    inputs,
    one_process,
    shared_attention,
)

DOCUMENTS = [[17, 1, 1, 18], [5, 30, 2]]
LENGTH, HEADS = 37, 6


def every_third(batch, head, q, k):
    return ((q + k + batch) % 3 != 1) | (q == k)


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 5),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    rule=st.sampled_from([CAUSAL, EVERYTHING, Band(4, 0), Band(3, 2)]),
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    softcap=st.sampled_from([None, 0.7, 5.0]),
    with_sinks=st.booleans(),
    kernel=st.sampled_from(KERNELS),
    all_at_once=st.booleans(),
)
def test_softcap_and_sinks_equal_the_formulas(
    ranks, layout, rule, lengths, heads, softcap, with_sinks, kernel, all_at_once
):
    tensors = inputs(1, *heads, sum(lengths), 8, 8)
    sinks = torch.linspace(-2, 3, heads[0], dtype=torch.float64) if with_sinks else None
    score = Score(0.7, softcap=softcap, sinks=sinks)
    shared = Layout(sum(lengths), ranks, 1, layout)
    ahead = ranks if all_at_once else 1
    got, _ = shared_attention(*tensors, [lengths], rule, shared, kernel, ahead, score=score)
    assert_equal(got, one_process(*tensors, [lengths], rule, 0.7, softcap=softcap, sinks=sinks), 1e-10)


@pytest.mark.parametrize("dim", [40, 96, 256, 512])
def test_wide_and_odd_head_dims_under_a_softcap(dim):
    tensors = inputs(1, 2, 1, 24, dim, dim // 2)
    got, _ = shared_attention(*tensors, [[9, 15]], CAUSAL, Layout(24, 2, 1), "torch", score=Score(0.1, softcap=2.0))
    assert_equal(got, one_process(*tensors, [[9, 15]], CAUSAL, 0.1, softcap=2.0), 1e-10)


# ---- dropout ---------------------------------------------------------------------------------------------------


def keep_of(dropout, batch, heads, length):
    index = torch.arange(length)
    return dropout.keep(TileCoordinates(slice(0, batch), index, index), heads)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_dropout_drops_the_same_pairs_for_every_sharding(ranks):
    dropout = Dropout(0.3, seed=2**62 + 12345)
    keep = keep_of(dropout, 2, HEADS, LENGTH).double() / 0.7
    tensors = inputs(2, HEADS, 3, LENGTH, 16, 16)
    got, _ = shared_attention(
        *tensors, DOCUMENTS, CAUSAL, Layout(LENGTH, ranks, 1), "torch", score=Score(0.3, dropout=dropout)
    )
    assert_equal(got, one_process(*tensors, DOCUMENTS, CAUSAL, keep=keep), 1e-10)


def test_dropout_of_a_slice_of_heads_is_a_slice_of_the_dropout():
    score = Score(1.0, dropout=Dropout(0.5, seed=9))
    index = torch.arange(16)
    part = score.of_heads(4, 6).of_heads(1, 2).dropout
    assert torch.equal(
        part.keep(TileCoordinates(slice(0, 2), index, index), 1), keep_of(score.dropout, 2, 8, 16)[:, 5:6]
    )


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_has_the_right_mean_along_every_dim_and_no_correlation(rate):
    keep = keep_of(Dropout(rate, seed=5), 4, 8, 256).double()
    spread = (rate * (1 - rate)) ** 0.5
    assert abs(keep.mean() - (1 - rate)) < 4 * spread / keep.numel() ** 0.5
    for dims in ((0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):  # per key, per query, per row, per head
        means = keep.mean(dims)
        assert ((means - (1 - rate)).abs() < 5 * spread * (means.numel() / keep.numel()) ** 0.5).all()
    centred = keep - (1 - rate)
    for dim in range(4):  # neighbours are independent
        pairs = centred * centred.roll(1, dim)
        assert abs(pairs.mean()) < 5 * spread**2 / keep.numel() ** 0.5
    other = keep_of(Dropout(rate, seed=6), 4, 8, 256).double() - (1 - rate)
    assert abs((centred * other).mean()) < 5 * spread**2 / keep.numel() ** 0.5


# ---- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "score",
    [
        Score(0.3, softcap=2.0),
        Score(0.3, terms=(MaskFunction(every_third, torch.zeros(1, 640, dtype=torch.int64)),)),
        Score(0.3, dropout=Dropout(0.1, 1)),
    ],
    ids=["softcap", "by index", "dropout"],
)
@pytest.mark.parametrize("rule", [CAUSAL, EVERYTHING, Band(90, 20)], ids=["causal", "everything", "window"])
def test_no_kernel_holds_the_scores_of_all_pairs(rule, score, monkeypatch):
    """With blocks of 64, no tensor is larger than 64 x 64 scores per head or than the inputs."""
    monkeypatch.setattr(reference, "BLOCK", 64)
    length, heads, dim = 640, 2, 8
    q, k, v, grad_out = inputs(1, heads, heads, length, dim, dim)
    group = Group("alone", (0,), 0, None, 1.0)
    steps = schedule(Documents.find(1, length).segments(rule), Layout(length, 1, 1), 0)
    index = torch.arange(length)
    with Largest() as largest:
        out = attend(
            *(x.requires_grad_() for x in (q, k, v)),
            lambda phase: PeerExchange(group, steps, 1, phase),
            reference.ReferenceKernel(),
            score,
            lambda rank: index,
        )
        out.backward(grad_out)
    assert largest.elements <= max(heads * 64 * 64, 2 * heads * length * dim)
    assert largest.elements < length * length / 4


class NoValueRead(TorchDispatchMode):
    """Raises when the value of a tensor is read, which synchronizes with the device."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket.__name__ not in self.READS, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "score",
    [
        Score(0.3),
        Score(0.3, softcap=2.0, sinks=torch.zeros(2)),
        Score(0.3, dropout=Dropout(0.1, 1 << 40)),
        Score(0.3, terms=(ALiBi(torch.ones(2), torch.arange(64)[None]),)),
        Score(0.3, terms=(BucketedBias(torch.ones(9, 2), lambda distance: distance.clamp(-4, 4) + 4),)),
    ],
    ids=["plain", "softcap and sinks", "dropout", "ALiBi", "buckets"],
)
def test_attention_never_synchronizes_with_the_device(score):
    q, k, v, grad_out = inputs(1, 2, 2, 64, 8, 8, dtype=torch.float32)
    steps = schedule(Documents.find(1, 64).segments(Band(20, 0)), Layout(64, 1, 1), 0)
    group, index = Group("alone", (0,), 0, None, 1.0), torch.arange(64)
    kernel = kernels.choose("torch", q, v, score)
    with NoValueRead():
        out = attend(
            *(x.requires_grad_() for x in (q, k, v)),
            lambda phase: PeerExchange(group, steps, 1, phase),
            kernel,
            score,
            lambda rank: index,
        )
        out.backward(grad_out)
