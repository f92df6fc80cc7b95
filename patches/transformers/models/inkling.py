"""Inkling: each query mixes its bias by distance out of learned profiles.

Its modules make that bias for all pairs of the tokens that they see. Inside a region they hand on what it is made of, and
the attention function lets the weights of the mix travel with the queries.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ds_cp.patches.transformers.ambient import current_region
from ds_cp.patches.transformers.attention import QueryBias, attention_forward
from ds_cp.patches.transformers.models.eager_only import runs_alone
from ds_cp.patches.transformers.models.replacement import Replacement


def attention(original: Callable, self: Any, hidden_states, attention_mask, conv_mask=None, cache=None, **kwargs):
    """InklingAttention: [B, L, hidden] to the same; it counts tokens by itself, for the bias and for its log scale."""
    if runs_alone(self, attention_mask):
        return original(hidden_states, attention_mask, conv_mask=conv_mask, cache=cache, **kwargs)
    query, key, value = (
        x.unflatten(-1, (-1, self.head_dim))
        for x in (
            self.q_proj(hidden_states),
            self.k_sconv(self.k_proj(hidden_states), conv_mask=conv_mask),
            self.v_sconv(self.v_proj(hidden_states), conv_mask=conv_mask),
        )
    )
    query, key, value = (x.transpose(1, 2) for x in (self.q_norm(query), self.k_norm(key), value))
    weights = self.r_proj(hidden_states).unflatten(-1, (self.num_heads, -1))
    if not self.is_sliding and self.config.log_scaling_n_floor is not None:
        region = attention_mask.region
        precise = torch.promote_types(hidden_states.dtype, torch.float32)
        seen = (region.shard(region.positions) + 1).to(hidden_states.device, precise)
        scale = 1 + self.config.log_scaling_alpha * (seen / self.config.log_scaling_n_floor).clamp(min=1).log()
        query = (query * scale[:, None, :, None]).to(query.dtype)
        weights = (weights * scale[:, :, None, None]).to(weights.dtype)  # the bias is linear in them
    rate = self.attention_dropout if self.training else 0.0
    bias = self.rel_logits_proj(weights, None, None)
    out, _ = attention_forward(self, query, key, value, attention_mask, rate, self.scaling, position_bias=bias)
    return self.o_proj(out.flatten(2)), None


def bias_of_weights(original: Callable, self: Any, relative_states, query_positions, key_positions):
    """InklingRelativeLogits; without positions what the bias is made of."""
    if query_positions is not None:
        return original(relative_states, query_positions, key_positions)
    return QueryBias(relative_states.transpose(1, 2), self.proj.clone())  # a copy: ZeRO-3 takes the parameter back


def bias_of_states(original: Callable, self: Any, hidden_states, relative_distance, position_ids):
    """Inkling2RelativePositionBias."""
    if current_region() is None:
        return original(hidden_states, relative_distance, position_ids)
    weights = self.linear(hidden_states).unflatten(-1, (self.num_heads, -1))
    return QueryBias(self.norm(weights, position_ids).transpose(1, 2), self.proj.clone())


REPLACED: dict[str, Replacement] = {
    "InklingAttention": Replacement(attention),
    "InklingRelativeLogits": Replacement(bias_of_weights, role="bias"),
    "Inkling2RelativePositionBias": Replacement(bias_of_states, role="bias"),
    "Inkling2LoopRelativePositionBias": Replacement(bias_of_states, role="bias"),
}
