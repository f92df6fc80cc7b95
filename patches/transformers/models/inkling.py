"""Inkling: a bias on the scores that depends on the query and on the distance to the key.

Each query has weights that mix learned profiles over distances (``proj``) into its bias. The classes compute the bias of all
pairs of tokens that they see, [B, H, S, S]. Inside a region the parts of the bias are returned instead, as a
:class:`~ds_cp.patches.transformers.attention.QueryBias`: weights and profiles. The attention function concatenates the
weights to the last dimension of Q, so that they follow Q through exchange, checkpointing and gradients.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ds_cp.patches.transformers.ambient import current_region
from ds_cp.patches.transformers.attention import QueryBias, attention_forward
from ds_cp.patches.transformers.models.region_mask import has_region_mask
from ds_cp.patches.transformers.models.replacement import Replacement


def attention(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: Any,
    conv_mask: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> Any:
    """InklingAttention.forward (the first Inkling only): [B, L, hidden] to [B, L, hidden].

    The class counts positions from its first token, for the bias and for its log scale. Here the scale takes positions in the
    whole document.
    """
    if not has_region_mask(attention_mask, self):
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
        length_so_far = (region.shard(region.position_in_document) + 1).to(hidden_states.device, precise)
        scale = 1 + self.config.log_scaling_alpha * (length_so_far / self.config.log_scaling_n_floor).clamp(min=1).log()
        query = (query * scale[:, None, :, None]).to(query.dtype)
        weights = (weights * scale[:, :, None, None]).to(weights.dtype)  # scales the bias, which is linear in them
    dropout = self.attention_dropout if self.training else 0.0
    bias = self.rel_logits_proj(weights, None, None)
    out, _ = attention_forward(self, query, key, value, attention_mask, dropout, self.scaling, position_bias=bias)
    return self.o_proj(out.flatten(2)), None


def bias_from_weights(
    original: Callable[..., Any],
    self: Any,
    relative_states: torch.Tensor,
    query_positions: torch.Tensor | None,
    key_positions: torch.Tensor | None,
) -> Any:
    """InklingRelativeLogits.forward, from weights [B, L, H, c]. :func:`attention` calls it without positions."""
    if query_positions is not None:
        return original(relative_states, query_positions, key_positions)
    return QueryBias(relative_states.transpose(1, 2), _profiles(self))


def bias_from_hidden_states(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    relative_distance: torch.Tensor,
    position_ids: torch.Tensor,
) -> Any:
    """Inkling2RelativePositionBias.forward, from hidden states [B, L, hidden]."""
    if current_region() is None:
        return original(hidden_states, relative_distance, position_ids)
    weights = self.linear(hidden_states).unflatten(-1, (self.num_heads, -1))
    return QueryBias(self.norm(weights, position_ids).transpose(1, 2), _profiles(self))


def _profiles(self: Any) -> torch.Tensor:
    """A copy of the profiles [c, extent]: ZeRO-3 releases the parameter when the module returns."""
    copy: torch.Tensor = self.proj.clone()
    return copy


REPLACED: dict[str, Replacement] = {
    "InklingAttention": Replacement(attention),
    "InklingRelativeLogits": Replacement(bias_from_weights, role="bias"),
    "Inkling2RelativePositionBias": Replacement(bias_from_hidden_states, role="bias"),
    "Inkling2LoopRelativePositionBias": Replacement(bias_from_hidden_states, role="bias"),
}
