"""The names that a class or a function refers to, read from its code without running it."""

from __future__ import annotations

import inspect
from functools import cache
from types import CodeType, FunctionType
from typing import Any, Iterator


@cache
def referenced_names(cls: type) -> frozenset[str]:
    """Global functions and attributes that the methods of a class refer to. Methods inherited from torch do not count."""
    return frozenset(name for code in _method_codes(cls) for name in code.co_names)


def closure_variables(function: FunctionType) -> dict[str, Any]:
    """The variables that a function closes over, by name."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells))


def _method_codes(cls: type) -> Iterator[CodeType]:
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            continue
        for attribute in vars(base).values():
            function = _undecorated(attribute)
            if function is not None:
                yield function.__code__


def _undecorated(attribute: Any) -> FunctionType | None:
    """The function behind a method, through ``functools.wraps``; None if the attribute is not a method."""
    if isinstance(attribute, (staticmethod, classmethod)):
        attribute = attribute.__func__
    if callable(attribute):
        attribute = inspect.unwrap(attribute)
    return attribute if inspect.isfunction(attribute) else None
