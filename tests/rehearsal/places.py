"""Where in ds_cp, or in the libraries around it, something happens: by the Python stack."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import FrameType

ROOT = str(Path(importlib.util.find_spec("ds_cp").origin).parents[1]) + "/"
SITE_PACKAGES = sysconfig.get_paths()["purelib"]
LIBRARIES = ("transformers/", "deepspeed/", "trl/", "accelerate/")
TRANSPARENT = ("deepspeed/comm/", "deepspeed/utils/", "deepspeed/accelerator/", "deepspeed/ops/")
"""Not the places that ask for a message or an operation, but how they do."""


def place() -> str:
    """``file:function`` of the innermost code of ds_cp or of the libraries around it."""
    frame = sys._getframe(1)
    while frame is not None:
        file = short(frame.f_code.co_filename)
        if file and not file.startswith(TRANSPARENT):
            return f"{file}:{_function(frame)}"
        frame = frame.f_back
    return "autograd"


def _function(frame: FrameType) -> str:
    """The name of the function around comprehensions and lambdas."""
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    while name.startswith("<") and frame.f_back is not None and frame.f_back.f_code.co_filename == file:
        frame = frame.f_back
        name = frame.f_code.co_name
    return name


_short: dict[str, str] = {}


def short(path: str) -> str:
    """``ds_cp/mesh.py`` of a path of ds_cp, ``transformers/...`` of a library's; empty for all other code."""
    if path not in _short:
        found = ""
        if path.startswith(ROOT) and path[len(ROOT) :].startswith(("ds_cp/", "patches/")):
            found = path[len(ROOT) :].replace("ds_cp/patches/", "patches/")
        elif path.startswith(SITE_PACKAGES) and path[len(SITE_PACKAGES) + 1 :].startswith(LIBRARIES):
            found = path[len(SITE_PACKAGES) + 1 :]
        _short[path] = found
    return _short[path]
