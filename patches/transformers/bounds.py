"""Numbers that look a table up must lie inside of it: ids, positions, token types, labels. Checked before they are cut.

A rank that asks a table for more than it holds fails alone, on a GPU without a sentence, and the others of its group wait
for it. All of them see the whole batch, so all of them look, with one read of the device for all numbers together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Mapping

import torch
from torch import nn

from ds_cp.agreement import BatchError
from ds_cp.patches.transformers.losses.task_head_call import TaskHeadCall
from ds_cp.patches.transformers.models import positions

BY_IDS = ("embed_tokens_per_layer",)
"""Tables beside its embedding that a stack looks its ids up in (gemma4)."""

BY_ARGUMENT = {"token_type_ids": ("token_type_embeddings", "embeddings.token_type_embeddings"), "langs": ("lang_embeddings",)}  # fmt: skip
"""Where an argument with a number per token is looked up; in the embedding, where a stack lacks that table (gpt2)."""

OF_POSITIONS = frozenset({"wpe", "position_embeddings", "positions_embed", "embed_positions", "pos_encoding"})
"""What models call a table with a row per position."""

Numbers = torch.Tensor | tuple[int, int]
"""Integers of the whole batch; or the smallest and the largest of them."""


@dataclass(frozen=True)
class Lookup:
    """Numbers that a table is asked for.

    Attributes:
        name: what the user calls them.
        low, high: what the table holds, both included.
        table: its name.
    """

    name: str
    numbers: Numbers
    low: int
    high: int
    table: str


def position_tables(stack: nn.Module) -> tuple[str, ...]:
    """The names of a stack's tables of positions; of buffers that each layer has alike, the first."""
    found: dict[str, str] = {}
    for path, module in stack.named_modules():
        parent, _, name = path.rpartition(".")
        if name in OF_POSITIONS and parent in ("", "embeddings") and _embedding_in(module) is not None:
            found.setdefault(name, path)
        for name, buffer in module.named_buffers(recurse=False):
            if name in OF_POSITIONS and buffer.dim() == 2:
                found.setdefault(name, f"{path}.{name}" if path else name)
    return tuple(found.values())


def check(stack: nn.Module, tables: tuple[str, ...], arguments: Mapping[str, Any], call: TaskHeadCall) -> None:
    """Compare what a stack looks up, and the loss of its head, with what their tables hold.

    Args:
        tables: names of the stack's tables of positions.
        arguments: the stack's arguments by name, of the whole batch.

    Raises:
        BatchError: names the argument, the number and the table.
    """
    refuse_out_of_range([*_by_token(stack, arguments), *_by_position(stack, tables, arguments), *_by_label(call)])


def refuse_out_of_range(lookups: list[Lookup]) -> None:
    """Raise for the first lookup that its table does not hold.

    Raises:
        BatchError: names it.
    """
    for each, (smallest, largest) in zip(lookups, _extremes([each.numbers for each in lookups]), strict=True):
        if smallest < each.low or largest > each.high:
            raise BatchError(
                f"{each.name} holds {smallest if smallest < each.low else largest}, but {each.table} goes from {each.low} "
                f"to {each.high}: only the rank with that token would fail, and the others of its group would wait for it."
            )


def _extremes(numbers: list[Numbers]) -> list[tuple[int, int]]:
    """The smallest and the largest of each, with one read of the device."""
    found = [each if isinstance(each, tuple) else None for each in numbers]
    asked = [i for i, each in enumerate(numbers) if isinstance(each, torch.Tensor) and each.numel()]
    if asked:
        device = numbers[asked[0]].device
        ends = [torch.stack(torch.aminmax(numbers[i].detach())).to(device, torch.int64) for i in asked]
        for i, pair in zip(asked, torch.stack(ends).tolist(), strict=True):
            found[i] = tuple(pair)
    return [each or (0, 0) for each in found]


def _by_token(stack: nn.Module, arguments: Mapping[str, Any]) -> Iterator[Lookup]:
    word = stack.get_input_embeddings() if hasattr(stack, "get_input_embeddings") else None
    asked = [
        ("input_ids", "the vocabulary", word),
        *(("input_ids", name, getattr(stack, name, None)) for name in BY_IDS),
    ]
    for argument, paths in BY_ARGUMENT.items():
        tables = [(argument, path, table) for path in paths if (table := _submodule(stack, path)) is not None]
        asked.append(tables[0] if tables else (argument, "the vocabulary", word))
    for argument, name, module in asked:
        numbers, table = arguments.get(argument), _embedding_in(module)
        if table is not None and isinstance(numbers, torch.Tensor) and not numbers.is_floating_point():
            yield Lookup(argument, numbers, 0, table.num_embeddings - 1, name)


def _by_position(stack: nn.Module, tables: tuple[str, ...], arguments: Mapping[str, Any]) -> Iterator[Lookup]:
    name = "position_ids" if arguments.get("position_ids") is not None else "the count of its positions"
    for path in tables:
        parent, _, last = path.rpartition(".")
        owner = stack.get_submodule(parent)
        table = getattr(owner, last)
        if isinstance(table, torch.Tensor):  # a buffer, which may be asked from behind
            yield Lookup(
                name, positions.lookup_indices(owner, None, arguments), -table.size(0), table.size(0) - 1, path
            )
        elif (inner := _embedding_in(table)) is not None:
            first = -getattr(inner, "offset", 0)
            yield Lookup(
                name, positions.lookup_indices(owner, inner, arguments), first, inner.num_embeddings + first - 1, path
            )


def _by_label(call: TaskHeadCall) -> Iterator[Lookup]:
    if call.targets is not None and call.vocab and not call.targets.is_floating_point():
        yield label_lookup(call.targets, call.vocab, call.ignore_index)


def label_lookup(targets: torch.Tensor, vocab: int, ignore_index: int) -> Lookup:
    """Labels of the whole sequence, as the loss takes them."""
    return Lookup("labels", targets.masked_fill(targets == ignore_index, 0), 0, vocab - 1, "the vocabulary")


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _embedding_in(module: nn.Module | None) -> nn.Embedding | None:
    """The embedding itself, possibly inside of an adapter; None where it is none of torch's."""
    inside = module.modules() if isinstance(module, nn.Module) else ()
    return next((each for each in inside if isinstance(each, nn.Embedding)), None)
