"""Builds ds_cp; what the distribution is stands in pyproject.toml."""

from pathlib import Path

from setuptools import setup

if not (Path(__file__).parent / "ds_cp" / "patches" / "__init__.py").is_file():
    raise SystemExit(
        "ds_cp/patches is no link to the folder patches here: this copy of the sources was made by something that does "
        "not keep symbolic links. Clone the repository with git, or install from a wheel or a source distribution."
    )

setup()
