"""Compiles copies of ds_cp/attention/merge_triton.py for GPUs that need not be there, by calls of the host function.

    python merge_for_targets.py FILE ...

Prints, by file, what the tests look for in each compiled kernel. Only the first file is compiled for every target.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget

NVDISASM = Path(nvidia.__file__).parent / "bin" / "nvdisasm"


class Driver:
    """What Triton asks of a device before it compiles."""

    target = GPUTarget("cuda", 90, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch

    def get_current_stream(self, device):
        return 0


class Compiling:
    """The kernel, compiled for a launch and not launched."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, []

    def __getitem__(self, grid):
        def compile_(*args, **kwargs):
            self.compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))

        return compile_


def instructions(cubin):
    """How often each instruction stands in the machine code (SASS)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", sass, re.MULTILINE)
    return Counter(name for name in found if name != "NOP")  # NOPs pad the end of the code


def tensors(dim, dtype, length, start):
    out, part = (
        torch.empty(2, 64, 4, dim, dtype=x).transpose(1, 2)[:, :, start:][:, :, :length] for x in (torch.float32, dtype)
    )
    lse, part_lse = (torch.empty(2, 4, 64)[:, :, start:][:, :, :length] for _ in range(2))
    return out, lse, part, part_lse


def load(file):
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.merge_kernel = Compiling(module.merge_kernel)
    return module


def compiled_kernels(module, arch, dim, dtype):
    """The kernels of merges of several lengths and row slices: one if they share it."""
    Driver.target = GPUTarget("cuda", arch, 32)
    module.merge_kernel.compiled.clear()
    for length, start in ((64, 0), (16, 48), (31, 5), (1, 1)):
        arguments = tensors(dim, dtype, length, start)
        assert module.supports(*arguments)
        module.merge(*arguments)
    return list({id(kernel): kernel for kernel in module.merge_kernel.compiled}.values())


def describe(module, arch, dim, dtype):
    kernel, *others = compiled_kernels(module, arch, dim, dtype)
    ptx, counts = kernel.asm["ptx"], instructions(kernel.asm["cubin"])
    loads, stores, barriers = (
        [match.start() for match in re.finditer(rf"\b{name}\b", ptx)] for name in ("ld.global", "st.global", "bar.sync")
    )
    rows, _ = module._tile(dim)
    return {
        "kernel": f"sm_{arch}, head dim {dim}, {str(dtype).removeprefix('torch.')}",
        "kernels": 1 + len(others),
        "instructions per element": sum(counts.values()) / (rows * dim / (32 * module.WARPS)),
        "64-bit divisions": len(re.findall(r"\b(?:div|rem)\.[su]64", ptx)),
        "128-bit loads": counts["LDG.E.128"],
        "128-bit stores": counts["STG.E.128"],
        "narrower stores": sum(n for name, n in counts.items() if name.startswith("STG")) - counts["STG.E.128"],
        "spills": counts["STL"] + counts["LDL"],
        "barriers before lse is stored": sum(loads[-1] < place < stores[-1] for place in barriers),
    }


TARGETS = [
    *((90, dim, torch.bfloat16) for dim in (128, 64, 80, 96, 192, 256)),
    *((80, dim, torch.bfloat16) for dim in (64, 96, 128)),
    (90, 128, torch.float32),
    (90, 36, torch.float16),
]

if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    first, *others = sys.argv[1:]
    kernels = {first: TARGETS, **{file: TARGETS[:1] for file in others}}
    print(json.dumps({file: [describe(load(file), *target) for target in kernels[file]] for file in kernels}))
