"""All changes to other libraries: one file per library, and a folder for transformers.

Every change is a :class:`Patch`: small, named, listed by :func:`installed` and undone by :func:`restore`. Before a config
with the key ``context_parallel`` is read, only the functions that read configs are patched.
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
"""Environment variable that switches ds_cp off."""


class MissingTargetError(RuntimeError):
    """Another library lacks a name that ds_cp patches, or its code does not use what the patch relies on."""


@dataclass(frozen=True, eq=False)
class Patch:
    """One change to another library or to a model.

    Attributes:
        target: Dotted name of what was changed.
        why: One sentence.
        undo: Function that restores the previous state.
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
    """List a patch that the caller has already applied."""
    _installed.append(patch)
    return patch


def remove(patch: Patch) -> None:
    """Undo one patch, if it is still in place."""
    if patch in _installed:
        _installed.remove(patch)
        patch.undo()


def replace(owner: Any, name: str, make_replacement: Callable[[Any], Any], why: str, *used_names: str) -> None:
    """Replace ``owner.name`` by ``make_replacement(original)`` and list the patch. A second call changes nothing.

    Args:
        owner: Module or class.
        why: One sentence.
        used_names: Names (attributes, functions, arguments) that must occur in the original's code, because the
            replacement relies on them.

    Raises:
        MissingTargetError: The installed library has no such name, or the original does not use ``used_names``.
    """
    target = _dotted_name(owner, name)
    if any(patch.target == target for patch in _installed):
        return
    require(owner, name, why, *used_names)
    original = owner.__dict__[name]
    setattr(owner, name, make_replacement(original))
    record(Patch(target, why, lambda: setattr(owner, name, original)))


def require(owner: Any, name: str, why: str, *used_names: str) -> None:
    """Check that ``owner.name`` exists and that its code uses ``used_names``.

    The code is not checked where the function comes from another library than its owner: somebody else has patched it.

    Raises:
        MissingTargetError: Names the library, its version and what is missing.
    """
    if name not in owner.__dict__:
        raise _missing(owner, f"no {_dotted_name(owner, name)}", why)
    value = owner.__dict__[name]
    function = inspect.unwrap(value.fget if isinstance(value, property) and value.fget else value)
    code = getattr(function, "__code__", None)
    if code is None or _package(function) != _package(owner):
        return
    unknown = sorted(set(used_names) - _names_in(code))
    if unknown:
        raise _missing(owner, f"a {_dotted_name(owner, name)} that does not know {', '.join(unknown)}", why)


def library(owner: Any) -> str:
    """The library that a module, class or function belongs to, with its version: "transformers 5.24.0"."""
    package = _package(owner)
    try:
        return f"{package} {metadata.version(package.replace('_', '-'))}"
    except metadata.PackageNotFoundError:
        return package


def disabled() -> bool:
    """Whether the user has switched ds_cp off. Warns, because the key in the config is then ignored."""
    if os.environ.get(OFF_SWITCH, "") in ("", "0"):
        return False
    warnings.warn(
        f'the DeepSpeed config has "context_parallel", but {OFF_SWITCH} is set: NO sequence is shared, every rank trains '
        "on its own whole batch. Unset it, or take the key out.",
        stacklevel=3,
    )
    return True


def on_import(name: str) -> None:
    """Patch a module that reads DeepSpeed configs or accelerate's launch config. Called right after its import."""
    if name == "deepspeed.runtime.config":
        import_module("ds_cp.patches.deepspeed").watch_config()
    elif name == "accelerate.utils.deepspeed":
        import_module("ds_cp.patches.accelerate").watch_config()
    elif name == "accelerate.commands.config.config_args":
        import_module("ds_cp.patches.accelerate").watch_launcher()


def install() -> None:
    """Install every patch. Called when a key with size > 1 was read; a second call changes nothing.

    Raises:
        ConfigError: A library has a version that is known not to work.
        MissingTargetError: A library lacks what a patch relies on. No patch stays in place.
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


def _dotted_name(owner: Any, name: str) -> str:
    return f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")


def _package(owner: Any) -> str:
    return (getattr(owner, "__module__", None) or owner.__name__).partition(".")[0]


def _names_in(code: CodeType) -> set[str]:
    """Names that occur in code: attributes, globals, arguments, keywords, strings, and those of nested functions."""
    names = {*code.co_names, *code.co_varnames, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
        elif isinstance(constant, tuple):
            names |= {item for item in constant if isinstance(item, str)}
        elif isinstance(constant, str):
            names.add(constant)
    return names


def _missing(owner: Any, what: str, why: str) -> MissingTargetError:
    return MissingTargetError(
        f"{library(owner)} has {what}, which ds_cp takes the place of or relies on ({why}): without it a run with "
        f'"context_parallel" would go wrong without saying so. {_advice(_package(owner))} Nothing was started.'
    )


def _advice(package: str) -> str:
    from ds_cp.patches import versions

    tested = versions.ranges(versions.TESTED).get(package.replace("_", "-"))
    tested_text = f"Versions that ds_cp was run with: {package} {tested}." if tested else ""
    return f"{tested_text} Install one of them, or take the key out.".strip()
