"""Gradient checkpointing: a recomputed layer runs in the region of its forward pass, and its attention is not computed again.

The layers of transformers call their attribute ``_gradient_checkpointing_func``, which the model, Trainer or the user has set.
Before each forward pass of a stack, a wrapper replaces it in all layers. The wrapper runs the layer with a record of the
region and with a place to save its attention (:mod:`ds_cp.attention.saved_attention`). A checkpoint around anything else
recomputes all of it, attention included; recurrent layers, which get no mask that names their region, refuse it.
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

MakeSaved = Callable[[], SavedAttention | None]
"""Makes the place where one run of a layer saves its attention; None to compute attention again."""


def attach(stack: torch.nn.Module, saves_attention: bool, offloads: bool) -> Callable[[], None]:
    """Wrap the checkpoint functions of a stack before each of its forward passes; returns what undoes it.

    Args:
        stack: A decoder or encoder.
        saves_attention: Whether the attention of checkpointed layers is saved instead of computed again.
        offloads: Whether saved attention goes to host memory, as the layers' inputs do.
    """
    make_saved: MakeSaved
    if not saves_attention:
        make_saved = _no_saved_attention
    elif offloads:
        make_saved = partial(SavedAttention, offload_activations.to_host, offload_activations.from_host)
    else:
        make_saved = SavedAttention
    handle = stack.register_forward_pre_hook(partial(_wrap_checkpoint_functions, make_saved))
    stack_ref = weakref.ref(stack)

    def undo() -> None:
        handle.remove()
        for module in _checkpointed_modules(stack_ref()):
            function = module.__dict__[ATTRIBUTE]
            if _is_wrapper(function):
                setattr(module, ATTRIBUTE, function.args[0])

    return undo


@torch.compiler.disable
def _wrap_checkpoint_functions(make_saved: MakeSaved, stack: torch.nn.Module, args: tuple[Any, ...]) -> None:
    # uses the stack of the call: the hook of a deep copy must wrap the layers of the copy
    if stack.training and torch.is_grad_enabled():
        for module in _checkpointed_modules(stack):
            function = module.__dict__[ATTRIBUTE]
            if not _is_wrapped(function):
                setattr(module, ATTRIBUTE, partial(_checkpoint, function, make_saved))


def _checkpointed_modules(stack: torch.nn.Module | None) -> list[torch.nn.Module]:
    return [] if stack is None else [module for module in stack.modules() if ATTRIBUTE in module.__dict__]


def _is_wrapper(function: Any) -> bool:
    return isinstance(function, partial) and function.func is _checkpoint


def _is_wrapped(function: Any) -> bool:
    """Whether a function calls the wrapper, through any number of partials."""
    if not isinstance(function, partial):
        return False
    return _is_wrapper(function) or any(_is_wrapped(inner) for inner in (function.func, *function.args))


def _checkpoint(
    checkpoint: Callable[..., Any], make_saved: MakeSaved, layer: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The wrapper: call a checkpoint function with a layer that knows its region. Saved attention lives as long as the checkpoint
    refers to that layer."""
    region = current_region()
    return checkpoint(partial(_run, make_saved(), region, layer) if region else layer, *args, **kwargs)


def _run(saved: SavedAttention | None, region: Region, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer in its region, in the forward pass or again in the backward pass."""
    if saved is None:
        with running_layer(layer, region):
            return layer(*args, **kwargs)
    run, args, kwargs = _with_saved_attention(saved, layer, args, kwargs)
    with saved.run(), running_layer(layer, region):
        return run(*args, **kwargs)


def _with_saved_attention(
    saved: SavedAttention, layer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A layer and its arguments, with masks whose calls save attention in ``saved``.

    transformers binds keyword arguments to the layer with ``functools.partial``.
    """

    def save_there(mask: MaskDescriptor) -> MaskDescriptor:
        return replace(mask, call=replace(mask.call, saved=saved))

    if isinstance(layer, partial):
        args_of_layer, kwargs_of_layer = map_masks((layer.args, layer.keywords), save_there)
        layer = partial(layer.func, *args_of_layer, **kwargs_of_layer)
    return layer, *map_masks((args, kwargs), save_there)


def _no_saved_attention() -> None:
    return None
