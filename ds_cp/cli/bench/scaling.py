"""``ds_cp bench scaling``: the time of a step by sequence length and number of ranks, and the longest row that fits in memory."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ds_cp.cli.bench.shape import TrainShape
from ds_cp.cli.bench.step import BUILDERS, measure
from ds_cp.cli.ranks import run_on_ranks

LENGTH_FACTORS = (1, 1.5)
"""Lengths that are tried before the length is doubled: 8k, 12k, 16k, 24k, ..."""


def bench_scaling(
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens of a row.")] = "2048,4096,8192",
    ranks: Annotated[
        str,
        typer.Option(
            help="Comma-separated numbers of processes with one thread each; one process trains without "
            '"context_parallel".'
        ),
    ] = "1,2",
    contender: Annotated[str, typer.Option(help=f"One of {', '.join(BUILDERS)}.")] = "ds_cp",
    within_gib: Annotated[
        float, typer.Option(help="If not 0, find the longest row whose peak memory per process stays below it, in GiB.")
    ] = 0.0,
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 4,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 512,
    heads: Annotated[int, typer.Option(help="Number of query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Number of key/value heads.")] = 2,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 32000,
    output: Annotated[Path | None, typer.Option(help="File to write the measurements to, as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="File to draw the measurements to; needs matplotlib (extra: plot).")
    ] = None,
) -> None:
    """Measure steps of one contender over sequence lengths and numbers of ranks.

    "model s" extrapolates the first measurement by FLOPs per rank: the time of a step if it consisted of arithmetic alone,
    divided equally among the ranks.

    With --within-gib the length grows from the first of --lengths in steps of 3/2 and 4/3 until the peak memory of a rank
    exceeds the limit.
    """
    if contender not in BUILDERS:
        raise typer.BadParameter(f"{contender} is not one of {', '.join(BUILDERS)}")
    shape = TrainShape(0, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=vocab)
    all_lengths, all_ranks = ([int(number) for number in numbers.split(",")] for numbers in (lengths, ranks))
    if within_gib:
        points = [point for p in all_ranks for point in _climb(contender, shape, all_lengths[0], p, within_gib)]
    else:
        points = [_point(contender, replace(shape, seq_len=s), p) for p in all_ranks for s in all_lengths]
    _add_model_times(points)
    console = Console()
    _print(points, contender, console)
    if within_gib:
        for p in all_ranks:
            fitting = [point["seq_len"] for point in points if point["ranks"] == p and point["fits"]]
            console.print(
                f"{p} ranks: longest row within {within_gib:g} GiB per process: {max(fitting, default=0)} tokens"
            )
    if output:
        output.write_text(json.dumps({"contender": contender, "shape": asdict(shape), "points": points}, indent=1))
    if plot:
        _plot(points, contender, plot)


def _point(contender: str, shape: TrainShape, ranks: int) -> dict[str, Any]:
    """Measure one step of a contender."""
    name = "data parallel" if ranks == 1 else contender
    by_rank = run_on_ranks(ranks, measure, name, shape, 1, False)
    return {
        "seq_len": shape.seq_len,
        "ranks": ranks,
        "wall_s": max(one.wall_s for one in by_rank),
        "cpu_s": sum(one.cpu_s for one in by_rank),
        "peak_mib": max(one.peak for one in by_rank) / 2**20,
        "flops": shape.flops() / ranks,
        "fits": True,
    }


def _climb(contender: str, shape: TrainShape, first: int, ranks: int, gib: float) -> list[dict[str, Any]]:
    """Measure rows of growing length, starting at ``first``, up to and including the first that does not fit in ``gib``."""
    points: list[dict[str, Any]] = []
    length = first
    while not points or points[-1]["fits"]:
        for factor in LENGTH_FACTORS:
            points.append(_point(contender, replace(shape, seq_len=int(length * factor)), ranks))
            points[-1]["fits"] = points[-1]["peak_mib"] <= gib * 1024
            if not points[-1]["fits"]:
                break
        length *= 2
    return points


def _add_model_times(points: list[dict[str, Any]]) -> None:
    """Add to each point the wall time of the first point, scaled by the FLOPs per rank."""
    for point in points:
        point["model_s"] = points[0]["wall_s"] * point["flops"] / points[0]["flops"]


def _print(points: list[dict[str, Any]], contender: str, console: Console) -> None:
    table = Table(title=contender, title_justify="left")
    for column in ("tokens", "ranks", "wall s", "model s", "CPU s", "tokens per s", "peak MiB"):
        table.add_column(column, justify="right")
    for point in points:
        table.add_row(
            str(point["seq_len"]), str(point["ranks"]), f"{point['wall_s']:.2f}", f"{point['model_s']:.2f}",
            f"{point['cpu_s']:.2f}", f"{point['seq_len'] / point['wall_s']:.0f}", f"{point['peak_mib']:.0f}",
        )  # fmt: skip
    console.print(table)


def _plot(points: list[dict[str, Any]], contender: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4))
    for ranks in dict.fromkeys(point["ranks"] for point in points):
        points_of_ranks = [point for point in points if point["ranks"] == ranks]
        lengths = [point["seq_len"] for point in points_of_ranks]
        (line,) = axis.plot(lengths, [point["wall_s"] for point in points_of_ranks], "o", label=f"{ranks} ranks")
        axis.plot(lengths, [point["model_s"] for point in points_of_ranks], "-", color=line.get_color(), alpha=0.5)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("tokens of a row")
    axis.set_ylabel(f"s per step ({contender}; lines: by FLOPs)")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
