"""Tiled MLPs: the feed-forward modules of decoder layers run on tiles of this rank's tokens.

DeepSpeed's own TiledMLP gathers a ZeRO-3 weight once for each tile: where two data-parallel ranks have sequences of other
lengths, their numbers of tiles differ and their collectives no longer match. Here a whole MLP is one *leaf* for ZeRO-3,
which gathers its weights around the module whatever happens inside.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any, Callable, Iterator

import torch
from torch import nn

from ds_cp.chunked.module import run_in_chunks
from ds_cp.patches.transformers.memory.leaf_modules import bind
from ds_cp.planner import Plan

LARGE_BYTES = 256 << 20
"""Bytes of one intermediate activation, from which on "auto" tiles."""

CHUNK_BYTES = 32 << 20
"""Of one intermediate activation of a tile."""

ATTRIBUTES = frozenset({"mlp", "feed_forward", "ffn"})
PROJECTIONS = (
    {"gate_proj", "up_proj", "down_proj"},
    {"gate_up_proj", "down_proj"},
    {"up_proj", "down_proj"},
    {"fc1", "fc2"},
    {"c_fc", "c_proj"},
    {"dense_h_to_4h", "dense_4h_to_h"},
)
"""What a plain MLP consists of; anything beside them and an activation (routers, experts, norms, dropout) excludes it."""


def attach(stack: nn.Module, plan: Plan) -> Callable[[], None]:
    """Bind the forwards of a stack's MLPs; returns what undoes it.

    Args:
        plan: ``tiled_mlp`` of it is True, False, or None for "where one activation is large". Under ``offload_kv`` layers
            already run on chunks of tokens, and an MLP that is called with no more tokens than these runs whole.
    """
    return bind(
        [] if plan.tiled_mlp is False else _mlps(stack), partial(_forward, plan.tiled_mlp is True, plan.offload_kv)
    )


def _mlps(stack: nn.Module) -> Iterator[nn.Module]:
    for name, module in stack.named_modules():
        if name.rpartition(".")[2] in ATTRIBUTES and _is_plain(module):
            yield module


def _is_plain(module: nn.Module) -> bool:
    """True for an MLP of transformers' own that treats each token alike, by itself, and draws no random numbers."""
    kind = type(module)
    if not kind.__module__.startswith("transformers.models.") or "forward" in vars(module):
        return False
    parts = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    draws = "dropout" in kind.forward.__code__.co_names or any(isinstance(m, nn.Dropout) for m in module.modules())
    return parts in PROJECTIONS and not draws and _width(module) > 0


def _width(module: nn.Module) -> int:
    """The width of the intermediate activation; read from attributes, for ZeRO-3 empties the weights."""
    return max((getattr(child, "out_features", 0) for child in module.children()), default=0)


def _forward(always: bool, few_tokens: int, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    original = MethodType(type(self).forward, self)
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or args[0].size(-2) <= few_tokens:
        return original(*args, **kwargs)
    row = _width(self) * args[0].element_size()
    if (not always and args[0].shape[:-1].numel() * row <= LARGE_BYTES) or _cannot_run_twice(self):
        return original(*args)
    return _tiled(self, original, args[0], max(1, CHUNK_BYTES // row))


def _cannot_run_twice(module: nn.Module) -> bool:
    """Whether a second run would draw other random numbers (adapters may come after attachment), or hooks on parameters
    would see each tile's gradient."""
    return _drops(module) or any(parameter._backward_hooks for parameter in module.parameters())


def _drops(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Dropout) and child.p for child in module.modules())


@torch.compiler.disable
def _tiled(module: nn.Module, run: Callable, x: torch.Tensor, rows: int) -> torch.Tensor:
    ones = (1,) * (x.dim() - 2)  # as many dims as it was called with: Moshi's takes three apart
    return run_in_chunks(module, lambda tile: run(tile.view(*ones, *tile.shape)).flatten(0, -2), x, rows)
