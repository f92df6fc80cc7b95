"""All that touches other people's code: a file per library, a folder for transformers.

Each patch is small, named, listed and reversible. Nothing is patched until a config with the key
``context_parallel`` is read, except the places that read configs.
"""

from __future__ import annotations

import inspect
import os
import warnings
from dataclasses import dataclass
from importlib import import_module, metadata
from types import CodeType
from typing import Any, Callable

OFF_SWITCH = "DS_CP_DISABLE"


class MissingTargetError(RuntimeError):
    """Another library lacks what a patch takes the place of, or does not use what the patch changes."""


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


def replace(owner: Any, name: str, make: Callable[[Any], Any], why: str, *uses: str) -> None:
    """Replace ``owner.name`` by ``make(original)``, once, and list it.

    Args:
        owner: a module or a class.
        why: one sentence.
        uses: names (attributes, functions, arguments) that the replacement relies on the original to know.

    Raises:
        MissingTargetError: the installed library has no such name, or it does not know ``uses``.
    """
    target = _target(owner, name)
    if any(patch.target == target for patch in _installed):
        return
    require(owner, name, why, *uses)
    original = owner.__dict__[name]
    setattr(owner, name, make(original))
    record(Patch(target, why, lambda: setattr(owner, name, original)))


def require(owner: Any, name: str, why: str, *uses: str) -> None:
    """Make sure that ``owner.name`` is there and that its code knows the names ``uses``; where it comes from another library
    than the owner, which is then somebody's own patch, its code is not looked at.

    Raises:
        MissingTargetError: names the library, its version and what was not found.
    """
    if name not in owner.__dict__:
        raise _missing(owner, f"no {_target(owner, name)}", why)
    found = owner.__dict__[name]
    function = inspect.unwrap(found.fget if isinstance(found, property) else found)
    code = getattr(function, "__code__", None)
    if code is None or _package(function) != _package(owner):
        return
    unknown = sorted(set(uses) - _names(code))
    if unknown:
        raise _missing(owner, f"a {_target(owner, name)} that does not know {', '.join(unknown)}", why)


def library(owner: Any) -> str:
    """The library that a module, class or function is from, with its version: "transformers 5.24.0"."""
    package = _package(owner)
    try:
        return f"{package} {metadata.version(package.replace('_', '-'))}"
    except metadata.PackageNotFoundError:
        return package


def _target(owner: Any, name: str) -> str:
    return f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")


def _package(owner: Any) -> str:
    return (getattr(owner, "__module__", None) or owner.__name__).partition(".")[0]


def _names(code: CodeType) -> set[str]:
    """What code names: attributes, globals, arguments, keywords, and all of this in functions inside of it."""
    found = {*code.co_names, *code.co_varnames, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
        elif isinstance(constant, tuple):
            found |= {each for each in constant if isinstance(each, str)}
        elif isinstance(constant, str):
            found.add(constant)
    return found


def _missing(owner: Any, what: str, why: str) -> MissingTargetError:
    return MissingTargetError(
        f"{library(owner)} has {what}, which ds_cp takes the place of or relies on ({why}): without it a run with "
        f'"context_parallel" would go wrong without saying so. {_advice(_package(owner))} Nothing was started.'
    )


def _advice(package: str) -> str:
    from ds_cp.patches import versions

    tested = versions.ranges(versions.TESTED).get(package.replace("_", "-"))
    versions_that = f"Versions that ds_cp was run with: {package} {tested}." if tested else ""
    return f"{versions_that} Install one of them, or take the key out.".strip()


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
    """Called right after a module that reads DeepSpeed configs, or a launcher's, was imported."""
    if name == "deepspeed.runtime.config":
        import_module("ds_cp.patches.deepspeed").watch_config()
    elif name == "accelerate.utils.deepspeed":
        import_module("ds_cp.patches.accelerate").watch_config()
    elif name == "accelerate.commands.config.config_args":
        import_module("ds_cp.patches.accelerate").watch_launcher()


def install() -> None:
    """Install every patch; called when a key with size > 1 was read. Doing it again changes nothing.

    Raises:
        ConfigError: a version that is known not to work.
        MissingTargetError: an installed library is not as ds_cp knows it; no patch is left behind.
    """
    from ds_cp.patches import versions

    versions.check()
    before = len(_installed)
    try:
        for module in ("deepspeed", "transformers", "accelerate"):
            import_module(f"ds_cp.patches.{module}").install()
    except BaseException as error:
        while len(_installed) > before:
            _installed.pop().undo()
        if isinstance(error, ImportError):
            package = (error.name or "").partition(".")[0]
            raise MissingTargetError(f"{error}. {_advice(package)} Nothing was started.") from error
        raise
