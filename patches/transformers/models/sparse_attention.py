"""Sparse attention with an indexer: DeepSeek V3.2 and V4, GLM MoE DSA, MiniMax M3, Qwen4 and others (:data:`.indexers.INDEXERS`).

An indexer selects the keys of each query among all keys before it. Run on a shard, an indexer would select among this rank's keys. Inside a region it runs on this rank's queries, one document at
a time, with the keys of the whole document in place of its cache (:mod:`.indexers`). Keys that it does not select are masked
in attention (:class:`~ds_cp.attention.selected.SelectedKeys`). The loss of the model does not train indexers, since they
return indices only, so they run without gradients.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch

from ds_cp import patches
from ds_cp.agreement import BatchError
from ds_cp.attention.selected import SelectedKeys, not_selected
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
    KeyCapture,
    KeysCaptured,
    StoredKeys,
    rotary_of,
)
from ds_cp.patches.transformers.models.region_mask import in_backward_pass
from ds_cp.patches.transformers.models.replacement import Replacement
from ds_cp.region import Region

CHUNK_BYTES = 256 << 20
"""Maximum size of the scores of a chunk of queries, [score heads, queries, keys] in fp32."""


def attach(modules: Sequence[torch.nn.Module]) -> Callable[[], None]:
    """Make each indexer and compressor a ZeRO-3 leaf; returns what undoes it.

    Their code runs once per chunk of queries, or per group of documents, and the number of these depends on the batch. ZeRO-3
    gathers the weights of a leaf once per call of the module, however often its submodules run.
    """
    for module in modules:
        patches.require(type(module), "forward", "it reads the keys of past tokens from its cache", "cache")
    return make_leaves(modules)


@torch.compiler.disable
def select(
    kind: IndexerKind, original: Callable[..., torch.Tensor], self: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """The forward of an indexer.

    Returns:
        Inside a region: the blocks of keys that this rank's queries select, [B, G, L, c] int32, counted from the start of their
        document; -1 for none. Outside of one: what the class returns.
    """
    arguments = inspect.signature(type(self).forward).bind(self, *args, **kwargs).arguments
    arguments.pop("self")
    region = _region_of(self, arguments)
    if region is None:
        return original(*args, **kwargs)
    hidden_states = arguments["hidden_states"]
    if isinstance(arguments["cache"], StoredKeys):  # DeepSeek V4's compressor pools windows, and ignores the selection
        return hidden_states.new_empty((*hidden_states.shape[:2], 0), dtype=torch.int32)
    with torch.no_grad():
        keys = region.gather(_keys_of(original, arguments)).flatten(0, 1)
        rotary: list[torch.Tensor] = []
        if kind.needs_key_rotary:
            rotary = [region.gather(angles).flatten(0, 1) for angles in rotary_of(arguments)]
        max_blocks = min(kind.max_blocks(self), -(-region.layout.seq_len // kind.block_size(self)))
        tokens = hidden_states.shape[:2].numel()
        # one row more than tokens: queries that are padding write there
        out = hidden_states.new_full((tokens + 1, kind.head_groups(self), max_blocks), -1, dtype=torch.int32)
        for queries in _chunks(region.queries, kind.score_heads(self)):
            key_rotary = tuple(angles[queries.key_index] for angles in rotary)
            call = IndexerCall(self, original, arguments, queries, keys[queries.key_index], key_rotary)
            selected = kind.select(call).transpose(1, 2)  # [n, m, G, c]
            selected = torch.nn.functional.pad(selected.int(), (0, max_blocks - selected.size(-1)), value=-1)
            row = torch.where(queries.positions < 0, tokens, queries.query_index)
            out.index_copy_(0, row.flatten(), selected.flatten(0, 1))
    return out[:tokens].unflatten(0, hidden_states.shape[:2]).transpose(1, 2)


def _region_of(indexer: torch.nn.Module, arguments: Mapping[str, Any]) -> Region | None:
    """The region that an indexer runs in, from its mask where it has one; None outside of a region.

    Raises:
        BatchError: The region cannot be determined.
    """
    mask, region, name = arguments.get("attention_mask"), current_region(), type(indexer).__name__
    if isinstance(mask, MaskDescriptor):
        return mask.region
    if "attention_mask" in arguments and region is not None:
        raise BatchError(
            f"{name} got a mask other than that of the shared sequence: it would select among its own shard."
        )
    if "attention_mask" not in arguments and region is None and in_backward_pass():
        raise BatchError(
            f"{name} is recomputed in the backward pass by a checkpoint that is not the model's own, so that it has no access to "
            "the shared sequence: it would choose among the keys of its own shard. Use the model's gradient checkpointing."
        )
    return region


def _keys_of(original: Callable[..., Any], arguments: Mapping[str, Any]) -> torch.Tensor:
    """The indexer's keys of this rank's tokens, [B, L, d]."""
    try:
        original(**{**arguments, "cache": KeyCapture()})
    except KeysCaptured as captured:
        return captured.keys
    raise AssertionError("the indexer did not call its cache")


def _chunks(documents: tuple[Queries, ...], score_heads: int) -> Iterator[Queries]:
    """The queries in chunks whose scores take at most ``CHUNK_BYTES``."""
    for queries in documents:
        chunk = max(1, CHUNK_BYTES // (4 * score_heads * queries.key_index.numel()))
        for start in range(0, queries.query_index.size(1), chunk):
            part = slice(start, start + chunk)
            yield Queries(queries.query_index[:, part], queries.positions[:, part], queries.key_index)


def has_indexer(attention: torch.nn.Module) -> bool:
    """Whether an attention module has an indexer that ds_cp knows."""
    return type(getattr(attention, "indexer", None)).__name__ in INDEXERS


def selection_term(module: torch.nn.Module, mask: MaskDescriptor, heads: int, selected: torch.Tensor) -> SelectedKeys:
    """The term that masks the keys which an attention module's indexer did not select.

    Args:
        heads: Number of query heads.
        selected: [B, G, L, c], from :func:`select`.

    Raises:
        BatchError: The mask is not plain causal, which is all that indexers take into account.
    """
    if mask.rule != CAUSAL or mask.terms:
        raise BatchError(
            f"{type(module).__name__} chooses among the keys that a mask of its own shows, which ds_cp knows for plain causal "
            "attention only: it would choose keys that are hidden. Leave the mask out."
        )
    indexer = getattr(module, "indexer", None)
    # a layer without an indexer uses the selection of an earlier layer, in DeepSeek-like models only
    kind = INDEXERS[type(indexer).__name__] if has_indexer(module) else DEEPSEEK
    region, block_size = mask.region, kind.block_size(indexer)
    layout = region.layout
    block_of_key = layout.pad(region.position_in_document // block_size)
    max_blocks = -(-layout.seq_len // block_size)
    return SelectedKeys.from_local_queries(region.mesh, layout, selected, block_of_key, max_blocks, heads)


def mask_unselected(
    module: Any,
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor | None,
    block_indices: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> torch.Tensor | None:
    """SDPA's mask outside of a region, with unselected keys masked as the model itself does under SDPA.

    Args:
        indices, block_indices: Selected keys [B, L, c] or blocks of keys [B, G, L, c]; None where the layer has no indexer.
    """
    if block_indices is not None:
        block_mask: torch.Tensor = module.indexer.build_block_mask(
            block_indices, mask, key.size(-2), query.dtype, query.device, positions
        )
        return block_mask
    if indices is None:
        return mask
    unselected = not_selected(indices, key.size(-2)).unsqueeze(1)
    if mask is None:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device)
        mask = mask.tril(key.size(-2) - query.size(-2))
    if mask.dtype == torch.bool:
        return mask & ~unselected
    return mask.masked_fill(unselected, torch.finfo(mask.dtype).min)


REPLACED: dict[str, Replacement] = {
    name: Replacement(partial(select, kind), role="indexer") for name, kind in INDEXERS.items()
}
