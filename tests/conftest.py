"""Settings for all tests: one thread per process, CPU, no network, `tests/` on sys.path."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# Before torch or deepspeed is imported. Ranks are forked from this process and inherit its environment.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = "1"  # threads of an OpenMP pool do not survive a fork
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # nor do those of a pool of compilers
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp(prefix="torch_extensions_")
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def workers():
    """`workers(2).run(function, *args)` runs the function on two gloo ranks and returns both results."""
    from harness.workers import workers

    return workers


def pytest_sessionfinish():
    shutil.rmtree(os.environ["TORCH_EXTENSIONS_DIR"], ignore_errors=True)
