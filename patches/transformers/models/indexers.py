"""What is known of single indexers: how each is asked for the keys that some queries choose.

An indexer runs by its own code. It gets queries of one document, and in the place of its cache the keys of the whole document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping

import torch

from ds_cp.mask.queries import Queries


class KeysCaptured(Exception):
    """An indexer has said its keys [B, L, d], and need not go on."""


class StoredKeys:
    """In the place of the indexer's cache: answers with the keys that it was given, or ends the run and hands keys on."""

    def __init__(self, answer: torch.Tensor | None = None):
        self.answer = answer

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        if self.answer is None:
            raise KeysCaptured(keys)
        return self.answer

    @property
    def layers(self) -> "StoredKeys":
        """MiniMax asks the layers of a cache."""
        return self

    def __getitem__(self, layer: int) -> "StoredKeys":
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
class IndexerCall:
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
    arguments: Mapping[str, Any]
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
        return self.arguments[name].flatten(0, 1)[self.queries.query_index]

    def angles(self) -> tuple[torch.Tensor, ...]:
        """Cosines and sines [n, m, d] of these queries."""
        return tuple(angle.flatten(0, 1)[self.queries.query_index] for angle in angles_of(self.arguments))


def angles_of(arguments: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Cosines and sines [B, L, d] of this rank's tokens."""
    return (angle.expand(len(arguments["hidden_states"]), -1, -1) for angle in arguments["position_embeddings"])


def _deepseek(asked: IndexerCall) -> torch.Tensor:
    states, residual = asked.own("hidden_states"), asked.own("q_resid")
    chosen = asked.run(states, residual, asked.angles(), asked.visible, position_ids=None, cache=StoredKeys(asked.keys))
    unseen = chosen > asked.queries.positions.unsqueeze(-1)  # a query with few keys gets hidden ones to fill up
    return chosen.masked_fill(unseen, -1).unsqueeze(1)


def _qwen(asked: IndexerCall) -> torch.Tensor:
    angles = [torch.cat(both, dim=1) for both in zip(asked.angles_of_keys, asked.angles())]
    kept = asked.run(asked.own("hidden_states"), angles, asked.visible.unsqueeze(1), StoredKeys(asked.keys))
    kept, chosen = kept.int().topk(min(_qwen_most(asked.indexer), kept.size(-1)))
    return chosen.masked_fill(kept == 0, -1)


def _qwen_most(indexer: torch.nn.Module) -> int:
    return indexer.token_budget + indexer.compress_ratio - 1


def _minimax(asked: IndexerCall) -> torch.Tensor:
    positions = asked.queries.positions.clamp(min=0)
    return asked.run(asked.own("hidden_states"), asked.angles(), StoredKeys(asked.keys), positions)


def _deepseek_v4(asked: IndexerCall) -> torch.Tensor:
    whole = asked.keys.size(1) // asked.indexer.compress_rate * asked.indexer.compress_rate
    states, residual = asked.own("hidden_states"), asked.own("q_residual")
    positions = asked.queries.positions.clamp(min=0)
    return asked.run(
        states, residual, positions, StoredKeys(asked.keys[:, :whole]), asked.arguments["layer_idx"]
    ).unsqueeze(1)


@dataclass(frozen=True)
class IndexerKind:
    """What is known of an indexer.

    Attributes:
        ask: the blocks of keys that some queries choose, [n, G, m, c] int, counted from the document's start; -1 for none.
        heads: how many score each key at once.
        most: how many blocks a query may choose.
        groups: G, of heads that choose by themselves.
        size: keys of a block.
        turns_keys: whether its keys are rotated after it has asked its cache.
    """

    ask: Callable[[IndexerCall], torch.Tensor]
    heads: Callable[[Any], int]
    most: Callable[[Any], int]
    groups: Callable[[Any], int] = lambda indexer: 1
    size: Callable[[Any], int] = lambda indexer: 1
    turns_keys: bool = False


DEEPSEEK = IndexerKind(_deepseek, heads=lambda indexer: indexer.n_heads, most=lambda indexer: indexer.index_topk)
DEEPSEEK_V4 = IndexerKind(
    _deepseek_v4, heads=lambda indexer: indexer.num_heads, most=lambda indexer: indexer.index_topk
)
QWEN = IndexerKind(_qwen, heads=lambda indexer: 1, most=_qwen_most, turns_keys=True)
MINIMAX = IndexerKind(
    _minimax,
    heads=lambda indexer: indexer.num_heads,
    most=lambda indexer: indexer.topk_blocks,
    groups=lambda indexer: indexer.num_heads,
    size=lambda indexer: indexer.block_size,
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
"""Indexers, by class."""
