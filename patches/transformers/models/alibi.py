"""BLOOM, Falcon and MPT: attention outside the attention interface, with ALiBi counted from the tokens that a rank sees.

Each function below replaces the forward of one attention class. Inside a region it projects as the class does and calls
:func:`~ds_cp.patches.transformers.attention.attention_forward` with an :class:`~ds_cp.attention.terms.ALiBi` term, which
takes positions in the whole document. Falcon models with rotary embeddings need the call only.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

import torch

from ds_cp.attention.score import Term
from ds_cp.attention.terms import ALiBi
from ds_cp.patches.transformers.attention import attention_forward
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor
from ds_cp.patches.transformers.models.replacement import Replacement


def bloom(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> Any:
    """BloomAttention.forward: [B, L, hidden] to [B, L, hidden], with the residual added."""
    if not isinstance(attention_mask, MaskDescriptor):
        return original(hidden_states, residual, alibi, attention_mask, **kwargs)
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    terms = (ALiBi(_slopes(self, query.device), attention_mask.region.position_in_document),)
    out, _ = attention_forward(
        self, query, key, value, attention_mask, _dropout(self), self.inv_norm_factor, terms=terms
    )
    out = torch.nn.functional.dropout(self.dense(out.flatten(2)), self.hidden_dropout, self.training)
    return out + residual, None


def falcon(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: Any,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """FalconAttention.forward, with rotary embeddings or with ALiBi.

    Falcon rounds the ALiBi bias to bf16 and scales it together with the scores.
    """
    if not isinstance(attention_mask, MaskDescriptor):
        # the mask contains the bias already; unless the implementation is called "sdpa", Falcon adds it a second time
        name, self.config._attn_implementation = self.config._attn_implementation, "sdpa"
        try:
            return original(hidden_states, alibi, attention_mask, position_embeddings=position_embeddings, **kwargs)
        finally:
            self.config._attn_implementation = name
    query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    terms: tuple[Term, ...] = ()
    if alibi is None:
        rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *position_embeddings)  # type: ignore[misc]  # not None without ALiBi
        dropout, scale = 0.0, self.head_dim**-0.5  # Falcon applies attention dropout with ALiBi only
    else:
        positions = attention_mask.region.position_in_document
        terms = (ALiBi(_slopes(self, query.device), positions, self.inv_norm_factor, torch.bfloat16),)
        dropout, scale = _dropout(self), self.inv_norm_factor
    out, _ = attention_forward(self, query, key, value, attention_mask, dropout, scale, terms=terms)
    return self.dense(out.flatten(2)), None


def mpt(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor | None,
    cache: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    """MptAttention.forward: [B, L, hidden] to [B, L, hidden]; ``position_bias`` is [H, 1, keys]."""
    if not isinstance(attention_mask, MaskDescriptor):
        return original(hidden_states, position_bias, cache, attention_mask, **kwargs)
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, dim=-1))
    terms: tuple[Term, ...] = ()
    if position_bias is not None:
        slopes = position_bias[:, 0, 1] - position_bias[:, 0, 0]
        terms = (ALiBi(slopes, attention_mask.region.position_in_document),)
    dropout = self.attn_dropout_p if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, attention_mask, dropout, self.softmax_scale, terms=terms)
    return self.out_proj(out.flatten(2)), None


def _slopes(module: Any, device: torch.device) -> torch.Tensor:
    """The ALiBi slope of each head, [H], by the model's own code: with two keys, it is the bias of the second."""
    build = sys.modules[type(module).__module__].build_alibi_tensor
    two_keys = torch.ones(1, 2, dtype=torch.long, device=device)
    slopes: torch.Tensor = build(two_keys, module.num_heads, torch.float32)[:, 0, 1]
    return slopes


def _dropout(module: Any) -> float:
    return float(module.attention_dropout.p) if module.training else 0.0


REPLACED: dict[str, Replacement] = {
    "BloomAttention": Replacement(bloom),
    "FalconAttention": Replacement(falcon),
    "MptAttention": Replacement(mpt),
}
