"""Packaging: a wheel contains both folders, and `patches` is imported as `ds_cp.patches` only."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT
from harness.processes import run_python


def imported_names(node):
    """The absolute module names that one import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module]
    return []


def test_nothing_imports_the_top_level_folder_patches():
    """`import patches` from the repository's root would run every patch module a second time."""
    wrong = []
    for folder in ("ds_cp", "patches", "tests", "example_configs"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                names = imported_names(node)
                if any(name == "patches" or name.startswith("patches.") for name in names):
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, f"write `ds_cp.patches` instead: {wrong}"


@pytest.fixture(scope="module")
def installed_wheel(tmp_path_factory):
    """A wheel built from a copy of the sources and installed with --target, outside of the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("ds_cp", "patches"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(build, check=True, cwd=folder, timeout=100)
    (wheel,) = folder.glob("ds_cp-*.whl")
    target = folder / "target"
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, cwd=folder, timeout=100)
    return target


def test_a_wheel_holds_every_module_of_both_folders(installed_wheel):
    for folder, inside in (("ds_cp", "ds_cp"), ("patches", "ds_cp/patches")):
        for file in (ROOT / folder).rglob("*.py"):
            assert (installed_wheel / inside / file.relative_to(ROOT / folder)).is_file(), file


def test_an_installed_wheel_activates_and_finds_its_patches_outside_the_clone(installed_wheel, tmp_path):
    code = (
        "import torch, sys, importlib.util, importlib.metadata\n"
        "import ds_cp\n"
        "print(ds_cp.__file__)\n"
        "print(importlib.util.find_spec('ds_cp.patches').origin)\n"
        "print(sum(getattr(f, 'ds_cp_watcher', False) for f in sys.meta_path))\n"
        "group = importlib.metadata.entry_points(group='torch.backends')\n"
        "print([e.value for e in group if e.name == 'ds_cp'])\n"
    )
    done = run_python(code, tmp_path, PYTHONPATH=str(installed_wheel))
    assert done.returncode == 0, done.stderr
    core, patches, hooks, entry = done.stdout.splitlines()
    assert Path(core) == installed_wheel / "ds_cp" / "__init__.py"
    assert Path(patches) == installed_wheel / "ds_cp" / "patches" / "__init__.py"
    assert hooks == "1"
    assert entry == "['ds_cp._autoload:activate']"
