"""``ds_cp bench step``: training steps of several contenders, each in new processes."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from ds_cp.cli.bench import contenders, peers
from ds_cp.cli.bench.shape import TrainShape
from ds_cp.cli.ranks import run_on_ranks

DEFAULT = "UlyssesSPAttentionHF,data parallel,ds_cp"
BUILDERS = {**contenders.BUILDERS, **peers.BUILDERS}


@dataclass(frozen=True)
class Measured:
    """One rank of one contender in one round.

    Attributes:
        wall_s: Median wall time of a step in seconds.
        cpu_s: Median CPU time of a step in seconds.
        rows: Number of rows of ``seq_len`` tokens that all ranks together train per step.
        idle: Memory of the process before the first step, in bytes.
        peak: Peak memory of the process, in bytes.
        live: Bytes of the storages that a forward pass leaves for the backward pass; 0 if they were not counted.
        sent: Number of bytes sent for attention per step.
        loss: Loss of the last step.
    """

    wall_s: float
    cpu_s: float
    rows: int
    idle: int
    peak: int
    live: int
    sent: float
    loss: float


def measure(name: str, shape: TrainShape, steps: int, count_live: bool = True) -> Measured:
    """Train a contender on this rank and measure its steps.

    Args:
        name: Name of the contender.
        shape: Shape of the model and the batch.
        steps: Number of timed steps after the one that warms up. With 0, that one is timed.
        count_live: Whether to run one more forward pass that counts live storages.
    """
    from ds_cp.cli.bench import probes

    sent = probes.SentForAttention()
    contender = BUILDERS[name](shape)
    idle = probes.memory("VmRSS")
    times, loss, sent_before = [], float("nan"), 0
    for index in range(steps + 1):
        torch.distributed.barrier()
        sent_before = sent.total()
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        loss = contender.step()
        if index or not steps:
            times.append((time.perf_counter() - wall_start, time.process_time() - cpu_start))
    sent_per_step, peak, live = sent.total() - sent_before, probes.memory("VmHWM"), 0
    if count_live:
        with probes.LiveStorages() as storages:
            # Without the engine, whose buffers are not activations. The variable keeps the graph alive.
            graph = contender.forward(contender.engine.module)
            live = storages.live_bytes()
        del graph
    wall, cpu = (statistics.median(column) for column in zip(*times))
    return Measured(wall, cpu, contender.rows, idle, peak, live, sent_per_step, loss)


def rounds_of(
    names: list[str], shape: TrainShape, ranks: int, steps: int, rounds: int
) -> dict[str, list[list[Measured]]]:
    """Measure all contenders, one after the other in each round, so that all are measured under the same load.

    Returns:
        For each contender and each round, the measurements of all ranks.
    """
    results: dict[str, list[list[Measured]]] = {name: [] for name in names}
    for index in range(rounds):
        for name in names:
            results[name].append(run_on_ranks(ranks, measure, name, shape, steps, index == 0))
    return results


def summarise(
    results: dict[str, list[list[Measured]]], shape: TrainShape, ranks: int, tflops: float
) -> list[dict[str, Any]]:
    """Summarise the measurements of each contender as medians over rounds.

    Args:
        results: For each contender and each round, the measurements of all ranks.
        shape: Shape of the model and the batch.
        ranks: Number of ranks.
        tflops: Peak TFLOP/s of one GPU; 0 if the model FLOPs utilisation is not wanted.

    Returns:
        One dict per contender. "speed_ratio" is the median over rounds of the ratio to the first contender in the same
        round, "peak_ratio" the ratio of the medians.
    """
    first = next(iter(results))

    def speed(by_rank: list[Measured]) -> float:
        """Tokens per second of a round, by the slowest rank."""
        return by_rank[0].rows * shape.seq_len / max(one.wall_s for one in by_rank)

    rows = []
    for name, rounds in results.items():
        peak = statistics.median(max(one.peak for one in by_rank) for by_rank in rounds)
        first_peak = statistics.median(max(one.peak for one in by_rank) for by_rank in results[first])
        tokens = statistics.median(map(speed, rounds))
        rows.append(
            {
                "contender": name,
                "wall_s": statistics.median(max(one.wall_s for one in by_rank) for by_rank in rounds),
                "cpu_s": statistics.median(sum(one.cpu_s for one in by_rank) for by_rank in rounds),
                "tokens_per_s": tokens,
                "speed_ratio": statistics.median(speed(a) / speed(b) for a, b in zip(rounds, results[first])),
                "peak_mib": peak / 2**20,
                "peak_ratio": peak / first_peak,
                "step_mib": statistics.median(max(one.peak - one.idle for one in by_rank) for by_rank in rounds) / 2**20,
                "live_mib": max(one.live for one in rounds[0]) / 2**20,
                "sent_mib": statistics.mean(one.sent for one in rounds[0]) / 2**20,
                "formula_mib": _bytes_by_formula(name, shape, ranks) / 2**20,
                "mfu": tokens / shape.seq_len * shape.flops() / (ranks * tflops * 1e12) if tflops else None,
                "loss": rounds[0][0].loss,
            }
        )  # fmt: skip
    return rows


METHODS = {"UlyssesSPAttentionHF": "ulysses", "ring-flash-attention": "ring"}
"""Methods of contenders whose names do not end with the method."""


def _bytes_by_formula(name: str, shape: TrainShape, ranks: int) -> float:
    """Bytes that a rank sends per step for dense bidirectional attention, forward and backward.

    Under gradient checkpointing ulysses runs its all-to-all a third time: in the recomputation, or, where that does not run
    attention again, for the tensors that the backward pass of attention needs by heads.
    """
    from ds_cp.config import read
    from ds_cp.planner import ModelFacts, exchanged_bytes, resolve

    if name == "data parallel" or ranks == 1:
        return 0.0
    suffix = name.rpartition(" ")[2]
    method = suffix if suffix in ("ulysses", "ring", "allgather") else METHODS.get(name, "auto")
    heads = (shape.heads, shape.kv_heads)
    plan = resolve(read({"size": ranks, "method": method}), ModelFacts("bench", (heads,)), ranks, "cpu")
    forward = exchanged_bytes(plan.ring, plan.ulysses, shape.seq_len // ranks, heads, (shape.head_dim,) * 2, 4)
    return shape.layers * forward * (3 if plan.ring > 1 or shape.checkpointing else 2)


FIGURES = {
    "wall_s": "{:.2f}", "cpu_s": "{:.2f}", "tokens_per_s": "{:.0f}", "speed_ratio": "{:.2f}",
    "peak_mib": "{:.0f}", "peak_ratio": "{:.2f}", "step_mib": "{:.0f}", "live_mib": "{:.1f}", "sent_mib": "{:.1f}",
    "formula_mib": "{:.1f}", "mfu": "{:.3f}", "loss": "{:.5f}",
}  # fmt: skip
"""Lines of the table: keys of :func:`summarise` and how their values are printed."""


def bench_step(
    ranks: Annotated[
        int, typer.Option(help="Number of processes with one thread each, not more than there are cores.")
    ] = 2,
    seq_len: Annotated[int, typer.Option(help="Number of tokens of a row.")] = 8192,
    documents: Annotated[int, typer.Option(help="Number of equal documents packed in the row.")] = 1,
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 4,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 512,
    heads: Annotated[int, typer.Option(help="Number of query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Number of key/value heads.")] = 2,
    intermediate: Annotated[int, typer.Option(help="Intermediate size of the MLPs.")] = 1408,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 32000,
    zero_stage: Annotated[int, typer.Option(help="ZeRO stage.")] = 2,
    checkpointing: Annotated[bool, typer.Option(help="Whether gradient checkpointing is on.")] = True,
    steps: Annotated[int, typer.Option(help="Number of timed steps per round, after one that warms up.")] = 1,
    rounds: Annotated[int, typer.Option(help="Number of rounds in new processes, whose medians are printed.")] = 3,
    names: Annotated[
        str,
        typer.Option(
            "--contenders",
            help=f"Comma-separated names of {', '.join(BUILDERS)}. Default: {DEFAULT}, and those of other packages that "
            "can run on this machine.",
        ),
    ] = "",
    peak_tflops: Annotated[
        float, typer.Option(help="Peak TFLOP/s of one GPU, for the model FLOPs utilisation (mfu).")
    ] = 0.0,
    output: Annotated[Path | None, typer.Option(help="File to write the measurements to, as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="File to draw speed and memory to; needs matplotlib (extra: plot).")
    ] = None,
) -> None:
    """Measure the time, the tokens per second, the peak memory and the bytes sent of steps that train a Llama.

    "speed ratio" and "peak ratio" are relative to the first contender. "step" is the peak memory above that of the idle
    engine, "live" the memory that a forward pass leaves for the backward pass. With data parallelism each rank trains one
    full row per step; all other contenders share one row.
    """
    shape = TrainShape(
        seq_len, layers, hidden, heads, kv_heads, intermediate, vocab, documents, zero_stage, checkpointing
    )
    chosen = [name.strip() for name in (names or ",".join([DEFAULT, *peers.BUILDERS])).split(",")]
    if unknown := [name for name in chosen if name not in BUILDERS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(BUILDERS)}")
    reasons = {name: peers.why_not(name, shape) for name in peers.BUILDERS}
    missing = {name: reason for name, reason in reasons.items() if reason}
    chosen = [name for name in chosen if name not in missing]
    if not chosen:
        raise typer.BadParameter("; ".join(f"{name} {reason}" for name, reason in missing.items()))
    results = rounds_of(chosen, shape, ranks, steps, rounds)
    rows = summarise(results, shape, ranks, peak_tflops)
    console = Console()
    table = Table(title=f"{shape}, {ranks} ranks, median of {rounds}", title_justify="left")
    for column in ("", *results):
        table.add_column(column, justify="right" if column else "left")
    for name, template in FIGURES.items():
        cells = ["-" if row[name] is None else template.format(row[name]) for row in rows]
        table.add_row(name.replace("_", " "), *cells)
    console.print(table)
    if documents > 1 and "UlyssesSPAttentionHF" in chosen:
        console.print(
            "UlyssesSPAttentionHF with SDPA lets queries attend to other documents of a packed row, so its loss differs."
        )
    for name, reason in missing.items():
        console.print(f"{name}: not measured, {reason}.", soft_wrap=True)
    if output:
        output.write_text(
            json.dumps({"shape": asdict(shape), "ranks": ranks, "rows": rows, "not measured": missing}, indent=1)
        )
    if plot:
        _plot(rows, plot)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, column, label in zip(axes, ("tokens_per_s", "peak_mib"), ("tokens / s", "peak memory per rank, MiB")):
        axis.barh([row["contender"] for row in rows], [row[column] for row in rows])
        axis.set_xlabel(label)
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
