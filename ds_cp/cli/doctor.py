"""``ds_cp doctor``: is it installed, active, and able to run here?"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "pydantic", "flash-attn", "flash-attn-4", "peft", "trl")


def doctor(strict: Annotated[bool, typer.Option(help="exit 1 when something needed is missing")] = False) -> None:
    """Versions, activation and tools, one line each, with what to do where something is missing."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    healthy = True
    for name in PACKAGES:
        try:
            table.add_row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            table.add_row(name, "not installed")
    for name, (good, text) in {"activation": _activation(), "C++ for DeepSpeed's CPU ops": _compiler()}.items():
        healthy &= good
        table.add_row(name, text if good else f"[red]{text}[/red]")
    Console().print(table)
    if strict and not healthy:
        raise typer.Exit(1)


def _activation() -> tuple[bool, str]:
    """Whether torch loads ds_cp by its entry point in programs started like this one."""
    points = importlib.metadata.entry_points(group="torch.backends")
    if not any(point.name == "ds_cp" for point in points):
        return False, "torch does not know ds_cp: install it (pip install ds-cp), a folder on the path is not enough"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        return False, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading ds_cp: unset it"
    if os.environ.get("DS_CP_DISABLE", "") not in ("", "0"):
        return False, "DS_CP_DISABLE is set: the key would be ignored"
    return True, "on: torch loads ds_cp, and the key in a DeepSpeed config is obeyed"


def _compiler() -> tuple[bool, str]:
    missing = [tool for tool in ("c++", "ninja") if not shutil.which(tool)]
    if missing:
        return (
            False,
            f"{' and '.join(missing)} not found: on CPU, init_distributed of DeepSpeed builds an operator with them",
        )
    return True, "found"
