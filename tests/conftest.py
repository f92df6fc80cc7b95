"""Settings for every test: one thread per process, the CPU, no network, the harness importable."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# Before anything imports torch or deepspeed: ranks are forked from this process and inherit all of it.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = "1"  # an OpenMP pool does not survive a fork
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # nor does a pool of compilers
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
