"""The indexers of sparse attention, by class: how each is run on this rank's queries and the keys of a whole document.

An indexer scores keys per query and selects the best, one by one or in blocks of neighbouring keys. Its own code runs, on
queries of one document; in place of its cache it gets an object that returns the keys of that document, as the cache does
for past tokens in generation. Families: DeepSeek V3.2 and those with its indexer (A.X K2, Dots3, GLM MoE DSA, HY V4),
DeepSeek V4, MiniMax M3, Qwen4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping

import torch

from ds_cp.mask.queries import Queries


class _IndexerCache:
    """The methods of transformers' caches that indexers call, in terms of :meth:`update_indexer`."""

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """All keys [B, k, d] of the sequence, from those of the running call [B, L, d]."""
        raise NotImplementedError

    @property
    def layers(self) -> "_IndexerCache":
        """MiniMax and DeepSeek V4 call a layer of the cache."""
        return self

    def __getitem__(self, layer: int) -> "_IndexerCache":
        return self

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        """MiniMax: keys [B, 1, L, d], of one head."""
        return self.update_indexer(keys.squeeze(1), 0).unsqueeze(1)

    def store_compression_weights(self, name: str, kv: torch.Tensor, gate: torch.Tensor) -> tuple[Any, ...]:
        """DeepSeek V4: values and gates of all complete windows, which are its keys here, and the position of the first window."""
        return *self.update_indexer(torch.cat([kv, gate], dim=-1), 0).chunk(2, dim=-1), 0

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        """DeepSeek V4: the window before the first; there is none."""
        return None, None

    def update_compressor_states(self, name: str, pooled: torch.Tensor) -> torch.Tensor:
        """DeepSeek V4: the pooled windows of the past and of this call; all are of this call."""
        return pooled


class StoredKeys(_IndexerCache):
    """Returns the keys of a whole document [B, k, d], whatever the indexer adds."""

    def __init__(self, keys: torch.Tensor):
        self._keys = keys

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        return self._keys


class KeysCaptured(Exception):
    """Ends the run of an indexer whose keys are all that is needed.

    Attributes:
        keys: [B, L, d].
    """

    def __init__(self, keys: torch.Tensor):
        super().__init__()
        self.keys = keys


class KeyCapture(_IndexerCache):
    """Captures the keys of the running call.

    Raises:
        KeysCaptured: With the keys, from the first call of :meth:`update_indexer`.
    """

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        raise KeysCaptured(keys)


@dataclass(frozen=True)
class IndexerCall:
    """A run of an indexer on m queries of this rank from each of n documents.

    Attributes:
        indexer: The module.
        run: Forward of its class, bound to the module.
        arguments: Arguments of the module's call by name, for this rank's tokens.
        queries: Indices and positions of the queries, and indices of the keys.
        keys: [n, k, d], the indexer's keys of each document.
        key_rotary: Cosines and sines [n, k, d] of the keys, for an indexer that rotates keys after it has read its cache.
    """

    indexer: torch.nn.Module
    run: Callable[..., torch.Tensor]
    arguments: Mapping[str, Any]
    queries: Queries
    keys: torch.Tensor
    key_rotary: tuple[torch.Tensor, ...] = ()

    @property
    def causal_mask(self) -> torch.Tensor:
        """Which keys each query may see, bool [n, m, k]."""
        index = torch.arange(self.keys.size(1), device=self.keys.device)
        return index <= self.queries.positions.unsqueeze(-1)

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the queries in their documents, [n, m]; 0 for padding."""
        return self.queries.positions.clamp(min=0)

    def of_queries(self, name: str) -> torch.Tensor:
        """An argument [B, L, ...] for the queries of this run, [n, m, ...]."""
        argument: torch.Tensor = self.arguments[name].flatten(0, 1)
        return argument[self.queries.query_index]

    def query_rotary(self) -> tuple[torch.Tensor, ...]:
        """Cosines and sines [n, m, d] of the queries."""
        return tuple(angles.flatten(0, 1)[self.queries.query_index] for angles in rotary_of(self.arguments))


def rotary_of(arguments: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Cosines and sines [B, L, d] of this rank's tokens."""
    return (angles.expand(len(arguments["hidden_states"]), -1, -1) for angles in arguments["position_embeddings"])


def _deepseek(call: IndexerCall) -> torch.Tensor:
    selected = call.run(
        call.of_queries("hidden_states"),
        call.of_queries("q_resid"),
        call.query_rotary(),
        call.causal_mask,
        position_ids=None,
        cache=StoredKeys(call.keys),
    )
    # topk fills up with masked keys where a query sees fewer than it may select
    masked = selected > call.queries.positions.unsqueeze(-1)
    return selected.masked_fill(masked, -1).unsqueeze(1)


def _deepseek_v4(call: IndexerCall) -> torch.Tensor:
    rate = int(call.indexer.compress_rate)  # type: ignore[arg-type]  # an attribute of a module of an unknown class
    complete = call.keys.size(1) // rate * rate
    selected = call.run(
        call.of_queries("hidden_states"),
        call.of_queries("q_residual"),
        call.positions,
        StoredKeys(call.keys[:, :complete]),
        call.arguments["layer_idx"],
    )
    return selected.unsqueeze(1)


def _minimax(call: IndexerCall) -> torch.Tensor:
    return call.run(call.of_queries("hidden_states"), call.query_rotary(), StoredKeys(call.keys), call.positions)


def _qwen(call: IndexerCall) -> torch.Tensor:
    # the indexer takes the last m angles for its queries and indexes the first k by key
    rotary = [
        torch.cat([of_keys, of_queries], dim=1) for of_keys, of_queries in zip(call.key_rotary, call.query_rotary())
    ]
    mask = call.run(call.of_queries("hidden_states"), rotary, call.causal_mask.unsqueeze(1), StoredKeys(call.keys))
    selected_first, indices = mask.int().topk(min(_qwen_max_keys(call.indexer), mask.size(-1)))
    return indices.masked_fill(selected_first == 0, -1)


def _qwen_max_keys(indexer: Any) -> int:
    """The keys of the selected blocks, and those of the last, incomplete block."""
    return int(indexer.token_budget + indexer.compress_ratio - 1)


@dataclass(frozen=True)
class IndexerKind:
    """How indexers of a class are run, and the sizes of what they select.

    The callables other than ``select`` take the indexer.

    Attributes:
        select: The blocks of keys that some queries select, [n, G, m, c] int, counted from the start of the document; -1 for
            none.
        score_heads: Number of heads that score each key at the same time.
        max_blocks: Maximum number of blocks that a query selects.
        head_groups: G, number of groups of attention heads with a selection of their own.
        block_size: Number of keys in a block.
        needs_key_rotary: Whether the indexer rotates keys after it has read its cache.
    """

    select: Callable[[IndexerCall], torch.Tensor]
    score_heads: Callable[[Any], int]
    max_blocks: Callable[[Any], int]
    head_groups: Callable[[Any], int] = lambda indexer: 1
    block_size: Callable[[Any], int] = lambda indexer: 1
    needs_key_rotary: bool = False


DEEPSEEK = IndexerKind(
    _deepseek,
    score_heads=lambda indexer: indexer.n_heads,
    max_blocks=lambda indexer: indexer.index_topk,
)
DEEPSEEK_V4 = IndexerKind(  # a block is one compressed key
    _deepseek_v4,
    score_heads=lambda indexer: indexer.num_heads,
    max_blocks=lambda indexer: indexer.index_topk,
)
MINIMAX = IndexerKind(
    _minimax,
    score_heads=lambda indexer: indexer.num_heads,
    max_blocks=lambda indexer: indexer.topk_blocks,
    head_groups=lambda indexer: indexer.num_heads,
    block_size=lambda indexer: indexer.block_size,
)
QWEN = IndexerKind(
    _qwen,
    score_heads=lambda indexer: 1,
    max_blocks=_qwen_max_keys,
    needs_key_rotary=True,
)
INDEXERS: dict[str, IndexerKind] = {
    "DeepseekV32Indexer": DEEPSEEK,
    "AXK2Indexer": DEEPSEEK,
    "Dots3NoteTextIndexer": DEEPSEEK,
    "GlmMoeDsaIndexer": DEEPSEEK,
    "HYV4Indexer": DEEPSEEK,
    "DeepseekV4Indexer": DEEPSEEK_V4,
    "MiniMaxM3VLIndexer": MINIMAX,
    "Qwen4ExpTextQSAIndexer": QWEN,
}
"""Kinds of indexers by class."""
