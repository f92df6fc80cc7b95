"""Attention of what is not shared: outside of a region, and over keys that every rank holds whole. As transformers' SDPA."""

from __future__ import annotations

import sys
from typing import Any, Callable

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from ds_cp.patches.transformers.models import sparse_attention

ADDITIVE_MASK = frozenset(
    "bloom deepseek_v4 mpt trocr xglm mvp megatron-bert rembert big_bird roformer gpt_neo gpt_neox_japanese".split()
)
"""Model types whose own attention, which runs outside a region, adds its mask to the scores."""


def mask_maker(config: Any) -> Callable:
    """transformers' function that makes a model's masks."""
    return eager_mask if getattr(config, "model_type", None) in ADDITIVE_MASK else sdpa_mask


def sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA, or the model's own eager attention for what SDPA would drop; [B, L, H, dv]."""
    mask = sparse_attention.hide(module, mask, query, key, indices, block_indices, kwargs.get("position_ids"))
    dropped = {"softcap": softcap, "s_aux": s_aux, "sinks": sinks}
    extra = {name: given for name, given in dropped.items() if given is not None}
    run = sdpa_attention_forward
    if extra:
        causal = kwargs.get("is_causal") is not False  # False for cross attention
        run, mask = sys.modules[type(module).__module__].eager_attention_forward, _additive(mask, query, key, causal)
    return run(module, query, key, value, mask, dropout=dropout, scaling=scaling, **extra, **kwargs)


def _additive(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, causal: bool) -> torch.Tensor | None:
    """SDPA's mask as eager attention wants it: None means causal to one, unless that was told otherwise, nothing to the other."""
    length = query.size(-2)
    if mask is None and causal and length > 1:
        mask = torch.ones(length, key.size(-2), dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
