"""``ds_cp bench attention``: attention of each method compared with one process on the full sequence."""

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

ONE_PROCESS = "one process"


@dataclass(frozen=True)
class Shape:
    """Shape of an attention layer and its batch.

    Attributes:
        seq_len: Number of tokens of the row.
        query_heads: Number of query heads.
        key_heads: Number of key/value heads.
        head_dim: Head dim of queries, keys and values.
        documents: Number of equal documents packed in the row.
    """

    seq_len: int
    query_heads: int
    key_heads: int
    head_dim: int
    documents: int = 1


@dataclass(frozen=True)
class Measurement:
    """One method on one rank. Times are medians of forward and backward together.

    Attributes:
        method: Name of the method.
        cpu_ms: CPU time in ms.
        wall_ms: Wall time in ms.
        cpu_ratio: CPU time relative to the one-process kernel on the full sequence, divided by the number of ranks.
        wall_ratio: The same of the wall time.
        sent: Number of bytes sent.
        full: Number of bytes that bidirectional attention would send.
    """

    method: str
    cpu_ms: float
    wall_ms: float
    cpu_ratio: float
    wall_ratio: float
    sent: float
    full: float


@dataclass(frozen=True)
class Method:
    """A method that can be measured.

    Attributes:
        run: Runs forward and backward once.
        full: Number of bytes that bidirectional attention would send in a run.
        sent_so_far: Returns the number of bytes that this rank has sent in all runs.
    """

    run: Callable[[], None]
    full: float
    sent_so_far: Callable[[], int]


def bench_attention(
    ranks: Annotated[
        int, typer.Option(help="Number of processes with one thread each, not more than there are cores.")
    ] = 2,
    seq_len: Annotated[int, typer.Option(help="Number of tokens of the row.")] = 8192,
    query_heads: Annotated[int, typer.Option(help="Number of query heads.")] = 8,
    key_heads: Annotated[int, typer.Option(help="Number of key/value heads.")] = 2,
    head_dim: Annotated[int, typer.Option(help="Head dim of queries, keys and values.")] = 64,
    documents: Annotated[int, typer.Option(help="Number of equal documents packed in the row.")] = 1,
    repeats: Annotated[int, typer.Option(help="Number of paired runs, whose medians are printed.")] = 5,
    output: Annotated[Path | None, typer.Option(help="File to write the measurements to, as JSON.")] = None,
) -> None:
    """Measure forward and backward of causal attention in fp32 on the CPUs of this machine.

    A ratio of 1 means that a rank takes as long as the one-process kernel on the full sequence, divided by the number of
    ranks. The one-process kernel runs on all ranks at the same time, so that both are measured under the same load. "of full"
    is the number of bytes sent relative to the formula for bidirectional attention; a causal zigzag ring needs 0.75 of it.
    """
    shape = Shape(seq_len, query_heads, key_heads, head_dim, documents)
    by_rank = run_on_ranks(ranks, measure, shape, repeats)
    results = [replace(result[0], sent=statistics.mean(one.sent for one in result)) for result in zip(*by_rank)]
    table = Table(title=f"{shape}, {ranks} ranks, median of {repeats}", title_justify="left")
    for column in ("method", "CPU ms", "wall ms", "CPU ratio", "wall ratio", "sent MiB", "of full"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for result in results:
        share = f"{result.sent / result.full:.2f}" if result.full else "-"
        table.add_row(result.method, f"{result.cpu_ms:.0f}", f"{result.wall_ms:.0f}", f"{result.cpu_ratio:.3f}",
                      f"{result.wall_ratio:.3f}", f"{result.sent / 2**20:.2f}", share)  # fmt: skip
    Console().print(table)
    if output:
        output.write_text(
            json.dumps({"shape": asdict(shape), "ranks": ranks, "rows": [asdict(one) for one in results]}, indent=1)
        )


def measure(shape: Shape, repeats: int) -> list[Measurement]:
    """Measure every method on this rank. Runs are paired: each repeat runs every method once."""
    ranks = torch.distributed.get_world_size()
    methods = {ONE_PROCESS: Method(_one_process(shape), 0.0, lambda: 0), **dict(_methods(shape, ranks))}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    sent: dict[str, int] = {}
    for repeat in range(repeats + 1):
        for name, method in methods.items():
            torch.distributed.barrier()
            sent_before = method.sent_so_far()
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            method.run()
            sent[name] = method.sent_so_far() - sent_before
            if repeat:  # the first run is a warm-up
                times[name].append((time.process_time() - cpu_start, time.perf_counter() - wall_start))
    measurements = []
    for name, method in methods.items():
        share = 1 if name == ONE_PROCESS else ranks
        pairs = list(zip(times[name], times[ONE_PROCESS]))
        measurements.append(
            Measurement(
                name,
                1e3 * statistics.median(cpu for cpu, _ in times[name]),
                1e3 * statistics.median(wall for _, wall in times[name]),
                statistics.median(own[0] / (full[0] / share) for own, full in pairs),
                statistics.median(own[1] / (full[1] / share) for own, full in pairs),
                sent[name],
                method.full,
            )
        )
    return measurements


def _inputs(shape: Shape, length: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, [1, heads, length, head_dim]."""
    generator = torch.Generator().manual_seed(0)
    heads = (shape.query_heads, shape.key_heads, shape.key_heads, shape.query_heads)
    return [torch.randn(1, length, h, shape.head_dim, generator=generator).transpose(1, 2) for h in heads]


def _one_process(shape: Shape) -> Callable[[], None]:
    """Forward and backward of torch's kernel on the full sequence, document by document."""
    aten, scale, length = torch.ops.aten, shape.head_dim**-0.5, shape.seq_len // shape.documents
    q, k, v, grad = _inputs(shape, length)

    def run() -> None:
        for _ in range(shape.documents):
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
            aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True, scale=scale)

    return run


def _methods(shape: Shape, ranks: int) -> Iterator[tuple[str, Method]]:
    """The methods of ds_cp, by name, that can split the heads of this shape."""
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
        except ConfigError:  # the method cannot split these heads over these ranks
            continue
        mesh = build(plan.ring, plan.ulysses, plan.timeout)
        documents = Documents.find(1, positions.shape[1], positions)
        layout = choose(positions.shape[1], plan.ring, plan.ulysses, plan.layout, plan.packed_layout, documents)
        region = Region(plan, mesh, layout, documents)
        local = [x.requires_grad_() for x in _inputs(shape, layout.local_len)]

        def run(region: Region, local: list[torch.Tensor]) -> None:
            q, k, v, grad = local
            out: torch.Tensor = region.attend(q, k, v, CAUSAL, Score(shape.head_dim**-0.5))
            out.backward(grad)

        def sent_so_far(mesh: Mesh) -> int:
            return mesh.ring_group.sent.total() + mesh.ulysses_group.sent.total()

        forward = exchanged_bytes(plan.ring, plan.ulysses, layout.local_len, heads, (shape.head_dim,) * 2, 4)
        # The backward pass of a ring sends K and V again and their fp32 gradients; that of ulysses inverts the all-to-all.
        full = forward * (3 if plan.ring > 1 else 2)
        yield method, Method(partial(run, region, local), full, partial(sent_so_far, mesh))
