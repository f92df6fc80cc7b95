"""Ring attention and Ulysses on ranks that are threads of one process, compared in fp64 with attention of the whole sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_cp.attention import kernels
from ds_cp.attention.accumulate import kernel_calls
from ds_cp.attention.kernels import torch_flash
from ds_cp.attention.merge import merge_partial_attention
from ds_cp.attention.score import Score
from ds_cp.attention.ulysses import HeadSplit, Ulysses
from ds_cp.cli.bench import in_process
from ds_cp.layout import Layout
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL, OPEN, Band
from ds_cp.mask.schedule import schedule
from harness.attention import KERNELS, assert_equal, inputs, one_process, positions_of, shared_attention

RULES = {
    "causal": CAUSAL,
    "bidirectional": Band(OPEN, OPEN),
    "window of 1": Band(0, 0),
    "window of 5": Band(4, 0),
    "window wider than a shard": Band(20, 0),
    "two-sided window": Band(3, 2),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_packed_rows_under_every_rule_equal_one_process(ranks, rule, name, kernel):
    documents = [[17, 1, 1, 18], [5, 30, 2]]
    tensors = inputs(2, 6, 3, 37, 16, 16)
    got, _ = shared_attention(*tensors, documents, RULES[rule], Layout(37, ranks, 1, name), kernel)
    assert_equal(got, one_process(*tensors, documents, RULES[rule]), 1e-10)


def test_concatenated_keys_give_bitwise_equal_results(monkeypatch):
    tensors, layout = inputs(2, 6, 3, 37, 16, 8), Layout(37, 3, 1, "zigzag")
    want, _ = shared_attention(*tensors, [[17, 20], [37]], Band(9, 0), layout, "torch")
    monkeypatch.setattr(torch_flash, "MANY_KEYS", 1)
    got, _ = shared_attention(*tensors, [[17, 20], [37]], Band(9, 0), layout, "torch")
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 5),
    name=st.sampled_from(["zigzag", "contiguous"]),
    rule=st.builds(Band, st.sampled_from([0, 1, 3, 9, OPEN]), st.sampled_from([0, 0, 0, 2, OPEN])),
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (9, 3), (6, 6)]),
    dims=st.sampled_from([(8, 8), (16, 8), (5, 3)]),
    kernel=st.sampled_from(KERNELS),
    all_at_once=st.booleans(),
)
def test_any_lengths_heads_and_bands_equal_one_process(ranks, name, rule, lengths, heads, dims, kernel, all_at_once):
    tensors = inputs(1, *heads, sum(lengths), *dims)
    layout = Layout(sum(lengths), ranks, 1, name)
    got, _ = shared_attention(*tensors, [lengths], rule, layout, kernel, ahead=ranks if all_at_once else 1)
    assert_equal(got, one_process(*tensors, [lengths], rule), 1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_too_large_for_a_plain_exponential_still_merge(kernel):
    q, k, v, grad_out = inputs(1, 2, 2, 24, 8, 8)
    tensors = q * 300, k * 10, v, grad_out
    got, _ = shared_attention(*tensors, [[24]], CAUSAL, Layout(24, 4, 1), kernel)
    assert all(torch.isfinite(x).all() for x in got)
    assert_equal(got, one_process(*tensors, [[24]], CAUSAL), 1e-9)


def test_rows_that_see_no_key_merge_to_zero_without_nan():
    out, lse = torch.zeros(1, 1, 3, 2), torch.full((1, 1, 3), -torch.inf)
    part, part_lse = torch.ones(1, 1, 3, 2), torch.tensor([[[-torch.inf, 0.0, 5.0]]])
    merge_partial_attention(out, lse, torch.where(part_lse[..., None].isinf(), 0.0, part), part_lse)
    assert out[0, 0].tolist() == [[0, 0], [1, 1], [1, 1]]
    assert lse[0, 0].tolist() == [-torch.inf, 0.0, 5.0]
    merge_partial_attention(out, lse, torch.zeros_like(part), torch.full_like(lse, -torch.inf))
    assert out[0, 0].tolist() == [[0, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_error_does_not_grow_with_the_ring(ranks):
    """At most 1.5 times the error of the bf16 kernel in one process, in the median of 5 seeds."""
    shared_errors, own_errors = [], []
    for seed in range(5):
        tensors = inputs(1, 4, 2, 256, 32, 32, seed=seed)
        want = one_process(*tensors, [[256]], CAUSAL)
        half = [x.bfloat16() for x in tensors]
        for ring, errors in ((ranks, shared_errors), (1, own_errors)):
            got, _ = shared_attention(*half, [[256]], CAUSAL, Layout(256, ring, 1), "torch")
            errors.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want)])
    shared, own = (torch.tensor(errors).median(0).values for errors in (shared_errors, own_errors))
    assert (shared <= 1.5 * own).all(), (shared, own)


@pytest.mark.parametrize("seed", range(3))
def test_bf16_blocks_are_accumulated_in_fp32(seed):
    """On 16 ranks, rounding to bf16 after each merge gives errors of 3.7e-3 (out), 8.7e-3 (lse) and 6.2e-3 (dK, dV).
    Accumulation in fp32 gives 2.3e-3 (out) and 3.3e-3 (gradients), the rounding error of a single block."""
    tensors = [x.bfloat16() for x in inputs(1, 2, 1, 512, 32, 32, seed=seed)]
    want = one_process(*(x.double() for x in tensors), [[512]], CAUSAL)
    got, _ = shared_attention(*tensors, [[512]], CAUSAL, Layout(512, 16, 1), "torch")
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want)]
    assert errors[0] < 2.8e-3 and max(errors[1:]) < 4.2e-3, errors


BYTES = [
    # (ranks, layout, rule, share of a full ring's rows, summed over ranks)
    (4, "zigzag", Band(OPEN, OPEN), 1.0),
    (4, "contiguous", Band(OPEN, OPEN), 1.0),
    (4, "zigzag", CAUSAL, 0.75),
    (8, "zigzag", CAUSAL, 0.75),
    (4, "contiguous", CAUSAL, 0.5),
    (8, "contiguous", CAUSAL, 0.5),
    (8, "zigzag", Band(15, 0), 0.125),  # window of S/16: each chunk needs the last tokens of its left neighbor only
]


@pytest.mark.parametrize("ranks, name, rule, share", BYTES)
def test_bytes_sent_are_the_formulas(ranks, name, rule, share):
    """Forward (P-1) 2 L h d e, backward (P-1) 2 L h d (e + a), times the rows that the mask needs."""
    length, key_heads, dim = 256, 2, 8
    tensors = inputs(1, 4, key_heads, length, dim, dim, dtype=torch.float32)
    _, sent = shared_attention(*tensors, [[length]], rule, Layout(length, ranks, 1, name), "torch")
    full = ranks * (ranks - 1) * 2 * (length // ranks) * key_heads * dim * 4
    forward, backward = (sum(rank[phase] for rank in sent) for phase in ("forward", "backward"))
    if share == 0.125:
        assert forward <= share * full
    else:
        assert forward == share * full
    assert backward == 2 * forward  # K and V again, and their gradients, both fp32


def test_packed_documents_send_only_what_another_rank_shares():
    length, ranks = 240, 4
    tensors = inputs(1, 2, 2, length, 8, 8, dtype=torch.float32)
    _, apart = shared_attention(*tensors, [[60] * 4], CAUSAL, Layout(length, ranks, 1, "contiguous"), "torch")
    assert sum(rank["forward"] for rank in apart) == 0
    _, together = shared_attention(*tensors, [[120, 120]], CAUSAL, Layout(length, ranks, 1, "contiguous"), "torch")
    assert sum(rank["forward"] for rank in together) == 2 * 60 * 2 * (8 + 8) * 4


@pytest.mark.parametrize("query_heads, key_heads", [(8, 8), (8, 2), (8, 1), (12, 3), (9, 3), (7, 7), (28, 7)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ulysses_sends_each_head_to_its_rank_and_back(query_heads, key_heads, ranks):
    """Each value is unique, so that its position shows batch row, head, token and channel."""
    split = HeadSplit.plan(query_heads, key_heads, ranks)
    if split is None:
        assert query_heads % ranks and key_heads < ranks
        return
    batch, local, dim = 3, 5, 2
    total = local * ranks

    def tagged(heads):
        tags = torch.arange(batch * heads * total * dim, dtype=torch.float64)
        return tags.view(batch, heads, total, dim)

    q, k = tagged(query_heads), tagged(key_heads)

    def rank(group):
        mine = slice(group.rank * local, (group.rank + 1) * local)
        ulysses = Ulysses(split, group)
        parts = ulysses.to_heads("forward", [q[:, :, mine]], [k[:, :, mine], -k[:, :, mine, :1]])
        return parts, ulysses.to_tokens("forward", parts[:1], parts[1:]), group.calls

    first_q = first_k = 0
    repeated = k.repeat_interleave(split.repeat, 1)
    for u, ((own_q, own_k, own_v), (back_q, back_k, back_v), calls) in enumerate(in_process.run(ranks, rank)):
        mine = slice(u * local, (u + 1) * local)
        assert torch.equal(own_q, q[:, first_q : first_q + split.query_heads[u]])
        assert torch.equal(own_k, repeated[:, first_k : first_k + split.kv_heads[u]])
        assert torch.equal(own_v, -own_k[..., :1])
        assert torch.equal(back_q, q[:, :, mine])
        assert torch.equal(back_k, split.repeat * k[:, :, mine])
        assert torch.equal(back_v, -back_k[..., :1])
        assert calls["forward"] == 2, "one message each way"
        first_q, first_k = first_q + split.query_heads[u], first_k + split.kv_heads[u]
    assert (first_q, first_k) == (query_heads, key_heads * split.repeat)


@pytest.fixture
def uninitialized_memory_is_nan():
    """New tensors that are not initialized contain NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


GAPS = {
    "some queries see no key": Band(OPEN, -3),
    "some keys are seen by no query": Band(1 << 20, -30),
    "tiles overlap in part": Band(9, 4),
    "one tile is everything": Band(OPEN, OPEN),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", GAPS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_uninitialized_memory_is_never_read(ranks, rule, kernel, uninitialized_memory_is_nan):
    """With sinks, the output of a query without keys is defined: 0."""
    assert torch.empty(3).isnan().all()
    tensors, sinks = inputs(2, 4, 2, 37, 8, 8), torch.randn(4, dtype=torch.float64)
    documents, rule = [[17, 1, 19], [37]], GAPS[rule]
    score = Score(0.3, sinks=sinks)
    got, _ = shared_attention(*tensors, documents, rule, Layout(37, ranks, 1, "zigzag"), kernel, score=score)
    assert_equal(got, one_process(*tensors, documents, rule, sinks=sinks), 1e-10)


CPU = torch.device("cpu")


def planned(lengths, ranks, rank, kernel="torch"):
    steps = schedule(
        Documents.find(1, sum(lengths), positions_of([lengths])).segments(CAUSAL),
        Layout(sum(lengths), ranks, 1, "contiguous"),
        rank,
    )
    found = kernel_calls(steps, kernels.make(kernel), CPU, 1)
    assert kernel_calls(steps, kernels.make(kernel), CPU, 1) is found, "made once per schedule"
    return found


def test_documents_of_equal_length_are_one_kernel_call_without_accumulation():
    found = planned([8, 8, 8, 8], 2, 1)
    assert [len(step) for step in found.calls] == [1, 0]
    assert found.calls[0][0].work.n_tiles == 2
    assert found.queries.single_call and found.keys[0].single_call


def test_the_first_kernel_call_writes_rows_and_later_calls_accumulate():
    """Rank 1 of 2 holds positions 8-15; the document 4-11 needs four rows of rank 0."""
    own, arrived = planned([4, 8, 4], 2, 1).calls
    assert [(call.q.slices[2], call.q.first, call.k.first) for call in own] == [(slice(0, 8), True, True)]
    assert [(call.q.slices[2], call.q.first, call.k.first) for call in arrived] == [(slice(0, 4), False, True)]
    coverage = planned([4, 8, 4], 2, 1)
    assert not coverage.queries.has_gaps and not coverage.queries.single_call
    assert coverage.keys[0].single_call and coverage.keys[1].single_call
    assert not planned([4, 8, 4], 2, 0).keys[0].single_call, "their gradients come home from rank 1"
