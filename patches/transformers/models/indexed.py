"""Sparse attention with an indexer, which chooses the keys of each query among those of its whole document.

The model's own indexer runs on this rank's queries, document by document, as one process runs it on a document alone. Where
it would ask its cache for the keys of the past it gets the keys of the document instead. It is not trained by the model's
loss, for it gives numbers of keys only, so nothing of it needs a gradient.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Iterator, Mapping

import torch

from ds_cp import patches
from ds_cp.agreement import BatchError
from ds_cp.attention.selected import Selected, hidden_but
from ds_cp.forward.region import MaskDescriptor, Region
from ds_cp.forward.running import current
from ds_cp.mask.queries import Queries
from ds_cp.mask.rules import CAUSAL

CHUNK_BYTES = 256 << 20
"""Scores that one piece of queries may take: heads x queries x keys in fp32."""


class _Heard(Exception):
    """An indexer has said its keys [B, L, d], and need not go on."""


class Stored:
    """In the place of the indexer's cache: answers with the keys that it was given, or ends the run and hands keys on."""

    def __init__(self, answer: torch.Tensor | None = None):
        self.answer = answer

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        if self.answer is None:
            raise _Heard(keys)
        return self.answer

    @property
    def layers(self) -> "Stored":
        """MiniMax asks the layers of a cache."""
        return self

    def __getitem__(self, layer: int) -> "Stored":
        return self

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        return self.update_indexer(keys.squeeze(1), 0).unsqueeze(1)

    def store_compression_weights(self, name: str, kv: torch.Tensor, gate: torch.Tensor) -> tuple[Any, ...]:
        """DeepSeek V4 asks for what it pools: values and gates of whole windows, and where the first one stands."""
        return *self.update_indexer(torch.cat([kv, gate], dim=-1), 0).chunk(2, dim=-1), 0

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        """Nothing stands before the first window."""
        return None, None

    def update_compressor_states(self, name: str, pooled: torch.Tensor) -> torch.Tensor:
        """All windows are there."""
        return pooled


@dataclass(frozen=True)
class Asked:
    """Some queries of this rank, side by side by document.

    Attributes:
        indexer: the module.
        run: its own forward.
        given: its arguments, by name, for this rank's tokens.
        queries: which they are.
        keys: [n, k, d], the indexer's keys of each document.
        angles_of_keys: cosines and sines [n, k, d] of the keys, for an indexer that turns them by itself.
    """

    indexer: torch.nn.Module
    run: Callable[..., torch.Tensor]
    given: Mapping[str, Any]
    queries: Queries
    keys: torch.Tensor
    angles_of_keys: tuple[torch.Tensor, ...] = ()

    @property
    def visible(self) -> torch.Tensor:
        """Which keys each query may see, bool [n, m, k]."""
        index = torch.arange(self.keys.size(1), device=self.keys.device)
        return index <= self.queries.positions.unsqueeze(-1)

    def own(self, name: str) -> torch.Tensor:
        """An argument [B, L, ...] of these queries, [n, m, ...]."""
        return self.given[name].flatten(0, 1)[self.queries.own]

    def angles(self) -> tuple[torch.Tensor, ...]:
        """Cosines and sines [n, m, d] of these queries."""
        return tuple(angle.flatten(0, 1)[self.queries.own] for angle in _angles(self.given))


def _angles(given: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Cosines and sines [B, L, d] of this rank's tokens."""
    return (angle.expand(len(given["hidden_states"]), -1, -1) for angle in given["position_embeddings"])


def _deepseek(asked: Asked) -> torch.Tensor:
    states, residual = asked.own("hidden_states"), asked.own("q_resid")
    chosen = asked.run(states, residual, asked.angles(), asked.visible, position_ids=None, cache=Stored(asked.keys))
    unseen = chosen > asked.queries.positions.unsqueeze(-1)  # a query with few keys gets hidden ones to fill up
    return chosen.masked_fill(unseen, -1).unsqueeze(1)


def _qwen(asked: Asked) -> torch.Tensor:
    angles = [torch.cat(both, dim=1) for both in zip(asked.angles_of_keys, asked.angles())]
    kept = asked.run(asked.own("hidden_states"), angles, asked.visible.unsqueeze(1), Stored(asked.keys))
    kept, chosen = kept.int().topk(min(_qwen_most(asked.indexer), kept.size(-1)))
    return chosen.masked_fill(kept == 0, -1)


def _qwen_most(indexer: torch.nn.Module) -> int:
    return indexer.token_budget + indexer.compress_ratio - 1


def _minimax(asked: Asked) -> torch.Tensor:
    positions = asked.queries.positions.clamp(min=0)
    return asked.run(asked.own("hidden_states"), asked.angles(), Stored(asked.keys), positions)


def _deepseek_v4(asked: Asked) -> torch.Tensor:
    whole = asked.keys.size(1) // asked.indexer.compress_rate * asked.indexer.compress_rate
    states, residual = asked.own("hidden_states"), asked.own("q_residual")
    positions = asked.queries.positions.clamp(min=0)
    return asked.run(states, residual, positions, Stored(asked.keys[:, :whole]), asked.given["layer_idx"]).unsqueeze(1)


@dataclass(frozen=True)
class Kind:
    """What is known of an indexer.

    Attributes:
        ask: the blocks of keys that some queries choose, [n, G, m, c] int, counted from the document's start; -1 for none.
        heads: how many score each key at once.
        most: how many blocks a query may choose.
        groups: G, of heads that choose by themselves.
        size: keys of a block.
        turns_keys: whether its keys are rotated after it has asked its cache.
    """

    ask: Callable[[Asked], torch.Tensor]
    heads: Callable[[Any], int]
    most: Callable[[Any], int]
    groups: Callable[[Any], int] = lambda indexer: 1
    size: Callable[[Any], int] = lambda indexer: 1
    turns_keys: bool = False


DEEPSEEK = Kind(_deepseek, heads=lambda indexer: indexer.n_heads, most=lambda indexer: indexer.index_topk)
DEEPSEEK_V4 = Kind(_deepseek_v4, heads=lambda indexer: indexer.num_heads, most=lambda indexer: indexer.index_topk)
QWEN = Kind(_qwen, heads=lambda indexer: 1, most=_qwen_most, turns_keys=True)
MINIMAX = Kind(
    _minimax,
    heads=lambda indexer: indexer.num_heads,
    most=lambda indexer: indexer.topk_blocks,
    groups=lambda indexer: indexer.num_heads,
    size=lambda indexer: indexer.block_size,
)
INDEXERS: dict[str, Kind] = {
    "DeepseekV32Indexer": DEEPSEEK,
    "AXK2Indexer": DEEPSEEK,
    "Dots3NoteTextIndexer": DEEPSEEK,
    "GlmMoeDsaIndexer": DEEPSEEK,
    "HYV4Indexer": DEEPSEEK,
    "DeepseekV4Indexer": DEEPSEEK_V4,
    "MiniMaxM3VLIndexer": MINIMAX,
    "Qwen4ExpTextQSAIndexer": QWEN,
}
"""Indexers, by class."""


COMPRESSORS = ("DeepseekV4CSACompressor", "DeepseekV4HCACompressor")
"""What pools keys, by class (:mod:`.compressed`)."""


def attach(decoder: torch.nn.Module) -> Callable[[], None]:
    """Make each indexer and compressor of a decoder a leaf for ZeRO-3, which then gathers its weights once, in however many
    pieces it runs; their number depends on the batch. Returns what undoes it."""
    bound = [module for module in decoder.modules() if type(module).__name__ in (*INDEXERS, *COMPRESSORS)]
    for module in bound:
        patches.require(type(module), "forward", "it asks its cache for the keys of the past", "cache")
        module._z3_leaf = True

    def undo() -> None:
        for module in bound:
            module.__dict__.pop("_z3_leaf", None)

    return undo


def choose(kind: Kind, original: Callable, self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """An indexer's forward: inside a region what this rank's queries choose, [B, G, L, c] int64, blocks of keys counted from
    their document's start, -1 for none."""
    given = inspect.signature(type(self).forward).bind(self, *args, **kwargs).arguments
    given.pop("self")
    region = _region_of(self, given)
    if region is None:
        return original(*args, **kwargs)
    if isinstance(given["cache"], Stored):  # a compressor that only pools
        return torch.full((*given["hidden_states"].shape[:2], 0), -1, device=given["hidden_states"].device)
    states = given["hidden_states"]
    with torch.no_grad():
        keys = region.gather(_keys_of(original, given)).flatten(0, 1)
        angles = [region.gather(angle).flatten(0, 1) for angle in _angles(given)] if kind.turns_keys else []
        most = min(kind.most(self), -(-region.layout.seq_len // kind.size(self)))
        rows = states.shape[:2].numel()
        out = torch.full((rows + 1, kind.groups(self), most), -1, device=states.device)  # one more, for no query
        for queries in _pieces(region.queries, kind.heads(self)):
            of_keys = tuple(angle[queries.keys] for angle in angles)
            chosen = kind.ask(Asked(self, original, given, queries, keys[queries.keys], of_keys)).transpose(1, 2)
            chosen = torch.nn.functional.pad(chosen.long(), (0, most - chosen.size(-1)), value=-1)
            row = torch.where(queries.positions < 0, rows, queries.own)
            out.index_copy_(0, row.flatten(), chosen.flatten(0, 1))
    return out[:rows].unflatten(0, states.shape[:2]).transpose(1, 2)


def _region_of(indexer: torch.nn.Module, given: Mapping[str, Any]) -> Region | None:
    """The region that an indexer runs in.

    Raises:
        BatchError: it cannot be told.
    """
    mask, region, name = given.get("attention_mask"), current(), type(indexer).__name__
    if isinstance(mask, MaskDescriptor):
        return mask.region
    if "attention_mask" in given and region is not None:
        raise BatchError(f"{name} got another mask than that of the shared sequence.")
    if "attention_mask" not in given and region is None and torch._C._current_graph_task_id() != -1:
        raise BatchError(
            f"{name} is recomputed in the backward pass by a checkpoint that is not the model's own, and nothing tells it which "
            "sequence it belongs to: it would choose among the keys of its own shard. Use the model's gradient checkpointing."
        )
    return region


def _keys_of(original: Callable, given: Mapping[str, Any]) -> torch.Tensor:
    """The indexer's keys of this rank's tokens, [B, L, d]."""
    try:
        original(**given | {"cache": Stored()})
    except _Heard as heard:
        return heard.args[0]
    raise AssertionError("an indexer that does not ask its cache")


def _pieces(documents: tuple[Queries, ...], heads: int) -> Iterator[Queries]:
    """The queries in pieces whose scores may exist at once."""
    for all_of in documents:
        step = max(1, CHUNK_BYTES // (4 * heads * all_of.keys.numel()))
        for start in range(0, all_of.own.size(1), step):
            part = slice(start, start + step)
            yield Queries(all_of.own[:, part], all_of.positions[:, part], all_of.keys)


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
    kind = INDEXERS.get(
        type(indexer := getattr(module, "indexer", None)).__name__, DEEPSEEK
    )  # one may be shared by layers
    region, size = mask.region, kind.size(indexer)
    cut = region.layout
    block = torch.nn.functional.pad(region.positions // size, (0, cut.padded_len - cut.seq_len))
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


FORWARDS: dict[str, Callable] = {name: partial(choose, kind) for name, kind in INDEXERS.items()}
