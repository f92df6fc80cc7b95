"""Merging partial attention: the eager function and the compiled one."""

import shutil

import pytest
import torch

from ds_cp.attention import merge
from ds_cp.attention.merge import Compiled, merge_eager

NONE = float("-inf")


def parts(length, batch=1, dtype=torch.float32, part_dtype=torch.bfloat16, rows=slice(None)):
    """out, lse, part, part_lse. The first query has no key, the second has keys in the part only, the third in out only."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    out, part = (normal(batch, length, 6, 40) for _ in range(2))
    lse, part_lse = (normal(batch, 6, length) * 3 for _ in range(2))
    for i, seen in enumerate([(False, False), (False, True), (True, False)]):
        for o, s, sees in zip((out, part), (lse, part_lse), seen):
            if not sees:
                o[:, i], s[..., i] = 0, NONE
    out, lse, part, part_lse = out.to(dtype), lse.to(dtype), part.to(part_dtype), part_lse.to(dtype)
    return out.transpose(1, 2), lse, part.transpose(1, 2), part_lse


def by_hand(out, lse, part, part_lse):
    """The definition of the merge in fp64."""
    out, lse, part, part_lse = (x.double() for x in (out, lse, part, part_lse))
    a, b = lse.exp().unsqueeze(-1), part_lse.exp().unsqueeze(-1)
    return torch.where(a + b > 0, (a * out + b * part) / (a + b), 0), (a + b).log().squeeze(-1)


def check(function, tensors, tolerance):
    out, lse, part, part_lse = tensors
    want = by_hand(*tensors)
    places = out.data_ptr(), lse.data_ptr()
    with torch.no_grad():
        function(out, lse, part, part_lse)
    assert (out.data_ptr(), lse.data_ptr()) == places
    for got, wanted in zip((out, lse), want):
        torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


def view_of_more(tensors, start):
    """`out` and `lse` as views of longer tensors, like the queries of a tile."""
    out, lse, part, part_lse = tensors
    long_out, long_lse = out.new_zeros(out.size(0), 3 * out.size(2), 6, 40).transpose(1, 2), lse.repeat(1, 1, 3)
    rows = slice(start, start + out.size(2))
    long_out[:, :, rows], long_lse[..., rows] = out, lse
    return long_out[:, :, rows], long_lse[..., rows], part, part_lse


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("place", [lambda x: x, lambda x: view_of_more(x, 7)], ids=["whole", "view"])
def test_merging_is_attention_over_both_sets_of_keys(dtype, tolerance, place):
    check(merge.merge_partial_attention, place(parts(12, 2, dtype)), tolerance)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++, which is not here")
def test_the_compiled_kernel_is_the_formula_and_serves_every_length():
    torch._dynamo.reset()
    compiled = Compiled(merge_eager)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for length, start in ((12, 7), (9, 2), (30, 21)):
        check(compiled, view_of_more(parts(length), start), 2e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    assert compiled._run is not compiled._plain


def test_signatures_beyond_the_recompile_limit_run_uncompiled(monkeypatch):
    torch._dynamo.reset()
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_(function, backend="aot_eager", **how))
    # monkeypatch would delete the attribute at the end, since it is in no __dict__, and hide it from later tests
    with torch._dynamo.config.patch(recompile_limit=2):
        compiled = Compiled(merge_eager)
        for batch, dtype in ((1, torch.float32), (2, torch.float32), (1, torch.float64), (2, torch.float64)):
            check(compiled, parts(12, batch, dtype), 2e-6)
            check(compiled, view_of_more(parts(9, batch, dtype), 5), 2e-6)


def test_after_a_failed_compilation_the_eager_function_runs_and_compilation_is_not_retried(monkeypatch):
    tried = []

    def refuses(*tensors):
        tried.append(tensors)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda function, **how: refuses)
    compiled = Compiled(merge_eager)
    with pytest.warns(UserWarning, match="runs uncompiled, torch.compile failed: no compiler"):
        check(compiled, parts(12), 2e-6)
    check(compiled, parts(12), 2e-6)
    assert len(tried) == 1
    with pytest.raises(RuntimeError, match="must match"):
        compiled(*parts(12)[:3], torch.zeros(1, 6, 5))


def test_a_nan_in_either_part_is_a_nan_of_the_result():
    for which in range(4):
        tensors = parts(9, dtype=torch.float64, part_dtype=torch.float64)
        tensors[which][0, 2, 5] = torch.nan
        out, lse, *_ = tensors
        merge_eager(*tensors)
        assert out[0, 2, 5].isnan().any(), which
        assert lse[0, 2, 5].isnan() == (which % 2 == 1)
        assert out.isnan().sum() <= 40 and lse.isnan().sum() <= 1
