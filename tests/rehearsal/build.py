"""Compiles ``guard.cpp`` against the installed torch, once per version of both."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
SECONDS = 300


def compiler() -> str | None:
    """The C++ compiler, by the variable CXX or by one of the usual names."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)


def torch_folder() -> Path:
    """Where torch is installed; it is not imported."""
    return Path(importlib.util.find_spec("torch").origin).parent


def why_not() -> str | None:
    """Why the rehearsal cannot run here, None if it can."""
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "this torch is built for CUDA, where a guard of its own takes the place of the rehearsal's"
    if not (torch_folder() / "lib" / "libtorch_cpu.so").exists():
        return "the rehearsal loads torch's libraries by their names on Linux"
    return None if compiler() else "there is no C++ compiler (CXX, c++, g++ or clang++)"


def build(folder: Path) -> Path:
    """The path of the compiled guard inside ``folder``."""
    torch = torch_folder()
    key = hashlib.sha256(SOURCE.read_bytes() + f"{version('torch')} {torch} {compiler()}".encode()).hexdigest()[:16]
    library = folder / f"guard_{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        options = ["-O0", "-fPIC", "-shared", "-std=c++20", f"-I{torch}/include"]
        libraries = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
        command = [compiler(), *options, str(SOURCE), *libraries, "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
        unfinished.replace(library)
    return library
