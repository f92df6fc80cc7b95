"""The structure that docs/architecture.md describes: imports without a cycle, layers, and a map that names every file."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"ds_cp": ROOT / "ds_cp", "ds_cp.patches": ROOT / "patches"}
LINK = ROOT / "ds_cp" / "patches"


def modules():
    """Every file of the package by the name of its module."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            if LINK in file.parents and package == "ds_cp":
                continue
            name = ".".join((package, *file.relative_to(folder).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = file
    return found


def imports_of(file, known):
    """The modules of the package that are imported when a file is, without those inside functions and for types only."""

    def walk(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.Lambda)) or "TYPE_CHECKING" in ast.dump(child)[:60]:
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                names = [f"{child.module}.{alias.name}" for alias in child.names]
                yield from (name if name in known else child.module for name in names)
            yield from walk(child)

    return {name for name in walk(ast.parse(file.read_text(encoding="utf-8"))) if name in known}


@pytest.fixture(scope="module")
def graph():
    known = modules()
    assert len(known) > 100
    return {name: imports_of(file, known) for name, file in known.items()}


def test_imports_form_no_cycle(graph):
    left = {name: set(targets) for name, targets in graph.items()}
    while ground := {name for name, targets in left.items() if not targets}:
        left = {name: targets - ground for name, targets in left.items() if name not in ground}
    assert not left, "these modules import each other"


ORDER = [  # a module imports those of its own line or of lines below
    ("ds_cp.cli",),
    ("ds_cp.patches",),
    ("ds_cp.report",),
    ("ds_cp.region", "ds_cp.loss", "ds_cp.balance", "ds_cp.splits", "ds_cp.cost", "ds_cp.collectives", "ds_cp.recurrent", "ds_cp.chunked", "ds_cp.agreement", "ds_cp.planner"),
    ("ds_cp.attention",),
    ("ds_cp.mask",),
    ("ds_cp.layout", "ds_cp.cards", "ds_cp.mesh", "ds_cp.process_group", "ds_cp.config", "ds_cp.rng", "ds_cp.log", "ds_cp.profiling"),
]  # fmt: skip


def line_of(name):
    return next((i for i, line in enumerate(ORDER) if any(f"{name}.".startswith(f"{part}.") for part in line)), None)


def test_imports_point_down(graph):
    wrong = [
        (name, target)
        for name, targets in graph.items()
        for target in targets
        if line_of(name) is not None and line_of(target) is not None and line_of(target) < line_of(name)
    ]
    assert wrong == []


def test_the_method_imports_no_library_of_models():
    for name, file in modules().items():
        if not name.startswith(("ds_cp.patches", "ds_cp.cli")):
            assert not re.search(
                r"^\s*(from|import) (transformers|accelerate|trl|peft)\b", file.read_text(), re.MULTILINE
            ), name


def test_the_map_names_every_file():
    code_map = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    named = set(re.findall(r"\w+(?=\.py)", code_map)) | {"flash_attention_3", "flash_attention_4"}  # listed as "_3, _4"
    described_by_folder = {"cli", "models", "kernels"}
    missing = [
        name
        for name, file in modules().items()
        if file.stem not in named and file.stem != "__init__" and described_by_folder.isdisjoint(file.parts)
    ]
    assert missing == []
    files = {file.stem for file in modules().values()}
    assert named <= files, f"the map names files that do not exist: {sorted(named - files)}"
