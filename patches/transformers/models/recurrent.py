"""Recurrent layers and short convolutions inside a region: Mamba, gated delta nets, RWKV, xLSTM, RG-LRU and others.

A recurrence mixes tokens, but not heads or channels. So an all-to-all over the context-parallel group exchanges tokens for
heads or channels, each rank runs the model's function on the whole sequence for its part of them
(:mod:`ds_cp.recurrent.channels`), and a second all-to-all returns the result to the owners of the tokens. :func:`attach` wraps
the functions and submodules that mix tokens. A layer without such a function or submodule runs on all tokens on every rank.
:mod:`.recurrent_tables` says which class is which.
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
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor
from ds_cp.patches.transformers.models.recurrent_tables import (
    FUNCTIONS,
    FUSED_KERNELS,
    REPLICATED_LAYERS,
    SHARD_ARGUMENTS,
    SUBMODULES,
    functions_of,
    is_known,
    is_replicated,
)
from ds_cp.patches.transformers.models.region_mask import in_backward_pass
from ds_cp.region import Region


def count_layers(stacks: Iterable[torch.nn.Module]) -> tuple[int, int]:
    """The number of layers that exchange tokens for channels, and of those that run on all tokens on every rank."""
    classes = [type(module) for stack in stacks for module in stack.modules() if is_known(type(module))]
    replicated = sum(map(is_replicated, classes))
    return len(classes) - replicated, replicated


def attach(stack: torch.nn.Module) -> Callable[[], None]:
    """Wrap what mixes tokens in the recurrent layers of a stack; returns what undoes it.

    Functions of modeling files stay wrapped, since other models may use them. Outside of a region they behave as before.
    """
    layers = [module for module in stack.modules() if is_known(type(module))]
    for layer in layers:
        for name in functions_of(type(layer)):
            patches.replace(
                sys.modules[type(layer).__module__],
                name,
                _returns_none_inside_region if name in FUSED_KERNELS else functools.partial(_share_function, name),
                "mixes tokens of all ranks inside a region",
            )
        layer.forward = MethodType(_layer_forward, layer)
        submodule = _mixing_submodule(layer)
        if submodule is not None:
            submodule.forward = MethodType(functools.partial(_submodule_forward, type(layer).__name__), submodule)

    def undo() -> None:
        for layer in layers:
            layer.__dict__.pop("forward", None)
            submodule = _mixing_submodule(layer)
            if submodule is not None:
                submodule.__dict__.pop("forward", None)

    return undo


def _mixing_submodule(layer: torch.nn.Module) -> torch.nn.Module | None:
    known = SUBMODULES.get(type(layer).__name__)
    return None if known is None else layer.get_submodule(known[0])


# ---- layers ---------------------------------------------------------------------------------------------------


def _layer_forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    # the class's forward is looked up at the call: in a deep copy of the model it must use the copy's weights
    original, region = MethodType(type(self).forward, self), _region_of(self)
    if region is None:
        return original(*args, **kwargs)
    if is_replicated(type(self)):
        return _run_on_all_tokens(region, self, original, args, kwargs)
    before = _calls_so_far(region)
    out = original(*args, **{name: None if _is_mask(name, value) else value for name, value in kwargs.items()})
    _check_calls(self, region, before)
    return out


@torch.compiler.disable
def _region_of(layer: torch.nn.Module) -> Region | None:
    """The region that a layer runs in; None outside of one. Counts the layer among those that ran in the region.

    Raises:
        BatchError: The layer is being recomputed outside of its region, by a checkpoint that is not the model's own.
    """
    region = current_region()
    if region is not None:
        region.attended.setdefault(id(layer), len(region.attended))
    elif in_backward_pass():
        raise BatchError(
            f"{type(layer).__name__} is recomputed in the backward pass by a checkpoint that is not the model's own, so that it has "
            "no access to the shared sequence: it would start from an empty state at its own shard. Use the model's gradient "
            "checkpointing (gradient_checkpointing_enable) instead of torch.utils.checkpoint around its layers."
        )
    return region


@torch.compiler.disable
def _calls_so_far(region: Region) -> Counter[str]:
    return region.recurrent_calls.copy()


@torch.compiler.disable
def _check_calls(layer: torch.nn.Module, region: Region, before: Counter[str]) -> None:
    """Check that a layer called everything that is wrapped for it.

    It does not if its version of transformers keeps a function in the layer, or if somebody has bound a kernel to it.

    Raises:
        BatchError: Names the layer and the functions.
    """
    cls = type(layer)
    expected = set(functions_of(cls)) - FUSED_KERNELS
    if cls.__name__ in SUBMODULES:
        expected.add(SUBMODULES[cls.__name__][0])
    bypassed = sorted(expected - (region.recurrent_calls - before).keys())
    if bypassed:
        raise BatchError(
            f"{cls.__name__} of {patches.library(cls)} did not call {', '.join(bypassed)} where ds_cp has put its own: what mixes "
            "tokens there saw this rank's shard only. Use another version of that library, leave out kernels that were bound to "
            "the layer, or take the key out for this model."
        )


def _is_mask(name: str, value: Any) -> bool:
    """Whether an argument is a padding mask of this rank's tokens; the region knows the padding of all tokens."""
    return name in ("attention_mask", "conv_mask") and isinstance(value, (torch.Tensor, MaskDescriptor))


def _run_on_all_tokens(
    region: Region,
    layer: torch.nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a layer on all tokens, each document by itself; returns this rank's tokens of its results.

    All documents run in one call, padded to the longest. Under ZeRO-3 each call of a module is a collective of all ranks, so
    the number of calls must not depend on the batch of one group.
    """
    values = [*args, *(None if _is_mask(name, value) else value for name, value in kwargs.items())]
    length, rows = region.layout.local_len, len(region.documents.ranges)
    per_token = [i for i, x in enumerate(values) if isinstance(x, torch.Tensor) and x.dim() > 1 and x.size(1) == length]
    gathered = [region.gather(values[i]).expand(rows, *(-1,) * (values[i].dim() - 1)) for i in per_token]
    results = REPLICATED_LAYERS[type(layer).__name__]
    other_results: list[Any] = []

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for i, x in zip(per_token, tensors):
            values[i] = x
        out = original(*values[: len(args)], **dict(zip(kwargs, values[len(args) :])))
        out = out if isinstance(out, tuple) else (out,)
        other_results[:] = out[results:]
        return out[:results]

    out = region.per_document_single_call.run(run, *gathered)
    local = (*map(region.shard, out), *(None for _ in other_results))
    return local if len(local) > 1 else local[0]


# ---- functions and submodules that mix tokens -----------------------------------------------------------------


def _share_function(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that mixes tokens, so that it runs on the whole sequence inside a region."""
    dims, out_dims = FUNCTIONS[name]

    @torch.compiler.disable
    @functools.wraps(original)
    def shared(*args: Any, **kwargs: Any) -> Any:
        region = current_region()
        if region is None:
            return original(*args, **kwargs)
        return _mix(region, name, original, dims, out_dims, args, kwargs)

    return shared


def _returns_none_inside_region(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a fused kernel. None makes the layer call the functions that the kernel fuses."""

    @torch.compiler.disable
    @functools.wraps(original)
    def unless_shared(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if current_region() is None else None

    return unless_shared


@torch.compiler.disable
def _submodule_forward(layer_class: str, self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    original, region = MethodType(type(self).forward, self), current_region()
    if region is None:
        return original(*args, **kwargs)
    name, dims, out_dims = SUBMODULES[layer_class]
    return _mix(region, name, original, dims, out_dims, args, kwargs)


def _mix(
    region: Region,
    name: str,
    original: Callable[..., Any],
    dims: Mapping[str, str],
    out_dims: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a function that mixes tokens on the whole sequence, for this rank's part of the heads or channels."""
    names = [*dims]
    other_results: list[Any] = []

    def run(**arguments: Any) -> torch.Tensor:
        out = original(*(arguments.pop(name) for name in names[: len(args)]), *args[len(names) :], **arguments)
        if isinstance(out, tuple):
            out, *other_results[:] = out
        result: torch.Tensor = out
        return result

    run.__name__ = getattr(original, "__name__", type(original).__name__)  # for the messages of mix
    arguments = dict(zip(names, args)) | {name: value for name, value in kwargs.items() if name not in SHARD_ARGUMENTS}
    region.recurrent_calls[name] += 1
    out = region.mix(run, arguments, dims, out_dims)
    # the other results are final states, of this rank's heads only: no caller can use them
    return (out, *(None for _ in other_results)) if other_results else out
