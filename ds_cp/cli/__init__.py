"""The command ``ds_cp``: one file per verb."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    import typer

    from ds_cp.cli import bench, doctor, plan, verify

    app = typer.Typer(help="Context parallelism for DeepSpeed.", no_args_is_help=True, add_completion=False)
    app.command("plan")(plan.plan)
    app.command("verify")(verify.verify)
    app.command("doctor")(doctor.doctor)
    app.add_typer(bench.app(), name="bench")
    app()
