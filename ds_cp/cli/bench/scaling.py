"""``ds_cp bench scaling``: a step's time over lengths and ranks beside what the FLOPs promise, and the longest row that fits."""

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

LADDER = (1, 1.5)  # 8k, 12k, 16k, 24k, ...


def bench_scaling(
    lengths: Annotated[str, typer.Option(help="tokens of a row")] = "2048,4096,8192",
    ranks: Annotated[str, typer.Option(help="processes, one thread each; 1 trains without the key")] = "1,2",
    contender: Annotated[str, typer.Option(help=f"of: {', '.join(BUILDERS)}")] = "ds_cp",
    within_gib: Annotated[float, typer.Option(help="instead: the longest row that stays below this peak")] = 0.0,
    layers: Annotated[int, typer.Option()] = 4,
    hidden: Annotated[int, typer.Option()] = 512,
    heads: Annotated[int, typer.Option()] = 8,
    kv_heads: Annotated[int, typer.Option()] = 2,
    vocab: Annotated[int, typer.Option()] = 32000,
    output: Annotated[Path | None, typer.Option(help="write the points as JSON")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw them; needs matplotlib (extra: plot)")] = None,
) -> None:
    """Measure one contender over S and P.

    "model" is the first point's time, times the FLOPs per rank over the first point's: what a step would take if
    nothing but arithmetic took time, and all ranks shared it equally.

    With --within-gib the length climbs from the first one in steps of 4/3 and 3/2 until a rank's peak passes the limit.
    """
    if contender not in BUILDERS:
        raise typer.BadParameter(f"{contender} not among {', '.join(BUILDERS)}")
    shape = TrainShape(0, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=vocab)
    lengths_, ranks_ = ([int(word) for word in words.split(",")] for words in (lengths, ranks))
    if within_gib:
        points = [point for p in ranks_ for point in _climb(contender, shape, lengths_[0], p, within_gib)]
    else:
        points = [_point(contender, replace(shape, seq_len=s), p) for p in ranks_ for s in lengths_]
    _add_model(points)
    console = Console()
    _print(points, contender, console)
    if within_gib:
        for p in ranks_:
            fitting = [point["seq_len"] for point in points if point["ranks"] == p and point["fits"]]
            console.print(
                f"{p} ranks: longest row within {within_gib:g} GiB per process: {max(fitting, default=0)} tokens"
            )
    if output:
        output.write_text(json.dumps({"contender": contender, "shape": asdict(shape), "points": points}, indent=1))
    if plot:
        _plot(points, contender, plot)


def _point(contender: str, shape: TrainShape, ranks: int) -> dict[str, Any]:
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
    """Points of growing length, up to the first that does not fit."""
    points: list[dict[str, Any]] = []
    length = first
    while not points or points[-1]["fits"]:
        for factor in LADDER:
            points.append(_point(contender, replace(shape, seq_len=int(length * factor)), ranks))
            points[-1]["fits"] = points[-1]["peak_mib"] <= gib * 1024
            if not points[-1]["fits"]:
                break
        length *= 2
    return points


def _add_model(points: list[dict[str, Any]]) -> None:
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
        mine = [point for point in points if point["ranks"] == ranks]
        lengths = [point["seq_len"] for point in mine]
        (line,) = axis.plot(lengths, [point["wall_s"] for point in mine], "o", label=f"{ranks} ranks")
        axis.plot(lengths, [point["model_s"] for point in mine], "-", color=line.get_color(), alpha=0.5)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("tokens of a row")
    axis.set_ylabel(f"s per step ({contender}; lines: by FLOPs)")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
