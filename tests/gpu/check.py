"""The CUDA kernels against formulas in fp64, on one card, in under 8 minutes.

    python tests/gpu/check.py                       # every kernel that this machine can run
    python tests/gpu/check.py --kernels torch       # some of them
    python tests/gpu/check.py --device cpu          # a dry run without a card: small, over stand-ins

Ranks are threads of this process and share the card. A case passes when the ring's output and gradients are no further
from fp64 than 1.5 times the same kernel's on one rank, and those no further than 2.5 times torch's own attention over the
whole sequence in the same dtype (which sums grouped heads in another order). The printed table belongs in docs/gpu.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, Iterator, NamedTuple

os.environ.setdefault("DS_ACCELERATOR", "cuda" if "cpu" not in sys.argv else "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from ds_cp.attention import kernels
from ds_cp.attention.attend import attend
from ds_cp.attention.exchange import PeerExchange
from ds_cp.attention.kernels import available
from ds_cp.attention.merge import merge_partial_attention
from ds_cp.attention.score import Score
from ds_cp.cli.bench import in_process
from ds_cp.layout import Layout
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL, OPEN, Band, Rule
from ds_cp.mask.schedule import schedule
from ds_cp.mask.tile import Tile

NAMES = ("torch", "flash_attention_2", "flash_attention_3", "flash_attention_4")
RULES = {"causal": CAUSAL, "full": Band(OPEN, OPEN), "window": Band(99, 0), "two-sided": Band(60, 30)}


TILES = [
    # (queries, keys, lo, hi)
    (300, 40, -OPEN, 5),
    (300, 40, -270, OPEN),
    (300, 40, -280, 30),
    (40, 300, -OPEN, 270),
    (64, 64, -OPEN, 0),
    (1, 64, -OPEN, OPEN),
]


class Case(NamedTuple):
    """One line of the table. ``documents`` are shares of the sequence, in 64ths."""

    rule: str
    documents: tuple[int, ...] = (64,)
    ranks: int = 2
    layout: str = "zigzag"
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    softcap: float | None = None


PACKED = (20, 1, 30, 3, 10)
CASES = [
    Case("causal", ranks=1),
    Case("causal"),
    Case("causal", PACKED, ranks=1),
    Case("causal", PACKED, ranks=4),
    Case("window", ranks=1),
    Case("window", PACKED, ranks=4),
    Case("two-sided", PACKED),
    Case("full", PACKED),
    Case("causal", ranks=4, layout="contiguous"),
    Case("window", ranks=4, layout="contiguous"),
    Case("causal", dims=(128, 128)),
    Case("causal", PACKED, dims=(192, 128)),
    Case("window", dims=(256, 256)),
    Case("causal", dims=(40, 40)),
    Case("causal", heads=(9, 3)),
    Case("causal", PACKED, heads=(8, 1), dtype=torch.float16),
    Case("causal", softcap=20.0),
]


def make(name: str, device: str, dtype: torch.dtype) -> Any:
    """The kernel, or in a dry run its stand-in."""
    if device == "cuda":
        return kernels.make("torch on cuda" if name == "torch" else name)
    if name == "torch":
        return kernels.make("torch")
    from harness.flash_stand_in import VERSIONS, make_kernel

    version = [v for kernel, v in VERSIONS if kernel == name][-1]
    return make_kernel(name, version, (dtype,))


def inputs(case: Case, length: int, device: str) -> list[torch.Tensor]:
    """q, k, v and the output's gradient, rounded to the case's dtype."""
    generator = torch.Generator(device).manual_seed(0)
    (heads, key_heads), (dim, value_dim) = case.heads, case.dims
    shapes = ((heads, dim), (key_heads, dim), (key_heads, value_dim), (heads, value_dim))
    return [torch.randn(1, h, length, d, generator=generator, device=device).to(case.dtype) for h, d in shapes]


def may_see(lengths: list[int], rule: Rule, device: str) -> torch.Tensor:
    """[S, S] of what each query sees."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    index = torch.arange(len(document), device=device)
    distance = index - index.unsqueeze(-1)
    return (document == document.unsqueeze(-1)) & (distance >= -rule.left) & (distance <= rule.right)


def whole(case: Case, tensors: list[torch.Tensor], seen: torch.Tensor, formulas: bool) -> list[torch.Tensor]:
    """Output and gradients of the whole sequence: by formulas in fp64, or by torch's own attention in the dtype."""
    *qkv, grad_out = (x.double() if formulas else x for x in tensors)
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv)
    wide_k, wide_v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    scale = case.dims[0] ** -0.5
    if formulas or case.softcap:
        scores = q @ wide_k.transpose(-1, -2) * scale
        scores = torch.tanh(scores / case.softcap) * case.softcap if case.softcap else scores
        out = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ wide_v
    else:
        out = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=seen, scale=scale)
    out.backward(grad_out)
    return [out.detach(), q.grad, k.grad, v.grad]


def shared(case: Case, tensors: list[torch.Tensor], lengths: list[int], kernel: Any) -> list[torch.Tensor]:
    """Output and gradients of all ranks, put together again."""
    length, score = sum(lengths), Score(case.dims[0] ** -0.5, softcap=case.softcap)
    positions = torch.cat([torch.arange(n) for n in lengths]).numpy()[None]
    segments = Documents.find(1, length, positions=positions).segments(RULES[case.rule])
    layout = Layout(length, case.ranks, 1, case.layout)

    def rank(group: Any) -> list[torch.Tensor]:
        local = [layout.shard(x, 2, group.rank).requires_grad_() for x in tensors[:3]]
        steps = schedule(segments, layout, group.rank)
        if not kernel.takes(local[0], local[2], score):
            return []
        out = attend(*local, lambda phase: PeerExchange(group, steps, 1, phase), kernel, score)
        out.backward(layout.shard(tensors[3], 2, group.rank))
        return [out.detach(), *(x.grad for x in local)]

    results = in_process.run(case.ranks, rank, timeout=120)
    index = layout.unshard_index.to(tensors[0].device)
    return [torch.cat(parts, 2).index_select(2, index) for parts in zip(*results)]


def errors(got: list[torch.Tensor], want: list[torch.Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want)]


def check(case: Case, kernel: Any, length: int, device: str) -> tuple[str, list[list[float]], float]:
    """(verdict, errors of the ring, of one rank and of torch, milliseconds of a second run, forward and backward)."""
    lengths = [n * length // 64 for n in case.documents]
    tensors = inputs(case, sum(lengths), device)
    got = shared(case, tensors, lengths, kernel)
    if not got:
        return "not taken", [], 0.0
    seen = may_see(lengths, RULES[case.rule], device)
    want = whole(case, tensors, seen, formulas=True)
    alone = shared(case._replace(ranks=1), tensors, lengths, kernel)
    mine, one, own = (errors(x, want) for x in (got, alone, whole(case, tensors, seen, formulas=False)))
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    start = time.perf_counter()
    shared(case, tensors, lengths, kernel)
    wait()
    good = all(a <= 1.5 * b + 1e-6 and b <= 2.5 * c + 1e-6 for a, b, c in zip(mine, one, own))
    return "ok" if good else "WRONG", [mine, one, own], (time.perf_counter() - start) * 1e3


def check_tiles(kernel: Any, device: str) -> str:
    """Single tiles that FlashAttention 2 would get wrong in one launch, merged and differentiated, against formulas."""
    score, wrong = Score(0.125), []
    for m, n, lo, hi in TILES:
        q, k, v, grad_out = (
            torch.randn(1, h, rows, 64, generator=torch.Generator(device).manual_seed(h), device=device).bfloat16()
            for h, rows in ((4, m), (2, n), (2, n), (4, m))
        )
        tile, precise = Tile(0, 1, 0, m, 0, n, lo, hi), [x.double() for x in (q, k, v)]
        formulas = kernels.make("reference")
        want_out, want_lse = formulas.forward(*precise, tile, score)
        want = [want_out, *formulas.backward(grad_out.double(), *precise, want_out, want_lse, tile, score)]
        out = torch.zeros(1, 4, m, 64, device=device)
        lse = torch.full((1, 4, m), -torch.inf, device=device)
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        launches = kernel.launches([piece for piece in kernel.lower(tile)], torch.device(device))
        for x in launches:
            a, b = slice(x.q_start, x.q_stop), slice(x.k_start, x.k_stop)
            part, part_lse = kernel.forward(q[:, :, a], k[:, :, b], v[:, :, b], x, score)
            merge_partial_attention(out[:, :, a], lse[:, :, a], part, part_lse)
        for x in launches:
            a, b = slice(x.q_start, x.q_stop), slice(x.k_start, x.k_stop)
            parts = kernel.backward(
                grad_out[:, :, a], q[:, :, a], k[:, :, b], v[:, :, b], out.bfloat16()[:, :, a], lse[:, :, a], x, score
            )
            for total, index, part in zip(grads, (a, b, b), parts):
                total[:, :, index] += part
        if max(errors([out, *grads], want)) > 0.02:
            wrong.append((m, n, lo, hi))
    return f"WRONG for {wrong}" if wrong else "ok"


def check_syncs(kernel: Any) -> str:
    """Whether a layer, once its schedule is warm, makes the host wait for the card."""
    tensors = inputs(CASES[0], 1024, "cuda")
    positions = torch.cat([torch.arange(n) for n in (300, 1, 700, 23)]).numpy()[None]
    steps = schedule(Documents.find(1, 1024, positions=positions).segments(CAUSAL), Layout(1024, 1, 1), 0)

    def layer(group: Any) -> None:
        q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
        out = attend(q, k, v, lambda phase: PeerExchange(group, steps, 1, phase), kernel, Score(0.125))
        out.backward(tensors[3])

    in_process.run(1, layer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        in_process.run(1, layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "ok"


def describe(case: Case) -> str:
    packed = f", {len(case.documents)} documents" if len(case.documents) > 1 else ""
    cap = f", softcap {case.softcap:g}" if case.softcap else ""
    return (
        f"{case.rule}{packed}{cap}, ring {case.ranks} {case.layout}, heads {case.heads[0]}/{case.heads[1]}, "
        f"dims {case.dims[0]}/{case.dims[1]}, {str(case.dtype).split('.')[1]}"
    )


def header(device: str) -> Iterator[str]:
    card = (
        f"{torch.cuda.get_device_name()}, {torch.version.cuda}"
        if device == "cuda"
        else "no card: a dry run over stand-ins"
    )
    yield f"{card}; torch {torch.__version__}; Python {platform.python_version()}"
    if device == "cuda":
        for name in NAMES[1:]:
            yield f"{name}: {available.problem(name, device) or 'can run'}"
    yield ""
    yield "| kernel | case | verdict | out, dq, dk, dv against fp64 | on one rank | torch's own | ms |"
    yield "|---|---|---|---|---|---|---|"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--length", type=int, help="tokens, a multiple of 64 (2048; 256 on cpu)")
    parser.add_argument("--seconds", type=float, default=420, help="no case starts later")
    options = parser.parse_args(arguments)
    device, length = options.device, options.length or (2048 if options.device == "cuda" else 256)
    if device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device. A dry run: --device cpu", file=sys.stderr)
        return 2
    print("\n".join(header(device)), flush=True)
    names = [n for n in options.kernels if device == "cpu" or n == "torch" or available.problem(n, device) is None]
    start, wrong, late = time.perf_counter(), 0, []
    for i, name in enumerate(names):
        until = start + options.seconds * (i + 1) / len(names)  # compiling one kernel must not starve the next
        checks = [("tiles that need a split", lambda kernel: check_tiles(kernel, device))]
        checks += [("no waiting for the card in a layer", check_syncs)] if device == "cuda" else []
        for what, run in checks:
            try:
                verdict = run(make(name, device, torch.bfloat16))
            except Exception as error:
                verdict = f"FAILED {type(error).__name__}: {str(error)[:120]!r}"
            wrong += verdict != "ok"
            print(f"| {name} | {what} | {verdict} | | | | |", flush=True)
        for case in CASES:
            if time.perf_counter() > until:
                late.append(f"{name}: {describe(case)}")
                continue
            try:
                kernel = make(name, device, case.dtype)
                verdict, found, ms = check(case, kernel, length, device)
            except Exception as error:  # one broken case must not hide the others
                verdict, found, ms = f"FAILED {type(error).__name__}: {str(error)[:120]!r}", [], 0.0
            wrong += verdict not in ("ok", "not taken")
            numbers = " | ".join(", ".join(f"{x:.1e}" for x in part) for part in found or [[], [], []])
            print(f"| {name} | {describe(case)} | {verdict} | {numbers} | {ms:.1f} |", flush=True)
    if late:
        print("\nNot run, out of time:\n" + "\n".join(f"- {line}" for line in late))
    print(f"\n{wrong} of the cases that ran are wrong; {time.perf_counter() - start:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
