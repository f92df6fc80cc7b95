"""Private functions of other packages, bound by the names of their arguments.

The packages add, rename and reorder arguments between versions. A kernel offers every spelling that it knows with its
value; the function's own signature decides which are passed. What the signature asks and nobody offers, or what the
kernel cannot do without and the signature lacks, is an error when the kernel is made, not a wrong number later.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Iterable


class UnknownVersion(RuntimeError):
    """An installed package whose functions this kernel does not know."""


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, or of the function behind a torch custom operator."""
    return dict(inspect.signature(getattr(function, "_init_fn", function)).parameters)


def bind(function: Callable[..., Any], offers: Iterable[str], needs: Iterable[str]) -> Callable[..., Any]:
    """A function of keyword arguments that passes on what ``function`` takes.

    Args:
        function: of the foreign package.
        offers: every name that calls will bring.
        needs: names that must be passed on; ``"a|b"`` if one of two spellings will do.

    Raises:
        UnknownVersion: names the function and the arguments.
    """
    known, offers = parameters(function), set(offers)
    name = getattr(getattr(function, "_init_fn", function), "__name__", repr(function))
    asked = [p for p, value in known.items() if value.default is inspect.Parameter.empty and p not in offers]
    missing = [need for need in needs if not any(spelling in known for spelling in need.split("|"))]
    if asked or missing:
        what = [f"asks for {', '.join(asked)}"] * bool(asked) + [f"lacks {', '.join(missing)}"] * bool(missing)
        raise UnknownVersion(f"{name} of the installed package {' and '.join(what)}, which ds_cp does not know")
    passed = [p for p in known if p in offers]
    return lambda **values: function(**{p: values[p] for p in passed})
