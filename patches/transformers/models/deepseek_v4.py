"""DeepSeek V4's compressed attention: beside the tokens of a window, queries see entries that stand for many tokens each.

What is pooled, one head per token, is projected where the tokens are and gathered; every rank pools all of it by the model's
own code, each document by itself, and holds the entries whole. Queries attend to them in the same softmax as to tokens.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

from ds_cp.agreement import BatchError
from ds_cp.attention.compressed_kv import CompressedKV
from ds_cp.attention.selected import Selected
from ds_cp.patches.transformers.ambient import current_region
from ds_cp.patches.transformers.attention import attention_forward
from ds_cp.patches.transformers.models.eager_only import runs_alone
from ds_cp.patches.transformers.models.indexers import StoredKeys
from ds_cp.patches.transformers.models.replacement import Replacement
from ds_cp.region import Region


class Windows(NamedTuple):
    """Where the complete windows of all documents are.

    Attributes:
        tokens: for documents of like length, [n, windows * rate] int64 in the flat batch [B * S]; behind the last window of
            a shorter document anything. One window of anything where there is none: ZeRO waits for the gradients of all
            weights on all ranks, whatever a group's batch.
        compressed_kv: [B, T] int64, the entries of each row among those of all documents, flat in the order of ``tokens``.
        start, number: [B, T] int64, as :class:`~ds_cp.attention.compressed_kv.CompressedKV` has them.
    """

    tokens: tuple[torch.Tensor, ...]
    compressed_kv: torch.Tensor
    start: torch.Tensor
    number: torch.Tensor


_windows: "weakref.WeakKeyDictionary[Region, dict[int, Windows]]" = weakref.WeakKeyDictionary()


def windows_of(region: Region, rate: int, device: torch.device) -> Windows:
    """The windows of a rate, found once per batch."""
    known = _windows.setdefault(region, {})
    if rate not in known:
        known[rate] = _find(region, rate, device)
    return known[rate]


def _find(region: Region, rate: int, device: torch.device) -> Windows:
    tokens, found, before = [], [[] for _ in region.documents.ranges], 0
    for documents in region.documents.by_length():
        windows = [len(each.tokens) // rate for each in documents]
        if not any(windows):
            continue
        index = np.zeros((len(documents), max(windows) * rate), dtype=np.int64)
        for line, each, count in zip(index, documents, windows):
            line[: count * rate] = each.row * region.layout.seq_len + each.tokens[: count * rate]
            number = np.arange(count)
            found[each.row].append(np.stack([before + number, np.full_like(number, each.start), number]))
            before += max(windows)
        tokens.append(torch.from_numpy(index).to(device))
    tokens = tokens or [torch.zeros((1, rate), dtype=torch.int64, device=device)]
    rows = [np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), dtype=np.int64) for parts in found]
    table = np.zeros((3, len(rows), max(part.shape[1] for part in rows)), dtype=np.int64)
    table[1] = -1
    for row, part in enumerate(rows):
        table[:, row, : part.shape[1]] = part
    return Windows(tuple(tokens), *torch.from_numpy(table).to(device))


def compress(original: Callable, self: Any, hidden_states, q_residual, position_ids, cache, layer_idx):
    """A compressor: inside a region the entries of all documents [B, 1, T, d], where they are, and what the indexer has chosen
    of them."""
    region = current_region()
    if region is None:
        return original(hidden_states, q_residual, position_ids, cache, layer_idx)
    found = windows_of(region, self.compress_rate, hidden_states.device)
    projected = torch.cat([self.kv_proj(hidden_states), self.gate_proj(hidden_states)], dim=-1)
    pooled, whole = [], region.gather(projected).flatten(0, 1)
    for tokens in found.tokens:
        nothing = hidden_states.new_zeros((len(tokens), 1, hidden_states.size(-1)))
        zero = position_ids.new_zeros((len(tokens), 1))
        compressed_kv, _ = original(nothing, q_residual, zero, StoredKeys(whole[tokens]), layer_idx)
        pooled.append(compressed_kv.flatten(0, 2))
    keys = torch.cat(pooled)[found.compressed_kv]
    indexer = getattr(self, "indexer", None)
    chosen = None if indexer is None else indexer(hidden_states, q_residual, position_ids, None, layer_idx)
    return keys.unsqueeze(1), found.start, found.number, chosen


def attention(
    original: Callable,
    self: Any,
    hidden_states,
    position_embeddings,
    position_ids,
    attention_mask,
    cache=None,
    **kwargs,
):
    """DeepseekV4Attention: [B, L, hidden] to the same."""
    if runs_alone(self, attention_mask):
        return original(hidden_states, position_embeddings, position_ids, attention_mask, cache=cache, **kwargs)
    if attention_mask.terms:
        raise BatchError(
            f"{type(self).__name__} pools windows of neighbouring tokens, which a mask of your own does not cut: tokens would see "
            "what it hides. Leave the mask out."
        )
    region, rotate = attention_mask.region, sys.modules[type(self).__module__].apply_rotary_pos_emb
    angles, kind = position_embeddings[self.rope_layer_type], self.rope_layer_type
    if self.compressor is not None:  # entries are counted from their document's start, so tokens are, too
        mine = region.shard(region.positions)
        angles = self.compressor.rotary_emb(hidden_states, position_ids=mine, layer_type=kind)
    cos, sin = angles
    residual = self.q_a_norm(self.q_a_proj(hidden_states))
    query = self.q_b_norm(self.q_b_proj(residual).unflatten(-1, (-1, self.head_dim)).transpose(1, 2))
    key = self.kv_norm(self.kv_proj(hidden_states)).unsqueeze(1)
    query, key = (rotate(x, cos, sin) for x in (query, key))
    compressed_kv = (
        None if self.compressor is None else _compressed_kv(self, region, hidden_states, residual, position_ids)
    )
    rate = self.attention_dropout if self.training else 0.0
    out, _ = attention_forward(
        self, query, key, key, attention_mask, rate, self.scaling, s_aux=self.sinks, compressed_kv=compressed_kv
    )
    out = rotate(out.transpose(1, 2), cos, -sin).transpose(1, 2)  # keys are values, so these were rotated
    out = self.o_a_proj(out.reshape(*out.shape[:2], self.config.o_groups, -1)).flatten(2)
    return self.o_b_proj(out), None


@torch.compiler.disable
def _compressed_kv(self: Any, region: Region, hidden_states, residual, position_ids) -> CompressedKV:
    keys, start, number, chosen = self.compressor(hidden_states, residual, position_ids, None, self.layer_idx)
    cut, rate = region.layout, self.compressor.compress_rate
    selected = None
    if chosen is not None:
        selected = Selected.by_this_rank(region.mesh, cut, chosen, number, -(-cut.seq_len // rate), self.num_heads)
    return CompressedKV(keys, start, number, rate, cut.pad(region.origin), cut.pad(region.positions), selected)


REPLACED: dict[str, Replacement] = {
    "DeepseekV4Attention": Replacement(attention),
    "DeepseekV4CSACompressor": Replacement(compress, role="compressor"),
    "DeepseekV4HCACompressor": Replacement(compress, role="compressor"),
}
