"""All that touches other people's code: a file per library, a folder for transformers.

Each patch is small, named, listed and reversible. Nothing is patched until a config with the key
``context_parallel`` is read, except the two places that read configs.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Callable

OFF_SWITCH = "DS_CP_DISABLE"


@dataclass(frozen=True, eq=False)
class Patch:
    """One change to another library or to a model.

    Attributes:
        target: what was changed, as a dotted name.
        why: one sentence.
        undo: puts the old state back.
    """

    target: str
    why: str
    undo: Callable[[], None]


_installed: list[Patch] = []


def installed() -> tuple[Patch, ...]:
    """Every patch that is in place now, oldest first."""
    return tuple(_installed)


def restore() -> None:
    """Undo every patch, newest first. A config read afterwards installs them again only through :func:`on_import`."""
    while _installed:
        _installed.pop().undo()


def record(patch: Patch) -> Patch:
    """List a patch that its maker has just put in place."""
    _installed.append(patch)
    return patch


def remove(patch: Patch) -> None:
    """Undo one patch, if it is still in place."""
    if patch in _installed:
        _installed.remove(patch)
        patch.undo()


def replace(owner: Any, name: str, make: Callable[[Any], Any], why: str) -> None:
    """Replace ``owner.name`` by ``make(original)``, once, and list it.

    ``owner`` is a module, a class or a dict.
    """
    is_dict = isinstance(owner, dict)
    target = name if is_dict else f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")
    if any(patch.target == target for patch in _installed):
        return
    original = owner[name] if is_dict else owner.__dict__[name]
    put = owner.__setitem__ if is_dict else (lambda key, value: setattr(owner, key, value))
    put(name, make(original))
    record(Patch(target, why, lambda: put(name, original)))


def disabled() -> bool:
    """True when the user switched ds_cp off; said loudly, because the key would then be ignored."""
    if os.environ.get(OFF_SWITCH, "") in ("", "0"):
        return False
    warnings.warn(
        f'the DeepSpeed config has "context_parallel", but {OFF_SWITCH} is set: NO sequence is shared, every rank trains '
        "on its own whole batch. Unset it, or take the key out.",
        stacklevel=3,
    )
    return True


def on_import(name: str) -> None:
    """Called right after a module that reads DeepSpeed configs was imported."""
    if name == "deepspeed.runtime.config":
        import_module("ds_cp.patches.deepspeed").watch_config()
    elif name == "accelerate.utils.deepspeed":
        import_module("ds_cp.patches.accelerate").watch_config()


def install() -> None:
    """Install every patch; called when a key with size > 1 was read. Doing it again changes nothing."""
    for module in ("deepspeed", "transformers", "accelerate"):
        import_module(f"ds_cp.patches.{module}").install()
