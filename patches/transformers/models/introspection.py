"""What functions and the methods of a class refer to: how a layer's kind, or a mask's, is told without running it."""

from __future__ import annotations

import inspect
from functools import cache
from types import CodeType, FunctionType
from typing import Any, Iterator


@cache
def referenced_names(kind: type) -> frozenset[str]:
    """Functions and attributes that a class's methods name, without those of torch's classes."""
    return frozenset(name for code in _codes(kind) for name in code.co_names)


def closure_variables(function: FunctionType) -> dict[str, Any]:
    """What a function closes over, by name."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells))


def _codes(kind: type) -> Iterator[CodeType]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            continue
        for value in vars(base).values():
            function = _function(value)
            if function is not None:
                yield function.__code__


def _function(value: Any) -> Any:
    value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    value = inspect.unwrap(value) if callable(value) else value
    return value if inspect.isfunction(value) else None
