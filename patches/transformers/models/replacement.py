"""An entry of the tables ``REPLACED``: the function that runs in place of a method of a transformers class.

A class has an entry if its method would treat this rank's tokens as the whole sequence: count them, choose keys among
them, or attend to them without the attention interface. :mod:`.registry` joins the tables and binds the functions.
"""

from __future__ import annotations

from typing import Any, Callable, Literal, NamedTuple


class Replacement(NamedTuple):
    """The function that replaces a method of a class, and what the class is.

    Attributes:
        run: Called as ``run(original, module, *args, **kwargs)``, where ``original`` is the method of the class, bound to the
            module, and the rest are the arguments of the call. Outside a region it returns what ``original`` returns.
        method: Name of the replaced method.
        role: Whether the class is an attention module, or which part of one.
        fills_cache: Whether a replaced forward of attention still stores its keys and values in the caller's cache.
    """

    run: Callable[..., Any]
    method: str = "forward"
    role: Literal["attention", "indexer", "compressor", "bias"] = "attention"
    fills_cache: bool = False
