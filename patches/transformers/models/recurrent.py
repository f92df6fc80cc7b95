"""Recurrent layers and short convolutions, shared between ranks: which functions of transformers mix tokens, and how.

What mixes tokens in these layers is a function that the modeling file looks up by name (or a package's kernel that stands
there), or one part of the layer. Heads and channels do not mix in it, so each rank runs it on the whole sequence of its
share of them (:mod:`ds_cp.recurrent.channels`). Layers that have no such seam run whole on every rank, on all tokens.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from types import MethodType
from typing import Any, Callable, Iterable, Mapping

import torch

from ds_cp import patches
from ds_cp.agreement import BatchError
from ds_cp.patches.transformers.ambient import current_region
from ds_cp.patches.transformers.batch import PACKING_ARGUMENTS
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor
from ds_cp.patches.transformers.models.introspection import referenced_names
from ds_cp.region import Region

FUNCTIONS: dict[str, tuple[dict[str, str], str]] = {
    "causal_conv1d_fn": ({"hidden_states": "bhl", "weight": "hw", "bias": "h"}, "bhl"),
    "torch_chunk_gated_delta_rule": (
        {"query": "blgk", "key": "blgk", "value": "blhv", "g": "blh", "beta": "blh"},
        "blhv",
    ),
    "chunk_kimi_delta_attention": (
        {"query": "blhk", "key": "blhk", "value": "blhv", "g": "blhk", "beta": "blh"},
        "blhv",
    ),
    "mamba2_chunk_scan": (
        {"hidden_states": "blhd", "dt": "blh", "A": "h", "B": "blgn", "C": "blgn", "chunk_size": "", "D": "h", "dt_bias": "h"},
        "blhd",
    ),
    "mamba_selective_scan": (
        {"hidden_states": "bhl", "dt": "bhl", "A": "hn", "B": "bnl", "C": "bnl", "D": "h", "z": "bhl", "delta_bias": "h"},
        "bhl",
    ),
    "rwkv_linear_attention": ({"time_decay": "h", "time_first": "h", "key": "blh", "value": "blh"}, "blh"),
}  # fmt: skip
"""Functions of modeling files, by name: the dims of their first arguments, in order, and of their result, as
:func:`ds_cp.recurrent.channels.mix` reads them."""

FUSED = frozenset({"mamba_inner_fn", "mamba2_split_conv1d_scan_combined"})
"""Functions that are kernels of a whole layer; where they answer None the layer takes the functions above."""

PARTS: dict[str, tuple[str, dict[str, str], str]] = {
    "RwkvSelfAttention": ("time_shift", {"input": "blh"}, "blh"),
    "RwkvFeedForward": ("time_shift", {"input": "blh"}, "blh"),
    "xLSTMLayer": (
        "mlstm_backend",
        {"query": "bhlk", "key": "bhlk", "value": "bhlv", "igate": "bhl", "fgate": "bhl"},
        "bhlv",
    ),
}
"""Layers in which a module mixes tokens, by class: the module, and the dims of its arguments and its result."""

WHOLE: dict[str, int] = {
    "Inkling2DynamicShortConvolution": 1,
    "Inkling2LoopDynamicShortConvolution": 1,
    "MiniMaxLightningAttention": 1,
    "Qwen4ExpTextPLELayer": 1,
    "RecurrentGemmaRecurrentBlock": 1,
    "ZayaCCAProjection": 3,
}
"""Layers that mix tokens in the midst of their forward, by class: how many of their results are per token."""


FACTS = frozenset({*PACKING_ARGUMENTS, "cu_seqlens", "position_ids", "cache_position", "position_embeddings"})
"""Arguments that tell these functions of this rank's tokens what the region knows of all."""


def is_known(kind: type) -> bool:
    """Whether a layer class of transformers mixes tokens in ways of this file."""
    known = kind.__name__ in PARTS or kind.__name__ in WHOLE or bool(_functions(kind))
    return known and kind.__module__.startswith("transformers.")


def runs_whole(kind: type) -> bool:
    """Whether every rank runs such a layer on all tokens."""
    return kind.__name__ in WHOLE and is_known(kind)


def count_layers(stacks: Iterable[torch.nn.Module]) -> tuple[int, int]:
    """How many layers trade tokens for channels, and how many run whole."""
    kinds = [type(module) for stack in stacks for module in stack.modules() if is_known(type(module))]
    whole = sum(map(runs_whole, kinds))
    return len(kinds) - whole, whole


def attach(stack: torch.nn.Module) -> Callable[[], None]:
    """Bind what the recurrent layers of a stack need; returns what undoes it. Functions stay replaced, for other models of
    their file may need them; outside of a region they are the original ones."""
    bound = [module for module in stack.modules() if is_known(type(module))]
    for module in bound:
        for name in _functions(type(module)):
            patches.replace(
                sys.modules[type(module).__module__],
                name,
                _unfused if name in FUSED else functools.partial(_function, name),
                "mixes tokens of all ranks inside a region",
            )
        module.forward = MethodType(_layer, module)
        if type(module).__name__ in PARTS:
            part = getattr(module, PARTS[type(module).__name__][0])
            part.forward = MethodType(functools.partial(_part, type(module).__name__), part)

    def undo() -> None:
        for module in bound:
            module.__dict__.pop("forward", None)
            if type(module).__name__ in PARTS:
                getattr(module, PARTS[type(module).__name__][0]).__dict__.pop("forward", None)

    return undo


def _functions(kind: type) -> list[str]:
    return sorted(referenced_names(kind) & (FUNCTIONS.keys() | FUSED))


def _layer(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    # the class's own forward is looked up here: a deep copy of the model must run on the copy's weights
    original, region = MethodType(type(self).forward, self), _region_of(self)
    if region is None:
        return original(*args, **kwargs)
    if runs_whole(type(self)):
        return _run_whole(region, self, original, args, kwargs)
    before = _mixed_so_far(region)
    out = original(*args, **{name: None if _is_mask(name, value) else value for name, value in kwargs.items()})
    _refuse_bypassed(self, region, before)
    return out


@torch.compiler.disable
def _mixed_so_far(region: Region) -> Counter[str]:
    return region.mixed.copy()


@torch.compiler.disable
def _refuse_bypassed(layer: torch.nn.Module, region: Region, before: Counter[str]) -> None:
    """Raise where a layer went another way than through what was put in place: a version of transformers that keeps a
    function in the layer, or a kernel that somebody has bound.

    Raises:
        BatchError: names the layer and the functions.
    """
    kind = type(layer)
    wanted = set(_functions(kind)) - FUSED
    if kind.__name__ in PARTS:
        wanted.add(PARTS[kind.__name__][0])
    bypassed = sorted(wanted - (region.mixed - before).keys())
    if bypassed:
        raise BatchError(
            f"{kind.__name__} of {patches.library(kind)} did not call {', '.join(bypassed)} where ds_cp has put its own: what mixes "
            "tokens there saw this rank's shard only. Use another version of that library, leave out kernels that were bound to "
            "the layer, or take the key out for this model."
        )


def _is_mask(name: str, value: Any) -> bool:
    """Whether an argument says what is padding, which the region knows."""
    return name in ("attention_mask", "conv_mask") and isinstance(value, (torch.Tensor, MaskDescriptor))


def _run_whole(region: Region, layer: torch.nn.Module, original: Callable, args: tuple, kwargs: dict) -> Any:
    """A layer on all tokens, each document by itself; this rank's tokens of what it returns.

    All documents run at once, padded to the longest: under ZeRO-3 each call of a module is a gather of the world, so their
    number may not depend on one group's batch.
    """
    values = [None if _is_mask(name, value) else value for name, value in (*enumerate(args), *kwargs.items())]
    length, rows = region.layout.local_len, len(region.documents.ranges)
    local = [at for at, x in enumerate(values) if isinstance(x, torch.Tensor) and x.dim() > 1 and x.size(1) == length]
    whole = [region.gather(values[at]).expand(rows, *(-1,) * (values[at].dim() - 1)) for at in local]
    count, others = WHOLE[type(layer).__name__], []

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for at, x in zip(local, tensors):
            values[at] = x
        out = original(*values[: len(args)], **dict(zip(kwargs, values[len(args) :])))
        out = out if isinstance(out, tuple) else (out,)
        others[:] = out[count:]
        return out[:count]

    mine = (*map(region.shard, region.per_document_single_call.run(run, *whole)), *(None for _ in others))
    return mine if len(mine) > 1 else mine[0]


@torch.compiler.disable
def _region_of(layer: torch.nn.Module) -> Region | None:
    """The region that a layer runs in, which then counts it.

    Raises:
        BatchError: the layer is being recomputed, and nothing says in which region it ran.
    """
    region = current_region()
    if region is not None:
        region.attended.setdefault(id(layer), len(region.attended))
    elif torch._C._current_graph_task_id() != -1:
        raise BatchError(
            f"{type(layer).__name__} is recomputed in the backward pass by a checkpoint that is not the model's own, and nothing "
            "tells it which sequence it belongs to: it would start from nothing at its own shard. Use the model's gradient "
            "checkpointing (gradient_checkpointing_enable) instead of torch.utils.checkpoint around its layers."
        )
    return region


def _function(name: str, original: Callable) -> Callable:
    """A function of a modeling file, that shares its sequence inside a region."""
    dims, out_dims = FUNCTIONS[name]

    @torch.compiler.disable
    @functools.wraps(original)
    def shared(*args: Any, **kwargs: Any) -> Any:
        region = current_region()
        if region is None:
            return original(*args, **kwargs)
        return _mixed(region, name, original, dims, out_dims, args, kwargs)

    return shared


def _unfused(original: Callable) -> Callable:
    @torch.compiler.disable
    @functools.wraps(original)
    def unless_shared(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if current_region() is None else None

    return unless_shared


@torch.compiler.disable
def _part(owner: str, self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module of a layer, that shares its sequence inside a region."""
    original, region = MethodType(type(self).forward, self), current_region()
    if region is None:
        return original(*args, **kwargs)
    name, dims, out_dims = PARTS[owner]
    return _mixed(region, name, original, dims, out_dims, args, kwargs)


def _mixed(
    region: Region,
    name: str,
    original: Callable,
    dims: Mapping[str, str],
    out_dims: str,
    args: tuple,
    kwargs: dict,
) -> Any:
    names, rest = [*dims], []

    def run(**arguments: Any) -> torch.Tensor:
        out = original(*(arguments.pop(name) for name in names[: len(args)]), *args[len(names) :], **arguments)
        if isinstance(out, tuple):
            out, *rest[:] = out
        return out

    run.__name__ = getattr(original, "__name__", type(original).__name__)
    arguments = dict(zip(names, args)) | {name: value for name, value in kwargs.items() if name not in FACTS}
    region.mixed[name] += 1
    out = region.mix(run, arguments, dims, out_dims)
    return (out, *(None for _ in rest)) if rest else out  # states of a part of the heads are of no use to anyone
