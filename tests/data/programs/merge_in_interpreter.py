"""Runs copies of ds_cp/attention/merge_triton.py on CPU tensors, in Triton's interpreter.

    TRITON_INTERPRET=1 python merge_in_interpreter.py FILE ...

Prints, by file and case, the largest difference from `merge_eager`: NaN if one of the two has a NaN where the other has
none, None if the file does not support the tensors.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch

from ds_cp.attention.merge import merge_eager


def by_tokens(batch, heads, length, dim):
    """[B, H, L, d] in memory [B, L, H, d]."""
    return torch.randn(batch, length, heads, dim).transpose(1, 2)


def by_heads(*shape):
    return torch.randn(shape)


def lse_by_heads(batch, heads, length, dim):
    return torch.randn(batch, heads, length)


def lse_by_tokens(batch, heads, length, dim):
    return torch.randn(batch, length, heads).transpose(1, 2)


def case(shape, dtype=torch.bfloat16, part=by_tokens, part_lse=lse_by_heads, rows=slice(None), nan=False):
    """out, lse, part, part_lse and the rows to merge. Three of them have no key on one side or on both."""
    tensors = by_tokens(*shape), lse_by_heads(*shape), part(*shape).to(dtype), part_lse(*shape)
    start = rows.start or 0
    for i, sides in enumerate([(0, 1), (0,), (1,)]):
        for side in sides:
            tensors[2 * side][:, :, start + i], tensors[2 * side + 1][:, :, start + i] = 0, -torch.inf
    for row, which, size in ((4, 3, 1000), (5, 1, 1000), (6, 1, 100)):
        tensors[which][:, :, start + row] += size
    for i in range(4 if nan else 0):
        tensors[i][0, 0, start + 7 + i] = torch.nan
    return tensors, rows


CASES = {
    "head dim 128": lambda: case((2, 3, 37, 128)),
    "head dim 64, fp16": lambda: case((1, 2, 40, 64), torch.float16),
    "head dim 96, fp32": lambda: case((1, 2, 17, 96), torch.float32),
    "head dim 80, rows of longer tensors": lambda: case((2, 2, 50, 80), rows=slice(7, 42)),
    "head dim 192, part by heads": lambda: case((2, 2, 30, 192), part=by_heads, rows=slice(4, 23)),
    "head dim 256, part_lse by tokens": lambda: case((1, 2, 9, 256), part_lse=lse_by_tokens),
    "head dim 36": lambda: case((1, 3, 75, 36), rows=slice(2, 72)),
    "head dim 33, one head": lambda: case((2, 1, 11, 33)),
    "NaN": lambda: case((1, 2, 20, 64), torch.float32, nan=True),
}


def difference(module, tensors, rows):
    """Over the whole tensors: other rows must keep their values."""
    want = [x.clone() for x in tensors]
    merge_eager(*(x[:, :, rows] for x in want))
    arguments = [x[:, :, rows] for x in tensors]
    if not module.supports(*arguments):
        return None
    module.merge(*arguments)
    worst = 0.0
    for got, wanted in zip(tensors, want):
        same = (got == wanted) | (got.isnan() & wanted.isnan())
        worst = max(worst, (got - wanted).abs().masked_fill(same, 0).max().item(), key=lambda x: (x != x, x))
    return worst


def load(file):
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    torch.manual_seed(0)
    print(
        json.dumps(
            {file: {name: difference(load(file), *make()) for name, make in CASES.items()} for file in sys.argv[1:]}
        )
    )
