"""Decoder layers in tiles of this rank's tokens, with K and V in host memory ("offload_kv").

A layer of transformers does what it does token by token, but for the one call of the attention interface; sharing it
between ranks relies on that already. Here its ``forward`` is bound, inside of the module's call, so that ZeRO-3 gathers a
layer (a *leaf*) once whatever the number of tiles. It checkpoints itself.
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
from ds_cp.patches.transformers.memory.leaf_modules import bind
from ds_cp.patches.transformers.models import layer_kinds, recurrent_tables, registry
from ds_cp.planner import Plan
from ds_cp.region import LayerCall

TOKEN_DIM = {"position_embeddings": -2, "position_ids": -1, "cache_position": -1, "attention_scaling": -2}
"""Where the tokens are in what a layer gets beside its hidden states [B, L, H]."""

CACHES = (*prefill.CACHE_NAMES, "layer_past")
UNKNOWN = (
    f'and "{KEY}.offload_kv" does not know which part of it belongs to which token: each tile would get all of it. Take the '
    "key out for this model."
)


def check(stacks: Mapping[PreTrainedModel, Any]) -> None:
    """Raise where a model's layers cannot run in tiles.

    Raises:
        ConfigError: names what stands against it.
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
        own = [name for name, module in stack.named_modules() if registry.replacement_of(type(module)) is not None]
        yield (
            f"attention counts tokens by itself in {layer_kinds.abbreviate(own)}"
            if own
            else "no layer of it only attends"
        )


def attach(stack: PreTrainedModel, plan: Plan) -> Callable[[], None]:
    """Bind the forwards of a stack's layers; returns what undoes it."""
    return bind(_layers(stack), partial(_forward, plan))


def _layers(stack: torch.nn.Module) -> Iterator[GradientCheckpointingLayer]:
    """Outermost layers in which nothing but the attention interface mixes tokens."""
    for module in _outermost(stack):
        if (
            "forward" not in vars(module)
            and layer_kinds.uses_interface(module)
            and not any(_mixes_by_itself(type(part)) for part in module.modules())
        ):
            yield module


def _outermost(stack: torch.nn.Module) -> Iterator[GradientCheckpointingLayer]:
    seen: set[torch.nn.Module] = set()
    for module in stack.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in seen:
            seen.update(module.modules())
            yield module


def _mixes_by_itself(kind: type) -> bool:
    return registry.replacement_of(kind) is not None or recurrent_tables.is_known(kind)


def all_in_chunks(stack: torch.nn.Module) -> bool:
    """Whether no layer needs gradient checkpointing to keep its input only."""
    return len([*_layers(stack)]) == len([*_outermost(stack)])


@torch.compiler.disable
def _forward(plan: Plan, self: GradientCheckpointingLayer, *args: Any, **kwargs: Any) -> Any:
    """A layer's forward: in tiles where its sequence is shared, whole where a cache is filled."""
    checkpointed = type(self).forward
    plain = checkpointed.__wrapped__  # without the checkpoint: what runs in tiles keeps its input only
    x, others = _arguments(inspect.signature(plain).bind(self, *args, **kwargs))
    # the mask tells, not what runs: it travels with a recomputation, too
    mask = next((value for value in others.values() if isinstance(value, MaskDescriptor)), None)
    if mask is None or any(others.get(name) is not None for name in CACHES):
        return checkpointed(self, *args, **kwargs)
    _refuse_watchers(self)
    parts = {name: _cutter(self, name, value, x.size(1)) for name, value in others.items()}
    rest: list[Any] = []

    def run(part: torch.Tensor, chunk: LayerChunk, saved: SavedAttention | None) -> torch.Tensor:
        call, tokens = LayerCall(mask.region, saved, chunk), slice(*chunk.tokens)
        arguments = {name: cut(tokens) for name, cut in parts.items()}
        output = plain(self, part, **map_masks(arguments, lambda mask: replace(mask, call=call)))
        rest[:] = output[1:] if isinstance(output, tuple) else [...]
        return output[0] if isinstance(output, tuple) else output

    waits = (offload_activations.to_host, offload_activations.from_host) if plan.offload_activations else ()
    saved = None if plan.recompute_attention else SavedAttention(*waits)
    out = run_layer_in_chunks(self, run, x, plan.offload_kv, saved)
    if rest == [...]:
        return out
    if any(value is not None for value in rest):
        raise BatchError(f"{type(self).__name__} returns more than hidden states, {UNKNOWN}")
    return out, *rest


def _arguments(bound: inspect.BoundArguments) -> tuple[torch.Tensor, dict[str, Any]]:
    """The hidden states of a layer's call, and all else by name."""
    given = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    _, x, *others = given.items()
    return x[1], dict(others)


def _cutter(layer: torch.nn.Module, name: str, value: Any, length: int) -> Callable[[slice], Any]:
    """What gives some tokens' part of an argument."""
    if isinstance(value, (tuple, list)) and name in TOKEN_DIM:
        cutters = [_cutter(layer, name, each, length) for each in value]
        return lambda tokens: type(value)(cut(tokens) for cut in cutters)
    if isinstance(value, torch.Tensor) and name in TOKEN_DIM and not value.requires_grad:
        dim = TOKEN_DIM[name] % value.dim()
        if value.size(dim) == length:
            return lambda tokens: value[(slice(None),) * dim + (tokens,)]
    if value is None or isinstance(value, (bool, int, float, str, MaskDescriptor)):
        return lambda tokens: value
    raise BatchError(f"{type(layer).__name__} gets {name}, {describe(value)}, {UNKNOWN}")


def _refuse_watchers(layer: torch.nn.Module) -> None:
    """What looks into a layer would see each tile, and in both runs."""
    recorded = set(_active_collector.get() or ()) - {"hidden_states"}
    if recorded:
        raise BatchError(
            f'{", ".join(sorted(recorded))} of each layer was asked for, but "{KEY}.offload_kv" runs a layer tile by tile: what '
            "is recorded would be parts, without gradients. Do not ask for it (output_router_logits=False), or take the key out."
        )
    if any(parameter._backward_hooks for parameter in layer.parameters()):
        raise BatchError(
            f'a parameter of {type(layer).__name__} has a hook, which would see the gradient of each tile under "{KEY}.offload_kv". '
            "Remove the hook, or take the key out."
        )
