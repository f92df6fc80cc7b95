"""Positions that a model counts by itself, from the tokens that it sees: inside a region it sees a shard.

BART and its like count from 0 in their position embedding, RoBERTa and its like count what is no padding, OPT counts the
attention mask. Here the same is counted on the whole batch and the module gets its shard of the result. A module that
cannot be told positions runs on the whole batch instead, and its output is cut.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any, Callable, Mapping

import torch

from ds_cp.patches.transformers import batch as batches
from ds_cp.patches.transformers.ambient import current_region
from ds_cp.region import Region

EMBEDDING = re.compile("Position(al)?Embedding")
CACHE_LENGTH = frozenset({"cache_length", "past_key_values_length"})
"""How such a module calls the number of tokens before those that it sees, since transformers 5.24 and before."""

BY_PADDING = "create_position_ids_from_input_ids"
"""What RoBERTa and its like call their count of tokens that are no padding."""

Given = Mapping[str, Any]


def attach(decoder: torch.nn.Module) -> Callable[[], None]:
    """Hook every module of a decoder that counts positions; returns what undoes it."""
    calls: list[Given] = []  # what the decoders that are running were given, whole
    handles = []
    for module in decoder.modules():
        kind = _kind(module)
        if kind is not None:
            handles += kind(module, calls)
    if handles:
        signature = inspect.signature(decoder.forward)

        def remember(_: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            calls.append(batches.arguments_by_name(signature, args, kwargs))

        def forget(*_: Any) -> None:
            calls.pop()

        # before the border's hook, which hands on this rank's tokens only
        handles.append(decoder.register_forward_pre_hook(remember, with_kwargs=True, prepend=True))
        handles.append(decoder.register_forward_hook(forget, always_call=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _kind(module: torch.nn.Module) -> Callable | None:
    """How a module that counts positions by itself is told them; None for all others."""
    kind = type(module)
    if not kind.__module__.startswith("transformers."):
        return None
    names = [*inspect.signature(kind.forward).parameters][1:]
    if _by_padding(module) is not None and {"input_ids", "position_ids"} <= {*names}:
        return _tell_unless_given
    if EMBEDDING.search(kind.__name__) and not CACHE_LENGTH.isdisjoint(names):
        return _tell if "position_ids" in names[1:] else _run_whole
    return None


def _tell_unless_given(module: torch.nn.Module, calls: list[Given]) -> list:
    """RoBERTa's embeddings: positions of the user's own arrive as an argument, sharded already."""

    def tell(_: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        region = current_region()
        if region is None or calls[-1].get("position_ids") is not None:
            return None
        ids, embeds, padding = calls[-1].get("input_ids"), calls[-1].get("inputs_embeds"), module.padding_idx
        if ids is not None:
            positions = _by_padding(module)(ids, padding)
        else:
            positions = torch.arange(padding + 1, embeds.size(1) + padding + 1, device=embeds.device).unsqueeze(0)
        return args, kwargs | {"position_ids": region.shard(positions)}

    return [module.register_forward_pre_hook(torch.compiler.disable(tell), with_kwargs=True)]


BY_MASK = frozenset({"OPTLearnedPositionalEmbedding"})
"""Those whose model counts its mask. BioGPT's takes a mask as well, but its model always counts all tokens."""


def _tell(module: torch.nn.Module, calls: list[Given]) -> list:
    """A position embedding that takes positions; BART's takes [L] only, so that rows of their own go in flat."""
    by_mask = type(module).__name__ in BY_MASK
    shapes: list[torch.Size | None] = []

    def tell(_: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        region = current_region()
        if region is None:
            shapes[:] = [None]
            return None
        positions = _local(region, _counted(calls[-1], by_mask))
        shapes[:] = [positions.shape if positions.size(0) > 1 else None]  # not a push: the module may fail
        return args, kwargs | {"position_ids": positions.flatten()}

    def by_rows(_: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
        shape = shapes.pop()
        return None if shape is None else output.reshape(*shape, output.size(-1))

    return [
        module.register_forward_pre_hook(torch.compiler.disable(tell), with_kwargs=True),
        module.register_forward_hook(torch.compiler.disable(by_rows)),
    ]


def _run_whole(module: torch.nn.Module, calls: list[Given]) -> list:
    """One that takes no positions, or grows its table by the length it sees."""
    signature = inspect.signature(module.forward)
    first = next(iter(signature.parameters))

    def widen(_: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if current_region() is None:
            return None
        ids, embeds = calls[-1].get("input_ids"), calls[-1].get("inputs_embeds")
        whole = _counted(calls[-1], by_mask=False) if first == "position_ids" else ids
        arguments = batches.arguments_by_name(signature, args, kwargs)
        return (), arguments | {first: embeds[..., -1] if whole is None else whole}

    def cut(_: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
        region = current_region()
        return None if region is None else region.shard(output, dim=output.dim() - 2)

    return [
        module.register_forward_pre_hook(torch.compiler.disable(widen), with_kwargs=True),
        module.register_forward_hook(torch.compiler.disable(cut)),
    ]


def lookup_indices(
    owner: torch.nn.Module, table: torch.nn.Module | None, arguments: Given
) -> "torch.Tensor | tuple[int, int]":
    """The positions that a table of a module will be asked for in a call; or the first and the last of them."""
    if arguments.get("position_ids") is not None:
        return arguments["position_ids"]
    length = batches.tokens_of(arguments).size(1)
    if (count := _by_padding(owner)) is not None:
        ids = arguments.get("input_ids")
        return (owner.padding_idx + 1, owner.padding_idx + length) if ids is None else count(ids, owner.padding_idx)
    mask = arguments.get("attention_mask")
    if type(table).__name__ in BY_MASK and isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return _counted(arguments, by_mask=True)
    return 0, length - 1


def _counted(arguments: Given, by_mask: bool) -> torch.Tensor:
    """[1 or B, S]: what the caller gave, else a count of the mask as OPT does it, or of all tokens."""
    if arguments.get("position_ids") is not None:
        return arguments["position_ids"]
    mask = arguments.get("attention_mask")
    if by_mask and isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return (mask.cumsum(dim=1) * mask - 1).long()
    tokens = batches.tokens_of(arguments)
    return torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0)


def _local(region: Region, positions: torch.Tensor) -> torch.Tensor:
    return region.shard(positions, dim=-1)


def _by_padding(module: torch.nn.Module) -> Callable | None:
    """The count itself: a method of the embeddings, or a function beside them."""
    if not hasattr(module, "padding_idx"):
        return None
    return getattr(module, BY_PADDING, None) or getattr(sys.modules[type(module).__module__], BY_PADDING, None)
