"""``ds_cp doctor``: is ds_cp installed, active, and able to run on this machine?"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "pydantic", "flash-attn", "flash-attn-4", "peft", "trl")


def doctor(
    strict: Annotated[bool, typer.Option(help="Exit with status 1 when a requirement is missing.")] = False,
) -> None:
    """Print versions, activation and build tools, and what to do about each requirement that is missing."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    healthy = True
    for name in PACKAGES:
        try:
            table.add_row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            table.add_row(name, "not installed")
    for name, (passed, text) in {"activation": _activation(), "C++ for DeepSpeed's CPU ops": _compiler()}.items():
        healthy &= passed
        table.add_row(name, text if passed else f"[red]{text}[/red]")
    Console().print(table)
    if strict and not healthy:
        raise typer.Exit(1)


def _activation() -> tuple[bool, str]:
    """Whether torch loads ds_cp by its entry point in programs that are started from this environment, and why not."""
    entry_points = importlib.metadata.entry_points(group="torch.backends")
    if not any(entry_point.name == "ds_cp" for entry_point in entry_points):
        return False, (
            "torch does not find the entry point of ds_cp. Install the package (pip install ds-cp); a folder on "
            "PYTHONPATH is not enough."
        )
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        return False, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 prevents torch from loading ds_cp. Unset it."
    if os.environ.get("DS_CP_DISABLE", "") not in ("", "0"):
        return False, 'DS_CP_DISABLE is set: "context_parallel" in DeepSpeed configs would be ignored. Unset it.'
    return True, 'on: torch loads ds_cp, which reads "context_parallel" in DeepSpeed configs'


def _compiler() -> tuple[bool, str]:
    """Whether the tools are installed with which DeepSpeed compiles its CPU operators, and which ones are missing."""
    missing = [tool for tool in ("c++", "ninja") if not shutil.which(tool)]
    if missing:
        return False, (
            f"{' and '.join(missing)} not found. On CPU, init_distributed of DeepSpeed compiles an operator with "
            "c++ and ninja: install both."
        )
    return True, "found"
