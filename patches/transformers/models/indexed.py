"""DeepSeek's sparse attention and its like: an indexer chooses the keys of each query, among those of the whole sequence.

The model's own indexer runs on this rank's queries. Where it would ask its cache for the keys of the past it gets the
keys of the whole sequence instead, and where it expects a mask, which of these its queries may see. It is not trained by
the model's loss, so nothing of it needs a gradient.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ds_cp.agreement import BatchError
from ds_cp.attention.selected import hidden_but
from ds_cp.forward.region import MaskDescriptor, Region
from ds_cp.forward.running import current
from ds_cp.mask.rules import CAUSAL

CHUNK_BYTES = 256 << 20
"""Scores that one piece of queries may take: heads x queries x S in fp32."""

INDEXERS = ("DeepseekV32Indexer", "AXK2Indexer", "Dots3NoteTextIndexer", "GlmMoeDsaIndexer", "HYV4Indexer")


class _Keys:
    """In the place of the indexer's cache: takes this rank's keys, answers with those that it was given."""

    def __init__(self, answer: torch.Tensor | None = None):
        self.answer, self.seen = answer, None

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        self.seen = keys  # [B, L, d]
        return keys[:, :1] if self.answer is None else self.answer


def choose(original: Callable, self: Any, hidden_states, q_resid, position_embeddings, attention_mask, *args, **kwargs):
    """An indexer: keys of the whole sequence for this rank's queries, [B, L, n] int32."""
    if not isinstance(attention_mask, MaskDescriptor):
        if current() is not None:
            raise BatchError(f"{type(self).__name__} got another mask than that of the shared sequence.")
        return original(hidden_states, q_resid, position_embeddings, attention_mask, *args, **kwargs)
    if attention_mask.rule != CAUSAL or attention_mask.terms:
        raise BatchError(
            f"{type(self).__name__} chooses among the keys that a mask of its own shows, which ds_cp knows for plain causal "
            "attention only: it would choose keys that are hidden. Leave the mask out."
        )
    region = attention_mask.region

    def run(part: slice, keys: _Keys, visible: torch.Tensor) -> torch.Tensor:
        """The model's own code on some of this rank's queries."""
        angles = tuple(angle[:, part] for angle in position_embeddings)
        return original(hidden_states[:, part], q_resid[:, part], angles, visible, position_ids=None, cache=keys)

    batch, length = hidden_states.shape[:2]
    mine = _Keys()
    run(slice(None), mine, hidden_states.new_ones((batch, length, 1), dtype=torch.bool))  # for its keys only
    everyone = _Keys(region.gather(mine.seen.detach()))
    step = max(1, CHUNK_BYTES // (4 * batch * self.n_heads * region.layout.seq_len))
    parts = [slice(start, min(start + step, length)) for start in range(0, length, step)]
    return torch.cat([run(part, everyone, _visible(region, part)) for part in parts], dim=1)


def hide(mask: torch.Tensor | None, indices: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """SDPA's mask outside of a region with the keys hidden that were not chosen, as the model does under SDPA itself."""
    hidden = hidden_but(indices, key.size(-2)).unsqueeze(1)
    if mask is None:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device)
        mask = mask.tril(key.size(-2) - query.size(-2))
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def _visible(region: Region, part: slice) -> torch.Tensor:
    """Which keys some of this rank's queries may see: bool [B, m, S]; causal, inside their document, no padding."""
    everyone = torch.arange(region.layout.seq_len, device=region.origin.device).unsqueeze(0)
    mine = region.shard(everyone)[:, part]
    same = region.shard(region.origin)[:, part, None] == region.origin[:, None, :]
    return same & (everyone[:, None, :] <= mine[..., None]) & region.unmasked[:, None, :]


FORWARDS: dict[str, Callable] = dict.fromkeys(INDEXERS, choose)
