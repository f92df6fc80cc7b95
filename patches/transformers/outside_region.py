"""Attention that is not sharded: outside of a region, and cross attention over replicated keys. As transformers' SDPA."""

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
"""Model types that do not use transformers' attention interface and add their mask to the scores."""


def mask_function_of(config: Any) -> Callable:
    """transformers' function that builds a model's masks, by the model's config."""
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
    """SDPA, or the model's own eager attention where SDPA would ignore a softcap or sinks. Returns [B, L, H, dv], None."""
    mask = sparse_attention.mask_unselected(
        module, mask, query, key, indices, block_indices, kwargs.get("position_ids")
    )
    ignored_by_sdpa = {"softcap": softcap, "s_aux": s_aux, "sinks": sinks}
    kwargs |= {name: argument for name, argument in ignored_by_sdpa.items() if argument is not None}
    attention_function: Callable = sdpa_attention_forward
    if not kwargs.keys().isdisjoint(ignored_by_sdpa):
        attention_function = sys.modules[type(module).__module__].eager_attention_forward
        is_causal = kwargs.get("is_causal") is not False  # cross attention passes False
        mask = _additive(mask, query, key, is_causal)
    return attention_function(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)


def _additive(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, is_causal: bool
) -> torch.Tensor | None:
    """A mask for eager attention from one for SDPA.

    To SDPA, None means causal unless ``is_causal`` is False; to eager attention it means that all keys are seen.
    """
    length = query.size(-2)
    if mask is None and is_causal and length > 1:
        mask = torch.ones(length, key.size(-2), dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
