"""``ds_cp bench attention``: the attention core of each method beside one process on the whole sequence, in one run."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Callable, Iterator

import torch
import typer
from rich.console import Console
from rich.table import Table

from ds_cp.cli.ranks import run_on_ranks


@dataclass(frozen=True)
class Shape:
    """One attention call: S tokens of ``documents`` equal documents, H and h heads, head dim d."""

    seq_len: int
    query_heads: int
    key_heads: int
    head_dim: int
    documents: int = 1


@dataclass(frozen=True)
class Row:
    """Medians of one method: forward and backward together, per rank, in ms; what it sent, in bytes."""

    method: str
    cpu_ms: float
    wall_ms: float
    cpu_ratio: float
    wall_ratio: float
    sent: float
    full: float


def bench_attention(
    ranks: Annotated[int, typer.Option(help="processes, one thread each; not more than cores")] = 2,
    seq_len: Annotated[int, typer.Option(help="tokens")] = 8192,
    query_heads: Annotated[int, typer.Option()] = 8,
    key_heads: Annotated[int, typer.Option()] = 2,
    head_dim: Annotated[int, typer.Option()] = 64,
    documents: Annotated[int, typer.Option(help="equal documents packed in the row")] = 1,
    repeats: Annotated[int, typer.Option(help="paired runs; medians are printed")] = 5,
    output: Annotated[Path | None, typer.Option(help="write the rows as JSON")] = None,
) -> None:
    """Measure forward and backward of attention, fp32, causal, on this machine's CPUs.

    A ratio of 1 means: as fast as the one-process kernel on the whole sequence, divided by the ranks. The one-process
    kernel runs on all ranks at once, so both sides meet the same machine. "of full" compares what was sent with the
    formula for bidirectional attention: 0.75 is what a causal zigzag ring needs.
    """
    shape = Shape(seq_len, query_heads, key_heads, head_dim, documents)
    by_rank = run_on_ranks(ranks, measure, shape, repeats)
    rows = [replace(row[0], sent=statistics.mean(r.sent for r in row)) for row in zip(*by_rank)]
    table = Table(title=f"{shape}, {ranks} ranks, median of {repeats}", title_justify="left")
    for column in ("method", "CPU ms", "wall ms", "CPU ratio", "wall ratio", "sent MiB", "of full"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        share = f"{row.sent / row.full:.2f}" if row.full else "-"
        table.add_row(row.method, f"{row.cpu_ms:.0f}", f"{row.wall_ms:.0f}", f"{row.cpu_ratio:.3f}",
                      f"{row.wall_ratio:.3f}", f"{row.sent / 2**20:.2f}", share)  # fmt: skip
    Console().print(table)
    if output:
        output.write_text(
            json.dumps({"shape": asdict(shape), "ranks": ranks, "rows": [asdict(r) for r in rows]}, indent=1)
        )


def measure(shape: Shape, repeats: int) -> list[Row]:
    """On every rank: the rows of the table. Runs are paired: one of each method, then again."""
    ranks = torch.distributed.get_world_size()
    one_shot = _one_shot(shape)
    methods = {"one process": (one_shot, 0.0, lambda: 0), **dict(_methods(shape, ranks))}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    sent: dict[str, int] = {}
    for repeat in range(repeats + 1):
        for name, (run, _, sent_so_far) in methods.items():
            torch.distributed.barrier()
            before = sent_so_far()
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            sent[name] = sent_so_far() - before
            if repeat:  # the first run warms up
                times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    rows = []
    for name, (_, full, _) in methods.items():
        share = 1 if name == "one process" else ranks
        pairs = list(zip(times[name], times["one process"]))
        rows.append(
            Row(
                name,
                1e3 * statistics.median(cpu for cpu, _ in times[name]),
                1e3 * statistics.median(wall for _, wall in times[name]),
                statistics.median(mine[0] / (whole[0] / share) for mine, whole in pairs),
                statistics.median(mine[1] / (whole[1] / share) for mine, whole in pairs),
                sent[name],
                full,
            )
        )
    return rows


def _inputs(shape: Shape, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (shape.query_heads, shape.key_heads, shape.key_heads, shape.query_heads)
    return [torch.randn(1, length, h, shape.head_dim, generator=generator).transpose(1, 2) for h in heads]


def _one_shot(shape: Shape) -> Callable[[], None]:
    """torch's kernel on the whole sequence, document by document, forward and backward."""
    aten, scale, length = torch.ops.aten, shape.head_dim**-0.5, shape.seq_len // shape.documents
    q, k, v, grad = _inputs(shape, length)

    def run() -> None:
        for _ in range(shape.documents):
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
            aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True, scale=scale)

    return run


def _methods(shape: Shape, ranks: int) -> Iterator[tuple[str, tuple[Callable[[], None], float, Callable[[], int]]]]:
    """(name, (run, bytes of the formula, bytes sent so far)) for each method that the heads allow."""
    import numpy as np

    from ds_cp.attention.score import Score
    from ds_cp.balance import choose
    from ds_cp.config import ConfigError, read
    from ds_cp.mask.documents import Documents
    from ds_cp.mask.rules import CAUSAL
    from ds_cp.mesh import Mesh, build
    from ds_cp.planner import ModelFacts, exchanged_bytes, resolve
    from ds_cp.region import Region

    heads = (shape.query_heads, shape.key_heads)
    positions = np.tile(np.arange(shape.seq_len // shape.documents), shape.documents)[None]
    for method in ("ring", "allgather", "ulysses", "hybrid"):
        try:
            plan = resolve(read({"size": ranks, "method": method}), ModelFacts("bench", (heads,)), ranks, "cpu")
        except ConfigError:  # these heads do not split so
            continue
        mesh = build(plan.ring, plan.ulysses, plan.timeout)
        documents = Documents.find(1, positions.shape[1], positions)
        layout = choose(positions.shape[1], plan.ring, plan.ulysses, plan.layout, plan.packed_layout, documents)
        region = Region(plan, mesh, layout, documents)
        local = [x.requires_grad_() for x in _inputs(shape, region.layout.local_len)]

        def run(region: Region, local: list[torch.Tensor]) -> None:
            q, k, v, grad = local
            region.attend(q, k, v, CAUSAL, Score(shape.head_dim**-0.5)).backward(grad)

        def sent(mesh: Mesh) -> int:
            return mesh.ring_group.sent.total() + mesh.ulysses_group.sent.total()

        forward = exchanged_bytes(plan.ring, plan.ulysses, region.layout.local_len, heads, (shape.head_dim,) * 2, 4)
        full = forward * (
            3 if plan.ring > 1 else 2
        )  # backward: rows again and fp32 gradients, or the inverse all-to-all
        yield method, (partial(run, region, local), full, partial(sent, mesh))
