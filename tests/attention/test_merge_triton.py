"""The merge's kernel in Triton: in Triton's interpreter, and compiled for GPUs that are not here."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_cp.attention import merge
from ds_cp.attention.merge import Fused

ROOT = Path(__file__).parents[2]
KERNEL = ROOT / "ds_cp" / "attention" / "merge_triton.py"
PROGRAMS = ROOT / "tests" / "data" / "programs"

TOLERANCE = 2e-6
MOST_INSTRUCTIONS = 30  # per element of out; what torch compiles from the formula has 177 to 206

with_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (CUDA builds of torch install it)"
)

MISTAKES = {  # name of a copy: what is replaced in the kernel, by what
    "without_the_guard_of_inf": ('tl.where(a == float("-inf"), LOWEST, a)', "a"),
    "exponential_overflows": ("tl.exp(-tl.abs(difference))", "tl.exp(difference)"),
    "weights_exchanged": ("tl.where(difference > 0, larger, smaller)", "tl.where(difference < 0, larger, smaller)"),
    "last_row_missing": ("+ rows < length", "+ rows < length - 1"),
    "row_stride_of_lse_is_one": ("part_lse + rows * part_lse_row", "part_lse + rows"),
}
COMPILED_MISTAKES = {
    "division_in_64_bits": (
        "tl.program_id(0) // heads",
        "(tl.program_id(0) * out_row.to(tl.int64) // (heads * out_row.to(tl.int64))).to(tl.int32)",
    ),
    "without_the_barrier": ("tl.debug_barrier()", "pass"),
    "alignment_unknown": ("unit = math.gcd(4, ", "unit = math.gcd(1, "),
    "a_kernel_for_each_length": ('"length", "heads"', '"heads"'),
}


def run(program, mistakes, folder, **environment):
    """What a program prints for the kernel, and for each mistake."""
    text, files = KERNEL.read_text(encoding="utf-8"), {"kernel": KERNEL}
    for name, (right, wrong) in mistakes.items():
        assert text.count(right) == 1, name
        files[name] = folder / f"{name}.py"
        files[name].write_text(text.replace(right, wrong), encoding="utf-8")
    command = [sys.executable, "-P", str(PROGRAMS / program), *map(str, files.values())]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {name: found[str(file)] for name, file in files.items()}


@with_triton
def test_the_kernel_is_the_formula_and_mistakes_are_seen(tmp_path):
    found = run("merge_in_interpreter.py", MISTAKES, tmp_path, TRITON_INTERPRET="1")
    wrong = {
        name: [case for case, x in cases.items() if not (x is not None and x <= TOLERANCE)]
        for name, cases in found.items()
    }
    assert wrong.pop("kernel") == []
    assert all(wrong.values()), wrong
    assert math.isnan(found["without_the_guard_of_inf"]["head dim 128"])


@with_triton
@pytest.mark.timeout(240)
def test_compiled_it_is_short_without_64_bit_divisions_and_serves_all_lengths(tmp_path):
    found = run("merge_for_targets.py", COMPILED_MISTAKES, tmp_path)
    for kernel in found.pop("kernel"):
        assert kernel["kernels"] == 1, kernel
        assert kernel["instructions per element"] <= MOST_INSTRUCTIONS, kernel
        assert kernel["64-bit divisions"] == kernel["spills"] == 0, kernel
        assert kernel["128-bit loads"] >= kernel["128-bit stores"] > 0, kernel
        assert kernel["narrower stores"] == 1, kernel  # that of lse
        assert kernel["barriers before lse is stored"] == 1, kernel
    seen = {name: kernel for name, (kernel,) in found.items()}
    assert seen["division_in_64_bits"]["64-bit divisions"] > 0
    assert seen["without_the_barrier"]["barriers before lse is stored"] == 0
    assert seen["alignment_unknown"]["128-bit stores"] == 0
    assert seen["a_kernel_for_each_length"]["kernels"] > 1


def tensors(batch=1, heads=2, length=5, dim=64, dtype=torch.float32, part_dtype=torch.bfloat16):
    out, part = (torch.zeros(batch, length, heads, dim, dtype=x).transpose(1, 2) for x in (dtype, part_dtype))
    return out, torch.zeros(batch, heads, length), part, torch.zeros(batch, heads, length)


@with_triton
def test_what_the_kernel_does_not_support():
    from ds_cp.attention.merge_triton import supports

    out, lse, part, part_lse = tensors()
    assert supports(out, lse, part, part_lse)
    assert supports(*tensors(part_dtype=torch.float16)) and supports(*tensors(part_dtype=torch.float32))
    assert not supports(*tensors(dtype=torch.float64))
    assert not supports(*tensors(part_dtype=torch.float64))
    assert not supports(*tensors(dim=576))
    assert not supports(out, lse.double(), part, part_lse)
    assert not supports(out, lse, part[:, :, :4], part_lse)
    assert not supports(out, lse, part, part_lse[:, :1])
    assert not supports(out[..., ::2], lse, part[..., ::2], part_lse)
    assert not supports(out, lse, part.to("meta"), part_lse)
    meta = torch.zeros(1, device="meta")
    assert supports(
        *(
            meta.to(x.dtype).expand(x.shape[:3] + (1,) * (x.dim() - 3))
            for x in (out[..., :1], lse, part[..., :1], part_lse)
        )
    )
    long = [
        torch.empty_strided((1, 2, 5, 64), (0, 64, 2**27, 1), dtype=x, device="meta")
        for x in (torch.float32, torch.bfloat16)
    ]
    assert not supports(long[0], lse.to("meta"), long[1], part_lse.to("meta"))


class OnCuda(torch.Tensor):
    is_cuda = True


class Recorder:
    """Stands in for the module, and for the compiled function."""

    def __init__(self, error=None):
        self.error, self.calls = error, 0

    def supports(self, out, lse, part, part_lse):
        return out.dtype == torch.float32

    def merge(self, *tensors):
        self.calls += 1
        if self.error:
            raise self.error

    __call__ = merge


def fused(monkeypatch, module):
    monkeypatch.setattr(merge, "_import_merge_triton", lambda: module)
    function = Fused()
    function._compiled = Recorder()
    return function


def on_cuda(dtype=torch.float32):
    return [x.as_subclass(OnCuda) for x in tensors(dtype=dtype)]


def test_on_cuda_the_kernel_runs_and_torch_compiles_what_it_does_not_support(monkeypatch):
    module = Recorder()
    function = fused(monkeypatch, module)
    function(*on_cuda())
    assert (module.calls, function._compiled.calls) == (1, 0)
    function(*on_cuda(torch.float64))
    function(*tensors())
    assert (module.calls, function._compiled.calls) == (1, 2)


def test_without_triton_torch_compiles_the_merge(monkeypatch):
    function = fused(monkeypatch, None)
    function(*on_cuda())
    assert function._compiled.calls == 1


def test_a_failed_launch_is_not_retried(monkeypatch):
    module = Recorder(RuntimeError("no C compiler"))
    function = fused(monkeypatch, module)
    with pytest.warns(UserWarning, match="its Triton kernel failed: no C compiler"):
        function(*on_cuda())
    function(*on_cuda())
    assert (module.calls, function._compiled.calls) == (1, 2)


def test_out_of_memory_is_raised(monkeypatch):
    function = fused(monkeypatch, Recorder(torch.OutOfMemoryError()))
    with pytest.raises(torch.OutOfMemoryError):
        function(*on_cuda())
    assert function._compiled.calls == 0
