"""Absolute positions that a model counts itself, from the tokens that it sees.

Three families, by what they count: BART and its relatives count all tokens, RoBERTa and its relatives the tokens that are not
padding, and OPT the ones in its attention mask. Inside a region they would count this rank's tokens. Hooks count the tokens of
the whole batch in the same way and pass this rank's part of the positions to the module. A module that takes no
positions runs on the whole batch, and this rank keeps its part of the output.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any, Callable, Mapping

import torch
from torch.utils.hooks import RemovableHandle

from ds_cp.patches.transformers import batch as batches
from ds_cp.patches.transformers.ambient import current_region

EMBEDDING = re.compile("Position(al)?Embedding")
CACHE_LENGTH = frozenset({"cache_length", "past_key_values_length"})
"""The argument of a position embedding for the number of cached tokens: its name since transformers 5.24, and before."""

COUNT_WITHOUT_PADDING = "create_position_ids_from_input_ids"
"""The method or function with which RoBERTa and its relatives count the tokens that are not padding."""

COUNTS_MASK = frozenset({"OPTLearnedPositionalEmbedding"})
"""Position embeddings of models that count their attention mask. BioGPT's embedding also takes a mask, but BioGPT always counts
all tokens."""

Arguments = Mapping[str, Any]
ForwardCall = tuple[tuple[Any, ...], dict[str, Any]]
AddHooks = Callable[[torch.nn.Module, list[Arguments]], list[RemovableHandle]]


def attach(decoder: torch.nn.Module) -> Callable[[], None]:
    """Hook the modules of a decoder that count positions; returns what removes the hooks."""
    calls: list[Arguments] = []  # arguments of the decoder's running calls, for the whole batch
    handles: list[RemovableHandle] = []
    for module in decoder.modules():
        add_hooks = _hooks_for(module)
        if add_hooks is not None:
            handles += add_hooks(module, calls)
    if handles:
        signature = inspect.signature(decoder.forward)

        def push_arguments(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(batches.arguments_by_name(signature, args, kwargs))

        def pop_arguments(*_: Any) -> None:
            calls.pop()

        # before the hook of the stack, which replaces the arguments by those of this rank's tokens
        handles.append(decoder.register_forward_pre_hook(push_arguments, with_kwargs=True, prepend=True))
        handles.append(decoder.register_forward_hook(pop_arguments, always_call=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _hooks_for(module: torch.nn.Module) -> AddHooks | None:
    """The function that hooks a module, if the module counts positions."""
    cls = type(module)
    if not cls.__module__.startswith("transformers."):
        return None
    names = [*inspect.signature(cls.forward).parameters][1:]
    if _count_without_padding(module) is not None and {"input_ids", "position_ids"} <= {*names}:
        return _hook_roberta_embeddings
    if EMBEDDING.search(cls.__name__) and not CACHE_LENGTH.isdisjoint(names):
        return _hook_position_embedding if "position_ids" in names[1:] else _hook_without_positions
    return None


def _hook_roberta_embeddings(module: torch.nn.Module, calls: list[Arguments]) -> list[RemovableHandle]:
    """RoBERTa's embeddings. The caller's own positions are an argument of the module, and are sharded already."""

    @torch.compiler.disable
    def add_positions(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardCall | None:
        region = current_region()
        if region is None or calls[-1].get("position_ids") is not None:
            return None
        return args, kwargs | {"position_ids": region.shard(_positions_without_padding(module, calls[-1]))}

    return [module.register_forward_pre_hook(add_positions, with_kwargs=True)]


def _hook_position_embedding(module: torch.nn.Module, calls: list[Arguments]) -> list[RemovableHandle]:
    """A position embedding that takes positions [L]. Positions [B, L] go in flat, and the output gets its batch dim back."""
    counts_mask = type(module).__name__ in COUNTS_MASK
    shapes: list[torch.Size | None] = []  # [B, L] of the running call, if the batch dim was flattened

    @torch.compiler.disable
    def add_positions(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardCall | None:
        region = current_region()
        if region is None:
            shapes[:] = [None]
            return None
        positions = region.shard(_counted_positions(calls[-1], counts_mask), dim=-1)
        shapes[:] = [positions.shape if positions.size(0) > 1 else None]  # replaced, not appended: the module may fail
        return args, kwargs | {"position_ids": positions.flatten()}

    @torch.compiler.disable
    def restore_batch_dim(_: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        shape = shapes.pop()
        return None if shape is None else output.reshape(*shape, output.size(-1))

    return [
        module.register_forward_pre_hook(add_positions, with_kwargs=True),
        module.register_forward_hook(restore_batch_dim),
    ]


def _hook_without_positions(module: torch.nn.Module, calls: list[Arguments]) -> list[RemovableHandle]:
    """A position embedding that takes no positions, or extends its table to the length that it sees: it gets the whole batch."""
    signature = inspect.signature(module.forward)
    first = next(iter(signature.parameters))

    @torch.compiler.disable
    def take_whole_batch(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardCall | None:
        if current_region() is None:
            return None
        whole = (
            _counted_positions(calls[-1], counts_mask=False) if first == "position_ids" else calls[-1].get("input_ids")
        )
        if whole is None:
            whole = calls[-1]["inputs_embeds"][..., -1]  # only its shape is used
        arguments = batches.arguments_by_name(signature, args, kwargs)
        return (), arguments | {first: whole}

    @torch.compiler.disable
    def shard_output(_: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        region = current_region()
        return None if region is None else region.shard(output, dim=output.dim() - 2)

    return [
        module.register_forward_pre_hook(take_whole_batch, with_kwargs=True),
        module.register_forward_hook(shard_output),
    ]


def lookup_indices(
    owner: torch.nn.Module, table: torch.nn.Module | None, arguments: Arguments
) -> torch.Tensor | tuple[int, int]:
    """The indices with which a call looks up a table of positions: a tensor, or the first and the last of a range.

    Args:
        owner: The module that looks the table up.
        table: The embedding; None if the table is a buffer.
        arguments: Arguments of the decoder, for the whole batch.
    """
    positions: torch.Tensor | None = arguments.get("position_ids")
    if positions is not None:
        return positions
    length = batches.tokens_of(arguments).size(1)
    if _count_without_padding(owner) is not None:
        if arguments.get("input_ids") is None:
            first = _padding_idx(owner) + 1
            return first, first + length - 1
        return _positions_without_padding(owner, arguments)
    if type(table).__name__ in COUNTS_MASK and _padding_mask(arguments) is not None:
        return _counted_positions(arguments, counts_mask=True)
    return 0, length - 1


def _counted_positions(arguments: Arguments, counts_mask: bool) -> torch.Tensor:
    """The caller's positions if there are any, else a count of the attention mask as in OPT, or of all tokens; [1 or B, S]."""
    positions: torch.Tensor | None = arguments.get("position_ids")
    if positions is not None:
        return positions
    mask = _padding_mask(arguments)
    if counts_mask and mask is not None:
        return (mask.cumsum(dim=1) * mask - 1).long()
    tokens = batches.tokens_of(arguments)
    return torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0)


def _padding_mask(arguments: Arguments) -> torch.Tensor | None:
    mask = arguments.get("attention_mask")
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def _positions_without_padding(module: torch.nn.Module, arguments: Arguments) -> torch.Tensor:
    """RoBERTa's count of the tokens that are not padding, by its own code, [B, S]; of all embeddings without ids, [1, S]."""
    ids, padding_idx = arguments.get("input_ids"), _padding_idx(module)
    if ids is None:
        embeddings = arguments["inputs_embeds"]
        first, length = padding_idx + 1, embeddings.size(1)
        return torch.arange(first, first + length, device=embeddings.device).unsqueeze(0)
    count = _count_without_padding(module)
    assert count is not None, "only such modules are hooked"
    return count(ids, padding_idx)


def _count_without_padding(module: torch.nn.Module) -> Callable[..., torch.Tensor] | None:
    """RoBERTa's count: a method of the embeddings, or a function of their file."""
    if not hasattr(module, "padding_idx"):
        return None
    method: Any = getattr(module, COUNT_WITHOUT_PADDING, None)
    return method or getattr(sys.modules[type(module).__module__], COUNT_WITHOUT_PADDING, None)


def _padding_idx(module: Any) -> int:
    return int(module.padding_idx)
