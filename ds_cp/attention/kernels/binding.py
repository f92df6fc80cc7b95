"""Binds private functions of other packages by the names of their parameters.

Packages add, rename and reorder parameters between versions. A kernel therefore passes each value under all names that it
knows, and the function's own signature selects those that are passed on. A parameter without a default that the kernel does
not know, or a missing one that the kernel needs, is an error when the kernel is made, instead of a wrong result later.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Iterable


class UnknownVersion(RuntimeError):
    """The installed version of a package has functions that the kernel does not know."""


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, or of the function behind a torch custom operator."""
    return dict(inspect.signature(getattr(function, "_init_fn", function)).parameters)


def bind(function: Callable[..., Any], provided: Iterable[str], required: Iterable[str]) -> Callable[..., Any]:
    """A function of keyword arguments that passes on those that ``function`` has.

    Args:
        function: Function of another package.
        provided: Names of all arguments that calls will have.
        required: Names of arguments that must be passed on; ``"a|b"`` if either of two names will do.

    Raises:
        UnknownVersion: ``function`` needs an argument that is not provided, or lacks a required one. The message names the
            function and the arguments.
    """
    known, names = parameters(function), set(provided)
    name = getattr(getattr(function, "_init_fn", function), "__name__", repr(function))
    needed = [p for p, parameter in known.items() if parameter.default is inspect.Parameter.empty and p not in names]
    missing = [one for one in required if not any(spelling in known for spelling in one.split("|"))]
    if needed or missing:
        what = [f"asks for {', '.join(needed)}"] * bool(needed) + [f"lacks {', '.join(missing)}"] * bool(missing)
        raise UnknownVersion(f"{name} of the installed package {' and '.join(what)}, which ds_cp does not know")
    passed = [p for p in known if p in names]
    return lambda **values: function(**{p: values[p] for p in passed})
