"""What runs in the place of a class's method, where that would count, choose or attend on a shard: the row of one table."""

from __future__ import annotations

from typing import Callable, NamedTuple


class Replacement(NamedTuple):
    """What is known of a class of transformers.

    Attributes:
        run: gets the original method, the module, and what the method is called with.
        method: the one in whose place it runs.
        role: what the class is: "attention", or the part of one that is an "indexer", a "compressor" or a "bias".
        fills_cache: whether a forward of attention hands its keys to a cache, as the original does.
    """

    run: Callable
    method: str = "forward"
    role: str = "attention"
    fills_cache: bool = False
