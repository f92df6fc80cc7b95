"""The command line ``ds_cp``: ``plan``, ``verify``, ``doctor`` and ``bench``, each in a module of its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def app() -> typer.Typer:
    """Build the command with its subcommands."""
    import typer

    from ds_cp.cli import bench, doctor, plan, verify

    cli = typer.Typer(help="Context parallelism for DeepSpeed.", no_args_is_help=True, add_completion=False)
    cli.command("plan")(plan.plan)
    cli.command("verify")(verify.verify)
    cli.command("doctor")(doctor.doctor)
    cli.add_typer(bench.app(), name="bench")
    return cli


def main() -> None:
    """Entry point of the console script."""
    app()()
