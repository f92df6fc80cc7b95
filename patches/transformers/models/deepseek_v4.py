"""DeepSeek V4: queries attend to the tokens of a sliding window and to compressed KV, in one softmax.

A compressor pools windows of ``compress_rate`` neighbouring tokens into one key each, which is its value, too (one head). Run
on a shard, it would pool this rank's tokens only. Inside a region, each rank projects its own tokens, the projections are
gathered, and every rank pools all windows of all documents by the model's own code, each document by itself. So the
compressed KV is replicated on all ranks. It is one more step of the attention schedule
(:mod:`ds_cp.attention.compressed_kv`).

Compressed sparse attention (CSA) also has an indexer, which selects compressed KV per query (:mod:`.indexers`); heavily
compressed attention (HCA) has none.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

from ds_cp.agreement import BatchError
from ds_cp.attention.compressed_kv import CompressedKV
from ds_cp.attention.selected import SelectedKeys
from ds_cp.patches.transformers.ambient import current_region
from ds_cp.patches.transformers.attention import attention_forward
from ds_cp.patches.transformers.models.indexers import StoredKeys
from ds_cp.patches.transformers.models.region_mask import has_region_mask
from ds_cp.patches.transformers.models.replacement import Replacement
from ds_cp.region import Region


class Windows(NamedTuple):
    """The complete windows of all documents of a batch, T per batch row.

    Attributes:
        tokens: One tensor per group of documents of similar length, [documents, windows * rate] int64: indices of tokens in the
            flat batch [B * S]. Indices after the last window of a shorter document are arbitrary. If no document has a
            complete window, there is one arbitrary window: ZeRO expects gradients of all weights on all ranks, whatever
            their batch.
        pooled_index: [B, T] int64, index of each window among those of ``tokens``, counted over all its tensors.
        document_start: [B, T] int64, start of the document that each belongs to; -1 for padding.
        window_index: [B, T] int64, index of each window in its document.
    """

    tokens: tuple[torch.Tensor, ...]
    pooled_index: torch.Tensor
    document_start: torch.Tensor
    window_index: torch.Tensor


_windows: "weakref.WeakKeyDictionary[Region, dict[int, Windows]]" = weakref.WeakKeyDictionary()


def windows_of(region: Region, rate: int, device: torch.device) -> Windows:
    """The windows of ``rate`` tokens of a region's documents, computed once per batch."""
    by_rate = _windows.setdefault(region, {})
    if rate not in by_rate:
        by_rate[rate] = _compute_windows(region, rate, device)
    return by_rate[rate]


def _compute_windows(region: Region, rate: int, device: torch.device) -> Windows:
    tokens: list[torch.Tensor] = []
    per_row: list[list[np.ndarray]] = [[] for _ in region.documents.ranges]  # [3, windows] each: the last three fields
    pooled_so_far = 0
    for documents in region.documents.by_length():
        counts = [len(document.tokens) // rate for document in documents]
        if not any(counts):
            continue
        index = np.zeros((len(documents), max(counts) * rate), dtype=np.int64)
        for line, document, count in zip(index, documents, counts):
            line[: count * rate] = document.row * region.layout.seq_len + document.tokens[: count * rate]
            window_index = np.arange(count)
            document_start = np.full_like(window_index, document.start)
            per_row[document.row].append(np.stack([pooled_so_far + window_index, document_start, window_index]))
            pooled_so_far += max(counts)
        tokens.append(torch.from_numpy(index).to(device))
    if not tokens:
        tokens = [torch.zeros((1, rate), dtype=torch.int64, device=device)]
    rows = [np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), dtype=np.int64) for parts in per_row]
    table = np.zeros((3, len(rows), max(row.shape[1] for row in rows)), dtype=np.int64)
    table[1] = -1
    for i, row in enumerate(rows):
        table[:, i, : row.shape[1]] = row
    return Windows(tuple(tokens), *torch.from_numpy(table).to(device))


def compress(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    q_residual: torch.Tensor,
    position_ids: torch.Tensor,
    cache: Any,
    layer_idx: int,
) -> Any:
    """The forward of both compressors.

    Returns:
        Inside a region: the compressed KV of all documents [B, 1, T, d]; ``document_start`` and ``window_index`` as in
        :class:`Windows`; and the indexer's selection for this rank's queries, or None without an indexer.
    """
    region = current_region()
    if region is None:
        return original(hidden_states, q_residual, position_ids, cache, layer_idx)
    windows = windows_of(region, self.compress_rate, hidden_states.device)
    projected = torch.cat([self.kv_proj(hidden_states), self.gate_proj(hidden_states)], dim=-1)
    projected = region.gather(projected).flatten(0, 1)
    pooled = []
    for tokens in windows.tokens:
        # the compressor pools what its cache returns; its own input, here one row of zeros per document, is not used
        no_states = hidden_states.new_zeros((len(tokens), 1, hidden_states.size(-1)))
        no_positions = position_ids.new_zeros((len(tokens), 1))
        compressed_kv, _ = original(no_states, q_residual, no_positions, StoredKeys(projected[tokens]), layer_idx)
        pooled.append(compressed_kv.flatten(0, 2))
    keys = torch.cat(pooled)[windows.pooled_index]
    indexer = getattr(self, "indexer", None)
    selection = None if indexer is None else indexer(hidden_states, q_residual, position_ids, None, layer_idx)
    return keys.unsqueeze(1), windows.document_start, windows.window_index, selection


def attention(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
    position_ids: torch.Tensor,
    attention_mask: Any,
    cache: Any = None,
    **kwargs: Any,
) -> Any:
    """DeepseekV4Attention.forward: [B, L, hidden] to [B, L, hidden].

    Raises:
        BatchError: The caller's own mask, which does not apply to pooled windows.
    """
    if not has_region_mask(attention_mask, self):
        return original(hidden_states, position_embeddings, position_ids, attention_mask, cache=cache, **kwargs)
    if attention_mask.terms:
        raise BatchError(
            f"{type(self).__name__} pools windows of neighbouring tokens, which a mask of your own does not cut: tokens would see "
            "what it hides. Leave the mask out."
        )
    region, rotate = attention_mask.region, sys.modules[type(self).__module__].apply_rotary_pos_emb
    cos, sin = position_embeddings[self.rope_layer_type]
    if self.compressor is not None:
        # windows have positions from the start of their document, so queries and keys need the same
        positions = region.shard(region.position_in_document)
        cos, sin = self.compressor.rotary_emb(hidden_states, position_ids=positions, layer_type=self.rope_layer_type)
    q_residual = self.q_a_norm(self.q_a_proj(hidden_states))
    query = self.q_b_norm(self.q_b_proj(q_residual).unflatten(-1, (-1, self.head_dim)).transpose(1, 2))
    key = self.kv_norm(self.kv_proj(hidden_states)).unsqueeze(1)
    query, key = (rotate(x, cos, sin) for x in (query, key))
    compressed_kv = None
    if self.compressor is not None:
        compressed_kv = _compressed_kv(self, region, hidden_states, q_residual, position_ids)
    dropout = self.attention_dropout if self.training else 0.0
    out, _ = attention_forward(
        self, query, key, key, attention_mask, dropout, self.scaling, s_aux=self.sinks, compressed_kv=compressed_kv
    )
    out = rotate(out.transpose(1, 2), cos, -sin).transpose(1, 2)  # keys are the values, so the output is rotated back
    out = self.o_a_proj(out.reshape(*out.shape[:2], self.config.o_groups, -1)).flatten(2)
    return self.o_b_proj(out), None


@torch.compiler.disable
def _compressed_kv(
    self: Any, region: Region, hidden_states: torch.Tensor, q_residual: torch.Tensor, position_ids: torch.Tensor
) -> CompressedKV:
    """The compressed KV of a layer, with the indexer's selection if it has an indexer."""
    keys, document_start, window_index, selection = self.compressor(
        hidden_states, q_residual, position_ids, None, self.layer_idx
    )
    layout, rate = region.layout, self.compressor.compress_rate
    selected = None
    if selection is not None:
        max_windows = -(-layout.seq_len // rate)
        selected = SelectedKeys.from_local_queries(
            region.mesh, layout, selection, window_index, max_windows, self.num_heads
        )
    return CompressedKV(
        keys,
        document_start,
        window_index,
        rate,
        layout.pad(region.origin),
        layout.pad(region.position_in_document),
        selected,
    )


REPLACED: dict[str, Replacement] = {
    "DeepseekV4Attention": Replacement(attention),
    "DeepseekV4CSACompressor": Replacement(compress, role="compressor"),
    "DeepseekV4HCACompressor": Replacement(compress, role="compressor"),
}
