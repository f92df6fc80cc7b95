"""Llama 4: layers without rotary embeddings scale their queries by the position of the token ("temperature tuning").

The class counts positions from the first token that it sees. Inside a region the scale is computed from positions in the
whole document and passed to the attention function as ``query_scale``; everything else is the class's own forward.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor
from ds_cp.patches.transformers.models.replacement import Replacement


def attention(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Llama4TextAttention.forward."""
    arguments = hidden_states, position_embeddings, attention_mask, *args
    if not isinstance(attention_mask, MaskDescriptor) or self.use_rope or not self.attn_temperature_tuning:
        return original(*arguments, **kwargs)
    region = attention_mask.region
    precise = torch.promote_types(hidden_states.dtype, torch.float32)
    index = region.shard(region.position_in_document).to(hidden_states.device, precise)
    scale = torch.log1p(torch.floor((index + 1) / self.floor_scale)) * self.attn_scale + 1
    self.attn_temperature_tuning = False  # during this call only: the class would count from the shard's first token
    try:
        return original(*arguments, query_scale=scale[:, None, :, None], **kwargs)
    finally:
        self.attn_temperature_tuning = True


REPLACED: dict[str, Replacement] = {"Llama4TextAttention": Replacement(attention, fills_cache=True)}
