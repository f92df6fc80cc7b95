"""The command ``ds_cp``: one file per verb."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def app() -> typer.Typer:
    """The command with its verbs."""
    import typer

    from ds_cp.cli import bench, doctor, plan, verify

    made = typer.Typer(help="Context parallelism for DeepSpeed.", no_args_is_help=True, add_completion=False)
    made.command("plan")(plan.plan)
    made.command("verify")(verify.verify)
    made.command("doctor")(doctor.doctor)
    made.add_typer(bench.app(), name="bench")
    return made


def main() -> None:
    """Entry point of the console script."""
    app()()
