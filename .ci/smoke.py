"""Checks an installed ds_cp from outside of its clone; `make dist` runs this for the wheel and the source distribution.

    python -I smoke.py CLONE

The first import is torch's and not ds_cp's: the entry point has to find ds_cp by itself.
"""

import csv
import importlib.metadata
import subprocess
import sys
from importlib import resources
from pathlib import Path

import torch  # noqa: F401

if not any(getattr(finder, "ds_cp_watcher", False) for finder in sys.meta_path):
    sys.exit("import torch did not activate ds_cp")

import ds_cp
import ds_cp.patches

PACKAGED = {".py", ".csv", ".json", ".md", ".txt", ".typed"}


def packaged(folder: Path) -> set[Path]:
    """The files below a package's folder that a distribution must hold, ds_cp.patches among them."""
    found = (file for part in (folder, folder / "patches") for file in part.rglob("*") if file.suffix in PACKAGED)
    return {file.relative_to(folder) for file in found}


clone = Path(sys.argv[1])
installed = Path(ds_cp.__file__).parent

assert installed.is_relative_to(sys.prefix) and not installed.is_relative_to(clone), installed
assert Path(ds_cp.patches.__file__).parent == installed / "patches", ds_cp.patches.__file__
assert not (installed / "patches").is_symlink()
assert packaged(installed) == packaged(clone / "ds_cp"), packaged(installed) ^ packaged(clone / "ds_cp")
assert (installed / "py.typed").is_file()

version = importlib.metadata.version("ds-cp")
assert version == ds_cp.__version__, (version, ds_cp.__version__)

points = importlib.metadata.entry_points(group="torch.backends")
assert [point.value for point in points if point.name == "ds_cp"] == ["ds_cp._autoload:activate"], points

with resources.files("ds_cp.patches").joinpath("transformers", "verified.csv").open(encoding="utf-8") as file:
    rows = list(csv.reader(file))
assert len(rows) > 100, len(rows)

shown = subprocess.run([Path(sys.executable).with_name("ds_cp"), "--help"], capture_output=True, text=True, check=True)
assert all(verb in shown.stdout for verb in ("plan", "verify", "doctor", "bench")), shown.stdout
