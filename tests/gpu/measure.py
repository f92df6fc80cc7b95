"""What a rank's share costs on one card, in under 8 minutes; numbers for docs/performance.md.

    python tests/gpu/measure.py --output gpu.json           # every part, on the card
    python tests/gpu/measure.py --parts attention merge     # some of them
    python tests/gpu/measure.py --device cpu                # a dry run without a card: tiny, checks the script only

rate       of a large matrix product in bf16: what the other lines are compared with
attention  one rank's tiles, merges and copies at S tokens for P ranks, alone on the card, against the one-shot kernel on the
           whole sequence divided by P. Rows of other ranks lie there already, so no message is waited for
merge      one merge of the total, fused and pass by pass
longest    rows of a Llama of 1B parameters that the card trains: plain, with ds_cp's memory keys, and with layers in tiles
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

os.environ.setdefault("DS_ACCELERATOR", "cuda" if "cpu" not in sys.argv else "cpu")

import deepspeed
import torch
from rows import longest

from ds_cp.attention import kernels
from ds_cp.attention.attend import attend
from ds_cp.attention.exchange import KVPair, pack_rows, unpack_rows
from ds_cp.attention.kernels import available
from ds_cp.attention.merge import merge_eager, merge_fused
from ds_cp.attention.score import Score
from ds_cp.layout import Layout, total_length
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL
from ds_cp.mask.schedule import Step, schedule


class Sizes(NamedTuple):
    """What is measured: matrices of n x n; attention of S tokens; a model, and its rows, shortest first."""

    matrix: int
    tokens: int
    heads: tuple[int, int]
    dim: int
    model: dict[str, int]
    rows: tuple[int, ...]


LLAMA_1B = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "intermediate": 8192, "vocab": 128256}
LITTLE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 80, "vocab": 128}
SIZES = {
    "cuda": Sizes(8192, 131072, (32, 8), 128, LLAMA_1B, (16384, 32768, 65536, 131072, 262144, 524288, 1048576)),
    "cpu": Sizes(64, 256, (4, 2), 16, LITTLE, (64, 128)),
}
RANKS = (2, 4, 8)


def seconds(run: Callable[[], Any], device: str, repeats: int = 3) -> float:
    """Median of some runs after one that warms up, by the card's own clock."""
    run()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        else:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def rate(sizes: Sizes, device: str) -> float:
    """TFLOP/s of a matrix product."""
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * sizes.matrix**3 / seconds(lambda: a @ b, device, 10) / 1e12


class PerDocument:
    """The exchange of a rank whose neighbours' rows, and whose gradients on their way home, lie on the card already."""

    def __init__(self, steps: Sequence[Step], arrived: torch.Tensor, home: torch.Tensor):
        self.steps, self._arrived, self._home = steps, arrived, home

    def received(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
        pack_rows(key, value)
        yield self.steps[0], key, value
        for step in self.steps[1:]:
            yield step, *unpack_rows(self._arrived[: total_length(step.rows)], key.size(-1))

    def return_gradients(self, step: Step, grad_rows: torch.Tensor, home: KVPair) -> None:
        start = 0
        for run in step.target_rows:
            stop = start + run[1] - run[0]
            for total, more in zip(home, unpack_rows(self._home[start:stop], home[0].size(-1))):
                total[:, :, run[0] : run[1]] += more
            start = stop

    def finish(self, home: KVPair) -> None:
        """Nothing is under way."""


class Recorded:
    """A kernel that keeps its calls, so that they can run again without anything between them."""

    def __init__(self, kernel: Any):
        self._kernel, self.calls = kernel, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def forward(self, *args: Any) -> Any:
        self.calls.append((self._kernel.forward, args))
        return self._kernel.forward(*args)

    def backward(self, *args: Any) -> Any:
        self.calls.append((self._kernel.backward, args))
        return self._kernel.backward(*args)

    def replay(self) -> None:
        for function, args in self.calls:
            function(*args)


def share(sizes: Sizes, ranks: int, rank: int, kernel: Any, device: str) -> tuple[float, float]:
    """(seconds of one rank's forward and backward, seconds of the kernel calls in it)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layout = Layout(sizes.tokens, ranks, 1, "zigzag" if ranks > 1 else "contiguous")
    steps = schedule(Documents.find(1, sizes.tokens).segments(CAUSAL), layout, rank)
    length, (heads, key_heads) = layout.local_len, sizes.heads

    def normal(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=kind)

    q, k, v, grad_out = (normal(1, length, n, sizes.dim).transpose(1, 2) for n in (heads, key_heads, key_heads, heads))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    arrived = normal(length, 1, key_heads, 2 * sizes.dim)
    home = normal(length, 1, key_heads, 2 * sizes.dim, kind=torch.float32)
    score = Score(sizes.dim**-0.5)

    def run(kernel: Any) -> None:
        q.grad = k.grad = v.grad = None
        attend(q, k, v, lambda phase: PerDocument(steps, arrived, home), kernel, score).backward(grad_out)

    whole = seconds(lambda: run(kernel), device)
    recorded = Recorded(kernel)
    run(recorded)
    return whole, seconds(recorded.replay, device)


def attention(sizes: Sizes, kernel: Any, device: str, tflops: float) -> Iterator[dict[str, Any]]:
    """A line for each number of ranks, of the slower of two ranks: the first, and one in the middle."""
    flops = 3.5 * 4 * sizes.tokens * (sizes.tokens + 1) / 2 * sizes.heads[0] * sizes.dim
    _, one_shot = share(sizes, 1, 0, kernel, device)
    for ranks in (1, *RANKS):
        whole, alone = max(share(sizes, ranks, rank, kernel, device) for rank in {0, ranks // 2})
        yield {
            "ranks": ranks,
            "ms": whole * 1e3,
            "one-shot / P over it": one_shot / ranks / whole,
            "merge and bookkeeping": 1 - alone / whole,
            "TFLOP/s": flops / ranks / whole / 1e12,
            "of matmul rate": flops / ranks / whole / 1e12 / tflops,
        }


def merges(sizes: Sizes, device: str) -> Iterator[dict[str, Any]]:
    """A merge of all queries of a rank of eight; the fused one reads and writes out and lse once."""
    length, heads = sizes.tokens // 8, sizes.heads[0]
    out, part = (torch.randn(1, length, heads, sizes.dim, device=device).transpose(1, 2) for _ in range(2))
    lse, part_lse = (torch.randn(1, heads, length, device=device) for _ in range(2))
    part = part.bfloat16()
    moved = out.numel() * (4 + 4 + 2) + lse.numel() * 12
    for name, function in (("pass by pass", merge_eager), ("fused", merge_fused)):
        with torch.no_grad():
            took = seconds(partial(function, out, lse, part, part_lse), device, 10)
        yield {"merge": name, "ms": took * 1e3, "GB/s": moved / took / 1e9}


def show(title: str, lines: list[dict[str, Any]]) -> None:
    """A table in Markdown."""
    columns = list(dict.fromkeys(name for line in lines for name in line))
    print(f"\n{title}\n\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for line in lines:
        cells = (line.get(name, "") for name in columns)
        print("| " + " | ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells) + " |", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--parts", nargs="+", choices=("attention", "merge", "longest"), default=("attention", "merge", "longest")
    )
    parser.add_argument(
        "--seconds", type=float, default=420, help="for everything; no longer row starts when it may not fit"
    )
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    options = parser.parse_args(arguments)
    device, start = options.device, time.perf_counter()
    if device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device. A dry run: --device cpu", file=sys.stderr)
        return 2
    sizes, name = SIZES[device], available.best(device, (SIZES[device].dim,))[0]
    kernel = kernels.make("torch on cuda" if (device, name) == ("cuda", "torch") else name)
    card = torch.cuda.get_device_name() if device == "cuda" else "no card: a dry run, its numbers mean nothing"
    found: dict[str, Any] = {
        "card": card, "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "kernel": name, "sizes": sizes._asdict(), "matmul TFLOP/s": rate(sizes, device),
    }  # fmt: skip
    print(f"{card}; torch {torch.__version__}; kernel {name}; matmul {found['matmul TFLOP/s']:.3g} TFLOP/s")
    parts = {
        "attention": lambda: attention(sizes, kernel, device, found["matmul TFLOP/s"]),
        "merge": lambda: merges(sizes, device),
        "longest": lambda: longest(sizes.model, sizes.rows, device, found["matmul TFLOP/s"], start + options.seconds),
    }
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
            False  # half a minute of compiling that nothing here uses
        )
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        deepspeed.init_distributed(backend, init_method=f"file://{folder}/store", rank=0, world_size=1, verbose=False)
        for part in options.parts:
            found[part] = lines = []
            try:
                lines.extend(parts[part]())
            except Exception as error:  # one broken part must not hide the others
                failed += 1
                lines.append({"failed": f"{type(error).__name__}: {error}"})
            show(part, lines)
            gc.collect()
        torch.distributed.destroy_process_group()
    print(f"\n{failed} parts failed; {time.perf_counter() - start:.0f} s")
    if options.output:
        options.output.write_text(json.dumps(found, indent=1))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
