"""Bands as windows of FlashAttention, and tiles as launches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_cp.attention import kernels
from ds_cp.attention.kernels.reference import ReferenceKernel
from ds_cp.attention.kernels.windows import ALL, launches, split_to_windows
from ds_cp.attention.score import Score
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL, OPEN, Band
from ds_cp.mask.schedule import find_tiles
from ds_cp.mask.tile import Tile
from harness.attention import block_inputs, packed_steps
from harness.flash_stand_in import VERSIONS, make_kernel

CPU = torch.device("cpu")
NEWEST = [(kernel, version) for kernel, version in VERSIONS if version in ("2.8.3.post2", "hopper 01afd16", "4.0.0b36")]


@settings(max_examples=150, deadline=None)
@given(
    m=st.integers(1, 12),
    n=st.integers(1, 12),
    offset=st.integers(-14, 14),
    left=st.sampled_from([0, 1, 3, 9, OPEN]),
    right=st.sampled_from([0, 2, -2, 7, OPEN]),
    which=st.sampled_from(NEWEST),
)
def test_any_band_is_one_window_or_a_few(m, n, offset, left, right, which):
    """Compared with the dense band, for tiles of any shape, also with many more queries than keys."""
    if left + right < 0:
        return
    segments = Documents.find(1, 40).segments(Band(left, right))
    start = 14
    tiles = find_tiles(segments, ((start + offset, start + offset + m),), ((start, start + n),))
    kernel = make_kernel(*which)
    for tile in tiles:
        q, k, v, grad_out = block_inputs((2, 1), m, n, (8, 8), batch=1)
        whole = torch.full((m, n), -torch.inf, dtype=q.dtype)
        pieces = list(kernel.lower(tile))
        assert len(pieces) <= 3
        for piece in pieces:
            i = torch.arange(piece.q_stop - piece.q_start).unsqueeze(-1)
            j = torch.arange(piece.k_stop - piece.k_start)
            seen = (j - i >= piece.lo) & (j - i <= piece.hi)
            assert seen.any(1).all() and seen.any(0).all()
            part = whole[piece.q_start : piece.q_stop, piece.k_start : piece.k_stop]
            assert (part[seen] == -torch.inf).all(), "a pair twice"
            part[seen] = 0
            index = slice(piece.q_start, piece.q_stop), slice(piece.k_start, piece.k_stop)
            a, b, c = q[:, :, index[0]], k[:, :, index[1]], v[:, :, index[1]]
            for mine, formula in zip(
                kernel.forward(a, b, c, *kernel.launches([piece], CPU), Score(0.3)), _formula(a, b, c, seen)
            ):
                assert torch.allclose(mine, formula)
        i, j = torch.arange(m).unsqueeze(-1) + start + offset, torch.arange(n) + start
        band = (j >= i - left) & (j <= i + right)
        assert torch.equal(whole == 0, band)


def _formula(q, k, v, seen):
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def test_flash_attention_2_mistakes_some_windows_for_open_and_splitting_avoids_it():
    """100 queries and 10 keys, causal from the top left: the kernel takes the window (ALL, 90) for an open one."""
    tile = Tile(0, 1, 0, 100, 0, 10, -OPEN, 0)
    kernel = make_kernel("flash_attention_2", "2.8.3.post2")
    q, k, v, _ = block_inputs((1, 1), 100, 10, batch=1)
    out, lse = kernel.forward(q, k, v, *kernel.launches([tile], CPU), Score(0.3))
    assert not torch.allclose(lse, ReferenceKernel().forward(q, k, v, tile, Score(0.3))[1])
    assert [piece[2:] for piece in split_to_windows(tile)] == [(0, 9, 0, 9, -OPEN, 0), (9, 100, 0, 10, -OPEN, OPEN)]


@pytest.mark.parametrize("rule", [CAUSAL, Band(OPEN, OPEN), Band(6, 0), Band(3, 2)])
def test_a_packed_row_is_one_launch(rule):
    documents = [17, 1, 1, 18, 2, 40]
    (step,) = packed_steps(documents, rule)
    kernel = make_kernel("flash_attention_2", "2.8.3.post2")
    (launch,) = kernels.kernel_work(step, kernel, CPU)
    ends = torch.tensor([0, *documents]).cumsum(0)
    assert torch.equal(launch.cu_q, ends.int()) and torch.equal(launch.cu_k, ends.int())
    assert (launch.max_q, launch.max_k) == (40, 40)
    assert kernels.kernel_work(step, kernel, CPU) is kernels.kernel_work(step, kernel, CPU), "built once per schedule"


def test_windows_of_a_launch_are_the_rules():
    assert [(x.left, x.right) for x in launches(packed_steps([9, 1, 8])[0].tiles, CPU)] == [(ALL, 0)]
    assert [(x.left, x.right) for x in launches(packed_steps([9, 1, 8], Band(3, 0))[0].tiles, CPU)] == [(3, 0)]
    assert [(x.left, x.right) for x in launches(packed_steps([9, 4], Band(OPEN, OPEN))[0].tiles, CPU)] == [(ALL, ALL)]


def test_tiles_with_a_gap_or_different_windows_or_several_batch_rows_are_separate_launches():
    causal = [Tile(0, 1, 0, 4, 0, 4, -OPEN, 0), Tile(0, 1, 4, 9, 4, 9, -OPEN, 0)]
    assert len(launches(causal, CPU)) == 1
    assert len(launches([causal[0], causal[1]._replace(q_start=5, k_start=5)], CPU)) == 2
    assert len(launches([causal[0], causal[1]._replace(lo=-2)], CPU)) == 2
    assert len(launches([tile._replace(batch_stop=2) for tile in causal], CPU)) == 2
    assert len(launches(causal, CPU, varlen=False)) == 2
