"""Gradient checkpointing: layers are recomputed in the backward pass, in the region of their forward; their attention is
not.

Every layer of transformers is checkpointed by its attribute ``_gradient_checkpointing_func``, whoever sets it and when:
the model, Trainer, or the user with another kind of checkpointing. Before each forward what stands there is wrapped, so
that each run of a layer knows its region, and has something to keep its attention in (:mod:`ds_cp.attention.saved_attention`). A
checkpoint around anything else recomputes all of it, as ever, and layers that get no mask, recurrent ones, refuse it.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any, Callable

import torch

from ds_cp.attention.saved_attention import SavedAttention
from ds_cp.patches.transformers.ambient import current_region, running_layer
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor, map_masks
from ds_cp.patches.transformers.memory import offload_activations
from ds_cp.region import Region

ATTRIBUTE = "_gradient_checkpointing_func"


def attach(stack: torch.nn.Module, keeps: bool, offloads: bool) -> Callable[[], None]:
    """Tell a stack's checkpointed layers where they run; returns what undoes it.

    Args:
        stack: a decoder or encoder.
        keeps: whether their attention is kept.
        offloads: whether it waits in host memory, as the layers' inputs then do.
    """
    make = (
        (
            partial(SavedAttention, offload_activations.to_host, offload_activations.from_host)
            if offloads
            else SavedAttention
        )
        if keeps
        else _nothing_kept
    )
    handle, alive = stack.register_forward_pre_hook(partial(_before_stack, make)), weakref.ref(stack)

    def undo() -> None:
        handle.remove()
        for module in _checkpointed(alive()):
            function = module.__dict__[ATTRIBUTE]
            if _is_ours(function):
                setattr(module, ATTRIBUTE, function.args[0])

    return undo


@torch.compiler.disable
def _before_stack(make: Callable, stack: torch.nn.Module, args: tuple) -> None:
    # bound to no model: a deep copy's hook wraps the copy's layers
    if stack.training and torch.is_grad_enabled():
        for module in _checkpointed(stack):
            function = module.__dict__[ATTRIBUTE]
            if not _is_wrapped(function):
                setattr(module, ATTRIBUTE, partial(_checkpoint, function, make))


def _checkpointed(stack: torch.nn.Module | None) -> list[torch.nn.Module]:
    return [] if stack is None else [module for module in stack.modules() if ATTRIBUTE in module.__dict__]


def _is_ours(function: Any) -> bool:
    return isinstance(function, partial) and function.func is _checkpoint


def _is_wrapped(function: Any) -> bool:
    """Whether ours is among what a function calls, through any number of partials."""
    if not isinstance(function, partial):
        return False
    return _is_ours(function) or any(_is_wrapped(inner) for inner in (function.func, *function.args))


def _checkpoint(checkpoint: Callable, make: Callable, layer: Callable, *args: Any, **kwargs: Any) -> Any:
    """One run of a layer under a checkpoint function. What it keeps lives as long as the checkpoint holds the layer."""
    region = current_region()
    return checkpoint(partial(_run, make(), region, layer) if region else layer, *args, **kwargs)


def _run(saved: SavedAttention | None, region: Region, layer: Callable, *args: Any, **kwargs: Any) -> Any:
    if saved is None:
        with running_layer(layer, region):
            return layer(*args, **kwargs)
    run, args, kwargs = _with_saved(saved, layer, args, kwargs)
    with saved.run(), running_layer(layer, region):
        return run(*args, **kwargs)


def _with_saved(saved: SavedAttention, layer: Callable, args: tuple, kwargs: dict) -> tuple[Callable, tuple, dict]:
    """A layer and its arguments, whose masks lead attention to ``saved``; transformers binds keywords to the layer."""

    def lead(mask: MaskDescriptor) -> MaskDescriptor:
        return replace(mask, call=replace(mask.call, saved=saved))

    if isinstance(layer, partial):
        bound = map_masks((layer.args, layer.keywords), lead)
        layer = partial(layer.func, *bound[0], **bound[1])
    return layer, *map_masks((args, kwargs), lead)


def _nothing_kept() -> None:
    """Instead of :class:`SavedAttention`, where attention runs again."""
