"""``ds_cp bench``: attention, training steps and scaling, side by side on this machine; one part by name, or all."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer


def app() -> typer.Typer:
    """The command and its parts."""
    from ds_cp.cli.bench import attention, scaling, simulate, step

    bench = typer.Typer(
        help="Measure ds_cp beside its peers; without a part's name: all of them.", add_completion=False
    )
    parts = {
        "attention": attention.bench_attention,
        "step": step.bench_step,
        "scaling": scaling.bench_scaling,
    }

    @bench.callback(invoke_without_command=True)
    def everything(
        context: typer.Context,
        output: Annotated[Path | None, typer.Option(help="a folder for JSON, and plots where matplotlib is")] = None,
    ) -> None:
        """Run every part with its defaults, unless one is named."""
        if context.invoked_subcommand is not None:
            return
        if output:
            output.mkdir(parents=True, exist_ok=True)
        for name in parts:
            files = {"output": output / f"{name}.json"} if output else {}
            if output and name != "attention" and find_spec("matplotlib"):
                files["plot"] = output / f"{name}.png"
            context.invoke(typer.main.get_command(bench).commands[name], **files)

    for name, command in parts.items():
        bench.command(name)(command)
    bench.command("simulate")(simulate.simulate)
    return bench
