"""Doge: attention with a learned bias per key and key/value head ("dynamic mask").

The class expands the bias to [B, H, S, S] and adds it to the mask. Inside a region the bias becomes one more channel of Q
and K, (q, 1) and (k, bias / scale), so that it follows K through the exchange between ranks and no S x S tensor exists.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

import torch
from torch.nn import functional as F

from ds_cp.agreement import BatchError
from ds_cp.patches.transformers.attention import attention_forward
from ds_cp.patches.transformers.models.region_mask import has_region_mask
from ds_cp.patches.transformers.models.replacement import Replacement


def attention(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> Any:
    """DogeAttention.forward: [B, L, hidden] to [B, L, hidden].

    Raises:
        BatchError: Rows are longer than ``keep_window_size``, above which Doge attends to the keys with the largest bias only.
    """
    if not has_region_mask(attention_mask, self):
        # transformers 5.19 calls it past_key_values, which is among kwargs then
        of_cache = () if cache is None else (cache,)
        return original(hidden_states, position_embeddings, attention_mask, *of_cache, **kwargs)
    seq_len = attention_mask.region.layout.seq_len
    if seq_len > self.keep_window_size:
        raise BatchError(
            f"{type(self).__name__} keeps the {self.keep_window_size} keys of the largest bias (keep_window_size) in rows longer "
            f"than that, and these have {seq_len} tokens: each rank would choose among its own. Use shorter rows."
        )
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    query, key, value = (x.transpose(1, 2) for x in (self.q_norm(query), self.k_norm(key), value))
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    bias = self.dt_proj(value.transpose(1, 2).flatten(2))  # [B, L, h]
    bias = torch.exp(self.A * F.softplus(bias)).transpose(-1, -2).unsqueeze(-1)
    query = torch.cat([query, torch.ones_like(query[..., :1])], dim=-1)
    key = torch.cat([key, bias.to(key.dtype) / self.scaling], dim=-1)
    to_multiple_of_8 = (0, -query.size(-1) % 8)  # flash kernels require it
    query, key = (F.pad(x, to_multiple_of_8) for x in (query, key))
    dropout = self.attention_dropout if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, attention_mask, dropout, self.scaling)
    return self.o_proj(out.flatten(2)), None


REPLACED: dict[str, Replacement] = {"DogeAttention": Replacement(attention)}
