"""Sparse attention with an indexer, which chooses the keys of each query among those of its whole document.

The model's own indexer runs on this rank's queries, document by document, as one process runs it on a document alone. Where
it would ask its cache for the keys of the past it gets the keys of the document instead. It is not trained by the model's
loss, for it gives numbers of keys only, so nothing of it needs a gradient.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch

from ds_cp import patches
from ds_cp.agreement import BatchError
from ds_cp.attention.selected import Selected, hidden_but
from ds_cp.mask.queries import Queries
from ds_cp.mask.rules import CAUSAL
from ds_cp.patches.transformers.ambient import current_region
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor
from ds_cp.patches.transformers.memory.leaf_modules import make_leaves
from ds_cp.patches.transformers.models.indexers import (
    DEEPSEEK,
    INDEXERS,
    IndexerCall,
    IndexerKind,
    KeysCaptured,
    StoredKeys,
    angles_of,
)
from ds_cp.patches.transformers.models.replacement import Replacement
from ds_cp.region import Region

CHUNK_BYTES = 256 << 20
"""Scores that one piece of queries may take: heads x queries x keys in fp32."""


def attach(choosing: Sequence[torch.nn.Module]) -> Callable[[], None]:
    """Make each indexer and compressor a leaf for ZeRO-3, which then gathers its weights once, in however many pieces it runs;
    their number depends on the batch. Returns what undoes it."""
    for module in choosing:
        patches.require(type(module), "forward", "it asks its cache for the keys of the past", "cache")
    return make_leaves(choosing)


@torch.compiler.disable
def choose(kind: IndexerKind, original: Callable, self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """An indexer's forward: inside a region what this rank's queries choose, [B, G, L, c] int32, blocks of keys counted from
    their document's start, -1 for none."""
    arguments = inspect.signature(type(self).forward).bind(self, *args, **kwargs).arguments
    arguments.pop("self")
    region = _region_of(self, arguments)
    if region is None:
        return original(*args, **kwargs)
    if isinstance(arguments["cache"], StoredKeys):  # a compressor that only pools
        return arguments["hidden_states"].new_empty((*arguments["hidden_states"].shape[:2], 0), dtype=torch.int32)
    states = arguments["hidden_states"]
    with torch.no_grad():
        keys = region.gather(_keys_of(original, arguments)).flatten(0, 1)
        angles = [region.gather(angle).flatten(0, 1) for angle in angles_of(arguments)] if kind.turns_keys else []
        most = min(kind.most(self), -(-region.layout.seq_len // kind.size(self)))
        rows = states.shape[:2].numel()
        out = states.new_full((rows + 1, kind.groups(self), most), -1, dtype=torch.int32)  # one row more, for no query
        for queries in _pieces(region.queries, kind.heads(self)):
            of_keys = tuple(angle[queries.key_index] for angle in angles)
            chosen = kind.ask(IndexerCall(self, original, arguments, queries, keys[queries.key_index], of_keys)).transpose(
                1, 2
            )
            chosen = torch.nn.functional.pad(chosen.int(), (0, most - chosen.size(-1)), value=-1)
            row = torch.where(queries.positions < 0, rows, queries.query_index)
            out.index_copy_(0, row.flatten(), chosen.flatten(0, 1))
    return out[:rows].unflatten(0, states.shape[:2]).transpose(1, 2)


def _region_of(indexer: torch.nn.Module, arguments: Mapping[str, Any]) -> Region | None:
    """The region that an indexer runs in.

    Raises:
        BatchError: it cannot be told.
    """
    mask, region, name = arguments.get("attention_mask"), current_region(), type(indexer).__name__
    if isinstance(mask, MaskDescriptor):
        return mask.region
    if "attention_mask" in arguments and region is not None:
        raise BatchError(f"{name} got another mask than that of the shared sequence.")
    if "attention_mask" not in arguments and region is None and torch._C._current_graph_task_id() != -1:
        raise BatchError(
            f"{name} is recomputed in the backward pass by a checkpoint that is not the model's own, and nothing tells it which "
            "sequence it belongs to: it would choose among the keys of its own shard. Use the model's gradient checkpointing."
        )
    return region


def _keys_of(original: Callable, arguments: Mapping[str, Any]) -> torch.Tensor:
    """The indexer's keys of this rank's tokens, [B, L, d]."""
    try:
        original(**arguments | {"cache": StoredKeys()})
    except KeysCaptured as heard:
        return heard.args[0]
    raise AssertionError("an indexer that does not ask its cache")


def _pieces(documents: tuple[Queries, ...], heads: int) -> Iterator[Queries]:
    """The queries in pieces whose scores may exist at once."""
    for all_of in documents:
        step = max(1, CHUNK_BYTES // (4 * heads * all_of.key_index.numel()))
        for start in range(0, all_of.query_index.size(1), step):
            part = slice(start, start + step)
            yield Queries(all_of.query_index[:, part], all_of.positions[:, part], all_of.key_index)


def has_indexer(attention: torch.nn.Module) -> bool:
    """Whether an attention module chooses its keys by an indexer of its own that is known."""
    return type(getattr(attention, "indexer", None)).__name__ in INDEXERS


def term(module: torch.nn.Module, mask: MaskDescriptor, heads: int, chosen: torch.Tensor) -> Selected:
    """What hides the keys that an attention module's indexer did not choose.

    Args:
        heads: query heads.
        chosen: [B, G, L, c], of :func:`choose`.

    Raises:
        BatchError: under a mask that the indexer did not know of.
    """
    if mask.rule != CAUSAL or mask.terms:
        raise BatchError(
            f"{type(module).__name__} chooses among the keys that a mask of its own shows, which ds_cp knows for plain causal "
            "attention only: it would choose keys that are hidden. Leave the mask out."
        )
    indexer = getattr(module, "indexer", None)
    kind = INDEXERS[type(indexer).__name__] if has_indexer(module) else DEEPSEEK  # layers may share one of DeepSeek's
    region, size = mask.region, kind.size(indexer)
    cut = region.layout
    block = cut.pad(region.positions // size)
    return Selected.by_this_rank(region.mesh, cut, chosen, block, -(-cut.seq_len // size), heads)


def hide(
    module: torch.nn.Module,
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor | None,
    block_indices: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> torch.Tensor | None:
    """SDPA's mask outside of a region with the keys hidden that were not chosen, as the model does under SDPA itself."""
    if block_indices is not None:
        return module.indexer.build_block_mask(block_indices, mask, key.size(-2), query.dtype, query.device, positions)
    if indices is None:
        return mask
    hidden = hidden_but(indices, key.size(-2)).unsqueeze(1)
    if mask is None:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device)
        mask = mask.tril(key.size(-2) - query.size(-2))
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


REPLACED: dict[str, Replacement] = {
    name: Replacement(partial(choose, kind), role="indexer") for name, kind in INDEXERS.items()
}
