"""Decoder layers, run on chunks of this rank's tokens with K and V in host memory ("offload_kv").

A layer of transformers acts on each token by itself, apart from its call of the attention interface; sequence sharding
between ranks relies on the same fact. A forward that runs the layer chunk by chunk (:mod:`ds_cp.chunked.layer`) is bound inside
the module's call, and the layer is a ZeRO-3 leaf: its weights are gathered once per call, whatever the number of chunks.
The layer also acts as its own checkpoint, since it saves no more than its input and the output of its attention.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Iterator, Mapping

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import _active_collector

from ds_cp.agreement import BatchError
from ds_cp.attention.saved_attention import SavedAttention
from ds_cp.chunked.layer import LayerChunk, run_layer_in_chunks
from ds_cp.config import KEY, ConfigError
from ds_cp.patches.transformers import prefill
from ds_cp.patches.transformers.batch import describe
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor, map_masks
from ds_cp.patches.transformers.memory import offload_activations
from ds_cp.patches.transformers.memory.leaf_modules import bind_leaves
from ds_cp.patches.transformers.models import layer_kinds, recurrent_tables, registry
from ds_cp.planner import Plan
from ds_cp.region import LayerCall

TOKEN_DIM = {"position_embeddings": -2, "position_ids": -1, "cache_position": -1, "attention_scaling": -2}
"""The dim of tokens in arguments of a layer other than its hidden states [B, L, H]."""

CACHES = (*prefill.CACHE_NAMES, "layer_past")
UNKNOWN = (
    f'and "{KEY}.offload_kv" does not know which part of it belongs to which token: each chunk would get all of it. Take the '
    "key out for this model."
)


def check(stacks: Mapping[PreTrainedModel, Any]) -> None:
    """Check that the layers of a model can run in chunks.

    Raises:
        ConfigError: Names the reasons if they cannot.
    """
    problems = ["it has two stacks, and cross attention reads a second sequence"] if len(stacks) > 1 else []
    for stack in stacks:
        problems += _problems(stack)
    if problems:
        raise ConfigError(
            f'"{KEY}.offload_kv" runs each layer on a few tokens at a time, but {type(next(iter(stacks))).__name__} cannot: '
            f"{'; '.join(problems)}. Without a refusal its layers would see other tokens than you meant. Take the key out. "
            "Nothing was started."
        )


def _problems(stack: PreTrainedModel) -> Iterator[str]:
    if next(_layers(stack), None) is None:
        replaced = [name for name, part in stack.named_modules() if registry.replacement_of(type(part)) is not None]
        if replaced:
            yield f"attention counts tokens by itself in {layer_kinds.abbreviate(replaced)}"
        else:
            yield "no layer of it only attends"


def attach(stack: PreTrainedModel, plan: Plan) -> Callable[[], None]:
    """Bind a forward that runs in chunks to a stack's layers; returns what undoes it."""
    return bind_leaves(_layers(stack), partial(_forward, plan))


def runs_all_layers(stack: torch.nn.Module) -> bool:
    """Whether all layers of a stack run in chunks, so that none needs gradient checkpointing to save its input only."""
    return len([*_layers(stack)]) == len([*_outermost_layers(stack)])


def _layers(stack: torch.nn.Module) -> Iterator[GradientCheckpointingLayer]:
    """Outermost layers in which only the attention interface mixes tokens."""
    for layer in _outermost_layers(stack):
        if (
            "forward" not in vars(layer)
            and layer_kinds.uses_interface(layer)
            and not any(_mixes_tokens_otherwise(type(part)) for part in layer.modules())
        ):
            yield layer


def _outermost_layers(stack: torch.nn.Module) -> Iterator[GradientCheckpointingLayer]:
    inside: set[torch.nn.Module] = set()
    for module in stack.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            inside.update(module.modules())
            yield module


def _mixes_tokens_otherwise(cls: type) -> bool:
    return registry.replacement_of(cls) is not None or recurrent_tables.is_known(cls)


@torch.compiler.disable
def _forward(plan: Plan, self: GradientCheckpointingLayer, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer: in chunks inside a region, on all tokens where a cache is filled or there is no region."""
    checkpointed: Any = type(self).forward
    # without the checkpoint, which transformers 5.19 puts around __call__ instead
    plain = getattr(checkpointed, "__wrapped__", checkpointed)
    hidden_states, others = _arguments(inspect.signature(plain).bind(self, *args, **kwargs))
    # the mask says whether the layer runs in a region, also when it is recomputed
    mask = next((value for value in others.values() if isinstance(value, MaskDescriptor)), None)
    if mask is None or any(others.get(name) is not None for name in CACHES):
        return checkpointed(self, *args, **kwargs)
    _refuse_observers(self)
    region = mask.region
    slicers = {name: _slicer(self, name, value, hidden_states.size(1)) for name, value in others.items()}
    other_results: list[Any] = []
    returns_tuple = False

    def run(x: torch.Tensor, chunk: LayerChunk, saved: SavedAttention | None) -> torch.Tensor:
        nonlocal returns_tuple
        call, tokens = LayerCall(region, saved, chunk), slice(*chunk.tokens)
        arguments = {name: slice_tokens(tokens) for name, slice_tokens in slicers.items()}
        output = plain(self, x, **map_masks(arguments, lambda mask: replace(mask, call=call)))
        returns_tuple = isinstance(output, tuple)
        if returns_tuple:
            output, *other_results[:] = output
        hidden: torch.Tensor = output
        return hidden

    saved = None
    if not plan.recompute_attention:
        to_host = (offload_activations.to_host, offload_activations.from_host) if plan.offload_activations else ()
        saved = SavedAttention(*to_host)
    out = run_layer_in_chunks(self, run, hidden_states, plan.offload_kv, saved)
    if not returns_tuple:
        return out
    if any(value is not None for value in other_results):
        raise BatchError(f"{type(self).__name__} returns more than hidden states, {UNKNOWN}")
    return out, *other_results


def _arguments(bound: inspect.BoundArguments) -> tuple[torch.Tensor, dict[str, Any]]:
    """The hidden states of a layer's call, and its other arguments by name."""
    by_name = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            by_name.update(by_name.pop(name, {}))
    _, (_, hidden_states), *others = by_name.items()
    return hidden_states, dict(others)


def _slicer(layer: torch.nn.Module, name: str, value: Any, length: int) -> Callable[[slice], Any]:
    """A function that returns the part of an argument that belongs to some tokens.

    Raises:
        BatchError: It is not known which part of the argument belongs to which token.
    """
    if isinstance(value, (tuple, list)) and name in TOKEN_DIM:
        slicers = [_slicer(layer, name, each, length) for each in value]
        return lambda tokens: type(value)(slice_tokens(tokens) for slice_tokens in slicers)
    if isinstance(value, torch.Tensor) and name in TOKEN_DIM and not value.requires_grad:
        dim = TOKEN_DIM[name] % value.dim()
        if value.size(dim) == length:
            return lambda tokens: value[(slice(None),) * dim + (tokens,)]
    if value is None or isinstance(value, (bool, int, float, str, MaskDescriptor)):
        return lambda tokens: value
    raise BatchError(f"{type(layer).__name__} gets {name}, {describe(value)}, {UNKNOWN}")


def _refuse_observers(layer: torch.nn.Module) -> None:
    """Refuse recorded outputs and hooks on parameters, which would see each chunk, and each of them twice.

    Raises:
        BatchError: Names the outputs, or the layer.
    """
    recorded = set(_active_collector.get() or ()) - {"hidden_states"}
    if recorded:
        raise BatchError(
            f'{", ".join(sorted(recorded))} of each layer was asked for, but "{KEY}.offload_kv" runs a layer chunk by chunk: what '
            "is recorded would be parts, without gradients. Do not ask for it (output_router_logits=False), or take the key out."
        )
    if any(parameter._backward_hooks for parameter in layer.parameters()):
        raise BatchError(
            f'a parameter of {type(layer).__name__} has a hook, which would see the gradient of each chunk under "{KEY}.offload_kv". '
            "Remove the hook, or take the key out."
        )
