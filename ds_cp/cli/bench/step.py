"""``ds_cp bench step``: whole training steps, side by side, each contender in fresh processes."""

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
    """One rank of one contender in one round: medians over its steps.

    Attributes:
        wall_s, cpu_s: of a step.
        rows: rows of S tokens per step, all ranks together.
        idle, peak: bytes held before the first step, and at most.
        live: bytes of storages that a forward leaves for its backward.
        sent: bytes for attention per step.
        loss: of the last step.
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
    """On a rank of its own process group: train, and say what it took."""
    from ds_cp.cli.bench import probes

    sent = probes.SentForAttention()
    contender = BUILDERS[name](shape)
    idle = probes.memory("VmRSS")
    times, loss = [], float("nan")
    for index in range(steps + 1):
        torch.distributed.barrier()
        before = sent.total()
        cpu, wall = time.process_time(), time.perf_counter()
        loss = contender.step()
        if index or not steps:  # the first step warms up
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
    per_step, peak, live = sent.total() - before, probes.memory("VmHWM"), 0
    if count_live:
        with probes.LiveStorages() as storages:
            kept = contender.forward(contender.engine.module)  # the engine's own buffers are no activations
            live = storages.live_bytes()
        del kept
    wall, cpu = (statistics.median(column) for column in zip(*times))
    return Measured(wall, cpu, contender.rows, idle, peak, live, per_step, loss)


def rounds_of(
    names: list[str], shape: TrainShape, ranks: int, steps: int, rounds: int
) -> dict[str, list[list[Measured]]]:
    """By contender, the rounds, each the ranks' measurements. Rounds interleave the contenders: all meet one machine."""
    results: dict[str, list[list[Measured]]] = {name: [] for name in names}
    for index in range(rounds):
        for name in names:
            results[name].append(run_on_ranks(ranks, measure, name, shape, steps, index == 0))
    return results


def summarise(
    results: dict[str, list[list[Measured]]], shape: TrainShape, ranks: int, tflops: float
) -> list[dict[str, Any]]:
    """A row per contender: medians over rounds; ratios are medians of paired ratios with the first contender."""
    first = next(iter(results))

    def speed(by_rank: list[Measured]) -> float:
        return by_rank[0].rows * shape.seq_len / max(one.wall_s for one in by_rank)

    rows = []
    for name, rounds in results.items():
        peak = statistics.median(max(one.peak for one in by_rank) for by_rank in rounds)
        base = statistics.median(max(one.peak for one in by_rank) for by_rank in results[first])
        tokens = statistics.median(map(speed, rounds))
        rows.append(
            {
                "contender": name,
                "wall_s": statistics.median(max(one.wall_s for one in by_rank) for by_rank in rounds),
                "cpu_s": statistics.median(sum(one.cpu_s for one in by_rank) for by_rank in rounds),
                "tokens_per_s": tokens,
                "speed_ratio": statistics.median(speed(a) / speed(b) for a, b in zip(rounds, results[first])),
                "peak_mib": peak / 2**20,
                "peak_ratio": peak / base,
                "step_mib": statistics.median(max(one.peak - one.idle for one in by_rank) for by_rank in rounds) / 2**20,
                "live_mib": max(one.live for one in rounds[0]) / 2**20,
                "sent_mib": statistics.mean(one.sent for one in rounds[0]) / 2**20,
                "formula_mib": _formula(name, shape, ranks) / 2**20,
                "mfu": tokens / shape.seq_len * shape.flops() / (ranks * tflops * 1e12) if tflops else None,
                "loss": rounds[0][0].loss,
            }
        )  # fmt: skip
    return rows


METHODS = {"UlyssesSPAttentionHF": "ulysses", "ring-flash-attention": "ring"}
"""Of contenders whose names do not say it."""


def _formula(name: str, shape: TrainShape, ranks: int) -> float:
    """Bytes that a rank sends for attention in one forward and one backward of dense bidirectional attention. A layer under
    checkpointing trades heads a third time: for its recomputation, or for what the backward pass then lacks."""
    from ds_cp.config import read
    from ds_cp.planner import ModelFacts, exchanged_bytes, resolve

    if name == "data parallel" or ranks == 1:
        return 0.0
    last = name.rpartition(" ")[2]
    method = last if last in ("ulysses", "ring", "allgather") else METHODS.get(name, "auto")
    heads = (shape.heads, shape.kv_heads)
    plan = resolve(read({"size": ranks, "method": method}), ModelFacts("bench", (heads,)), ranks, "cpu")
    forward = exchanged_bytes(plan.ring, plan.ulysses, shape.seq_len // ranks, heads, (shape.head_dim,) * 2, 4)
    return shape.layers * forward * (3 if plan.ring > 1 or shape.checkpointing else 2)


FIGURES = {
    "wall_s": "{:.2f}", "cpu_s": "{:.2f}", "tokens_per_s": "{:.0f}", "speed_ratio": "{:.2f}",
    "peak_mib": "{:.0f}", "peak_ratio": "{:.2f}", "step_mib": "{:.0f}", "live_mib": "{:.1f}", "sent_mib": "{:.1f}",
    "formula_mib": "{:.1f}", "mfu": "{:.3f}", "loss": "{:.5f}",
}  # fmt: skip


def bench_step(
    ranks: Annotated[int, typer.Option(help="processes, one thread each; not more than cores")] = 2,
    seq_len: Annotated[int, typer.Option(help="tokens of a row")] = 8192,
    documents: Annotated[int, typer.Option(help="equal documents packed in the row")] = 1,
    layers: Annotated[int, typer.Option()] = 4,
    hidden: Annotated[int, typer.Option()] = 512,
    heads: Annotated[int, typer.Option()] = 8,
    kv_heads: Annotated[int, typer.Option()] = 2,
    intermediate: Annotated[int, typer.Option()] = 1408,
    vocab: Annotated[int, typer.Option()] = 32000,
    zero_stage: Annotated[int, typer.Option()] = 2,
    checkpointing: Annotated[bool, typer.Option()] = True,
    steps: Annotated[int, typer.Option(help="timed steps per round, after one that warms up")] = 1,
    rounds: Annotated[int, typer.Option(help="paired rounds, in fresh processes; medians are printed")] = 3,
    names: Annotated[
        str,
        typer.Option("--contenders", help=f"of: {', '.join(BUILDERS)}; without it {DEFAULT}, and peers that can run"),
    ] = "",
    peak_tflops: Annotated[float, typer.Option(help="of one GPU, for the model FLOPs utilisation")] = 0.0,
    output: Annotated[Path | None, typer.Option(help="write the rows as JSON")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw speed and memory; needs matplotlib (extra: plot)")] = None,
) -> None:
    """Train a Llama-shaped model: time, tokens per second, peak memory per rank, bytes sent for attention.

    "speed ratio" and "peak ratio" compare with the first contender. "step" is the peak above what the idle engine holds,
    "live" what a forward leaves for its backward. Data parallelism trains one whole row per rank and step.
    """
    shape = TrainShape(
        seq_len, layers, hidden, heads, kv_heads, intermediate, vocab, documents, zero_stage, checkpointing
    )
    chosen = [name.strip() for name in (names or ",".join([DEFAULT, *peers.BUILDERS])).split(",")]
    if unknown := [name for name in chosen if name not in BUILDERS]:
        raise typer.BadParameter(f"{unknown} not among {', '.join(BUILDERS)}")
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
    for name, form in FIGURES.items():
        table.add_row(name.replace("_", " "), *("-" if row[name] is None else form.format(row[name]) for row in rows))
    console.print(table)
    if documents > 1 and "UlyssesSPAttentionHF" in chosen:
        console.print(
            "UlyssesSPAttentionHF with SDPA lets packed documents see each other: its loss is of another model."
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
