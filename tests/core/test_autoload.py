"""Activation: the entry point that `import torch` calls, and the import hook that it installs."""

import ast
import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.paths import DATA, ROOT
from harness.processes import run_python

WATCHED = {"deepspeed.runtime.config", "accelerate.utils.deepspeed", "accelerate.commands.config.config_args"}

pytestmark = pytest.mark.timeout(300)  # the first test starts eight interpreters

# The first import of a script.
FIRST_IMPORTS = [
    "import torch",
    "import deepspeed",
    "import transformers",
    "import accelerate",
    "from transformers import Trainer",
    "from deepspeed import initialize",
    "from accelerate.utils.deepspeed import HfDeepSpeedConfig",
    "import accelerate.commands.launch",
]

RECORDER = DATA / "programs" / "recording_sitecustomize.py"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A folder for PYTHONPATH with the `sitecustomize` that replaces `ds_cp.patches`."""
    folder = tmp_path_factory.mktemp("stand_in")
    shutil.copy(RECORDER, folder / "sitecustomize.py")
    return folder


@pytest.fixture(scope="module")
def recordings(stand_in):
    """By first import: the finished process, and the lines that were recorded."""

    def record(number_and_first):
        number, first = number_and_first
        record_to = stand_in / f"record{number}"
        code = f"{first}\nimport {', '.join(sorted(WATCHED))}\n" + (
            "import sys\n"
            f"wrapped = [m.__name__ for m in ({', '.join(sorted(WATCHED))})\n"
            "           if type(m.__loader__).__module__.startswith('ds_cp')\n"
            "           or type(m.__spec__.loader).__module__.startswith('ds_cp')]\n"
            "assert not wrapped, wrapped\n"
        )
        done = run_python(code, stand_in, PYTHONPATH=str(stand_in), RECORD_TO=str(record_to))
        lines = record_to.read_text().splitlines() if record_to.exists() else []
        return done, [line.split() for line in lines]

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(FIRST_IMPORTS, pool.map(record, enumerate(FIRST_IMPORTS)), strict=True))


@pytest.mark.parametrize("first", FIRST_IMPORTS)
def test_each_watched_module_is_announced_once_when_it_is_ready(recordings, first):
    done, lines = recordings[first]
    assert done.returncode == 0, done.stderr
    assert sorted(name for name, *_ in lines) == sorted(WATCHED)
    assert all(module_ready == "True" for _, module_ready, _ in lines), lines


@pytest.mark.parametrize("first", FIRST_IMPORTS)
def test_torch_is_complete_when_a_watched_module_is_announced(recordings, first):
    _, lines = recordings[first]
    assert lines and all(torch_ready == "True" for *_, torch_ready in lines), lines


def test_an_error_in_on_import_is_reported_and_breaks_nothing(stand_in):
    done = run_python(
        "import torch\nimport accelerate.utils.deepspeed\nprint(torch.ones(2).sum().item())",
        stand_in,
        PYTHONPATH=str(stand_in),
        RECORD_TO=str(stand_in / "fault"),
        RECORD_THEN="raise",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2.0"
    assert "context parallelism is NOT active" in done.stderr
    assert "a fault in a patch" in done.stderr


def test_import_torch_loads_nothing_of_ds_cp_but_the_hook(tmp_path):
    code = (
        "import json, sys, torch\n"
        "print(json.dumps([n for n in sys.modules if n.split('.')[0] == 'ds_cp']))\n"
        "heavy = {'deepspeed', 'transformers', 'accelerate', 'pydantic', 'rich', 'typer'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))\n"
    )
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    ours, heavy = map(json.loads, done.stdout.splitlines())
    assert set(ours) == {"ds_cp", "ds_cp._autoload"}
    assert heavy == []


def test_the_hook_needs_no_torch_is_installed_once_and_takes_under_a_millisecond(stand_in):
    code = (
        "import sys, threading, time\n"
        "import ds_cp._autoload as a\n"
        "finders = len(sys.meta_path) + 1\n"
        "times = []\n"
        "for _ in range(5):\n"
        "    before = time.perf_counter()\n"
        "    a.activate()\n"
        "    times.append(time.perf_counter() - before)\n"
        "    assert len(sys.meta_path) == finders\n"
        "    ours = sys.meta_path.pop(0)\n"
        "sys.meta_path.insert(0, ours)\n"
        "a.activate(); a.activate()\n"
        "assert len(sys.meta_path) == finders\n"
        "assert 'torch' not in sys.modules\n"
        "assert min(times) < 1e-3, times\n"
    )
    done = run_python(code, stand_in, PYTHONPATH=f"{stand_in}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr


FAKE_MODULES = """
import sys, types
import ds_cp._autoload as a

def fake(name, initializing):
    module = types.ModuleType(name)
    module.DeepSpeedConfig = object
    module.__spec__ = types.SimpleNamespace(_initializing=initializing)
    sys.modules[name] = module
"""


def test_a_module_that_is_already_imported_is_announced_immediately(stand_in):
    record_to = stand_in / "already"
    done = run_python(
        FAKE_MODULES + "fake('deepspeed.runtime.config', False)\na.activate()\n",
        stand_in,
        PYTHONPATH=f"{stand_in}{os.pathsep}{ROOT}",
        RECORD_TO=str(record_to),
    )
    assert done.returncode == 0, done.stderr
    assert record_to.read_text().split()[0] == "deepspeed.runtime.config"


def test_a_partially_imported_module_is_not_announced_and_a_warning_says_so(stand_in):
    record_to = stand_in / "half"
    done = run_python(
        FAKE_MODULES + "fake('deepspeed.runtime.config', True)\na.activate()\n",
        stand_in,
        PYTHONPATH=f"{stand_in}{os.pathsep}{ROOT}",
        RECORD_TO=str(record_to),
    )
    assert done.returncode == 0, done.stderr
    assert not record_to.exists()
    assert "half imported" in done.stderr and "NOT active" in done.stderr


def test_two_import_hooks_that_delegate_to_each_other_terminate(tmp_path):
    """The hook of another library looks a module up through all finders, including the finder of ds_cp."""
    package = tmp_path / "accelerate" / "utils"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "deepspeed.py").write_text("HfDeepSpeedConfig = object\n")
    code = (
        "import importlib.util, sys\n"
        "class Other:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        return importlib.util.find_spec(name) if name == 'accelerate.utils.deepspeed' else None\n"
        "import ds_cp._autoload as a\n"
        "a.activate()\n"
        "class Guarded(Other):\n"
        "    busy = False\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if self.busy: return None\n"
        "        self.busy = True\n"
        "        try: return super().find_spec(name, path, target)\n"
        "        finally: self.busy = False\n"
        "sys.meta_path.insert(0, Guarded())\n"
        "sys.meta_path.insert(2, Guarded())\n"
        "import accelerate.utils.deepspeed as m\n"
        "assert m.HfDeepSpeedConfig is object\n"
    )
    shutil.copy(RECORDER, tmp_path / "sitecustomize.py")
    record_to = tmp_path / "record"
    done = run_python(code, tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", RECORD_TO=str(record_to))
    assert done.returncode == 0, done.stderr
    assert len(record_to.read_text().splitlines()) == 1


def test_the_autoload_module_imports_the_standard_library_only():
    tree = ast.parse((ROOT / "ds_cp" / "_autoload.py").read_text())
    top_level = {name for node in tree.body for name in imported_names(node)}
    assert {name.split(".")[0] for name in top_level} <= set(sys.stdlib_module_names)


def imported_names(node):
    """The absolute module names that one import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module]
    return []
