"""``ds_cp bench``: measurements of attention, training steps and scaling on this machine, and predictions for other GPUs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Callable

import typer


def app() -> typer.Typer:
    """Build the command with its subcommands."""
    from ds_cp.cli.bench import attention, scaling, simulate, step

    bench = typer.Typer(
        help="Measure ds_cp and other packages for context parallelism. Without a subcommand, run all measurements.",
        add_completion=False,
    )
    measurements: dict[str, Callable[..., None]] = {
        "attention": attention.bench_attention,
        "step": step.bench_step,
        "scaling": scaling.bench_scaling,
    }

    @bench.callback(invoke_without_command=True)
    def run_all(
        context: typer.Context,
        output: Annotated[
            Path | None, typer.Option(help="Folder for JSON files, and for plots if matplotlib is installed.")
        ] = None,
    ) -> None:
        """Run every measurement with its defaults, unless a subcommand is named."""
        if context.invoked_subcommand is not None:
            return
        if output:
            output.mkdir(parents=True, exist_ok=True)
        for name, command in measurements.items():
            files = {"output": output / f"{name}.json"} if output else {}
            if output and name != "attention" and find_spec("matplotlib"):
                files["plot"] = output / f"{name}.png"
            command(**files)

    for name, command in measurements.items():
        bench.command(name)(command)
    bench.command("simulate")(simulate.simulate)
    return bench
