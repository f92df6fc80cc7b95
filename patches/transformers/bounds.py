"""Checks that indices into tables (ids, positions, token types, labels) lie inside the tables, before they are sharded.

If only one rank holds an index that is too large, only that rank fails, on a GPU without a readable message, and the other
ranks of its group wait for it. Every rank has the full batch, so every rank checks all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Iterator, Mapping

import torch
from torch import nn

from ds_cp.agreement import BatchError
from ds_cp.patches.transformers.host_copies import HostCopies, original
from ds_cp.patches.transformers.losses.task_head_call import TaskHeadCall
from ds_cp.patches.transformers.models import positions

TABLES_BY_IDS = ("embed_tokens_per_layer",)
"""Tables that a stack indexes by its ids, in addition to its embedding (gemma4)."""

TABLES_BY_ARGUMENT = {"token_type_ids": ("token_type_embeddings", "embeddings.token_type_embeddings"), "langs": ("lang_embeddings",)}  # fmt: skip
"""Tables that a stack indexes by another per-token argument. A stack without that table uses its embedding (gpt2)."""

POSITION_TABLES = frozenset({"wpe", "position_embeddings", "positions_embed", "embed_positions", "pos_encoding"})
"""Names that models give to a table with one row per position."""

Indices = torch.Tensor | tuple[int, int]
"""Integers of the whole batch, or the smallest and the largest of them."""


@dataclass(frozen=True)
class Lookup:
    """Indices into a table.

    Attributes:
        name: The user's name for the indices.
        indices: The indices of the whole batch.
        low, high: The smallest and the largest index that the table allows.
        table: Name of the table.
    """

    name: str
    indices: Indices
    low: int
    high: int
    table: str

    @cached_property
    def extremes(self) -> torch.Tensor:
        """The smallest and the largest index, [2] int64; zeros for an empty tensor. On the host if the host has the indices."""
        if not isinstance(self.indices, torch.Tensor):
            return torch.tensor(self.indices)
        if not self.indices.numel():
            return torch.zeros(2, dtype=torch.int64)
        return torch.stack(torch.aminmax(original(self.indices).detach())).long()


def position_tables(stack: nn.Module) -> tuple[str, ...]:
    """Paths of a stack's position tables. If each layer has a buffer of the same name, the first of them."""
    paths: dict[str, str] = {}
    for path, module in stack.named_modules():
        parent, _, name = path.rpartition(".")
        if name in POSITION_TABLES and parent in ("", "embeddings") and _embedding_in(module) is not None:
            paths.setdefault(name, path)
        for name, buffer in module.named_buffers(recurse=False):
            if name in POSITION_TABLES and buffer.dim() == 2:
                paths.setdefault(name, f"{path}.{name}" if path else name)
    return tuple(paths.values())


def lookups_of(
    stack: nn.Module, tables: tuple[str, ...], arguments: Mapping[str, Any], call: TaskHeadCall
) -> list[Lookup]:
    """All lookups of a stack and of its task head's loss.

    Args:
        tables: Paths of the stack's position tables.
        arguments: The stack's arguments by name, of the whole batch.
    """
    lookups = [*_lookups_by_token(stack, arguments), *_lookups_by_position(stack, tables, arguments)]
    if call.targets is not None and call.vocab and not call.targets.is_floating_point():
        lookups.append(label_lookup(call.targets, call.vocab, call.ignore_index))
    return lookups


def label_lookup(targets: torch.Tensor, vocab: int, ignore_index: int) -> Lookup:
    """The lookup of a loss's labels, of the whole sequence."""
    return Lookup("labels", targets.masked_fill(targets == ignore_index, 0), 0, vocab - 1, "the vocabulary")


def refuse_out_of_range(lookups: list[Lookup], host: HostCopies | None = None) -> None:
    """Raise for the first lookup with an index that its table does not have.

    Args:
        host: Copies of the lookups' :attr:`Lookup.extremes`; by default they are read here.

    Raises:
        BatchError: Names the argument, the index and the table.
    """
    host = HostCopies(lookup.extremes for lookup in lookups) if host is None else host
    for lookup in lookups:
        array = host.array(lookup.extremes)
        assert array is not None
        smallest, largest = array.tolist()
        if smallest < lookup.low or largest > lookup.high:
            raise BatchError(
                f"{lookup.name} holds {smallest if smallest < lookup.low else largest}, but {lookup.table} goes from {lookup.low} "
                f"to {lookup.high}: only the rank with that token would fail, and the others of its group would wait for it."
            )


def _lookups_by_token(stack: Any, arguments: Mapping[str, Any]) -> Iterator[Lookup]:
    embedding = stack.get_input_embeddings() if hasattr(stack, "get_input_embeddings") else None
    candidates: list[tuple[str, str, Any]] = [("input_ids", "the vocabulary", embedding)]
    candidates += [("input_ids", name, getattr(stack, name, None)) for name in TABLES_BY_IDS]
    for argument, paths in TABLES_BY_ARGUMENT.items():
        tables = [(argument, path, table) for path in paths if (table := _submodule(stack, path)) is not None]
        candidates.append(tables[0] if tables else (argument, "the vocabulary", embedding))
    for argument, name, module in candidates:
        indices, table = arguments.get(argument), _embedding_in(module)
        if table is not None and isinstance(indices, torch.Tensor) and not indices.is_floating_point():
            yield Lookup(argument, indices, 0, table.num_embeddings - 1, name)


def _lookups_by_position(stack: nn.Module, tables: tuple[str, ...], arguments: Mapping[str, Any]) -> Iterator[Lookup]:
    name = "position_ids" if arguments.get("position_ids") is not None else "the count of its positions"
    for path in tables:
        parent, _, attribute = path.rpartition(".")
        owner = stack.get_submodule(parent)
        table = getattr(owner, attribute)
        if isinstance(table, torch.Tensor):  # a buffer, where negative indices count from the end
            yield Lookup(
                name, positions.lookup_indices(owner, None, arguments), -table.size(0), table.size(0) - 1, path
            )
        elif (embedding := _embedding_in(table)) is not None:
            indices, first = positions.lookup_indices(owner, embedding, arguments), -getattr(embedding, "offset", 0)
            yield Lookup(name, indices, first, embedding.num_embeddings + first - 1, path)


def _submodule(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _embedding_in(module: Any) -> nn.Embedding | None:
    """The embedding, possibly inside an adapter; None if it is not torch's."""
    modules = module.modules() if isinstance(module, nn.Module) else ()
    return next((each for each in modules if isinstance(each, nn.Embedding)), None)
