"""T5, mT5 and UMT5: attention outside the attention interface, with a learned bias per bucket of distances.

The classes look the bias up for all pairs of tokens that they see, [1, H, S, S]. Inside a region, the functions below project
as the class does and pass the table itself to the attention function, as a :class:`~ds_cp.attention.terms.BucketedBias`
term that looks up the pairs of each tile. Cross attention gets a :class:`~ds_cp.patches.transformers.masks.CrossMask`
and has no bias.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import torch

from ds_cp.attention.score import Term
from ds_cp.attention.terms import BucketedBias
from ds_cp.patches.transformers.attention import attention_forward
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor
from ds_cp.patches.transformers.masks import CrossMask
from ds_cp.patches.transformers.models.replacement import Replacement

MODEL_TYPES = frozenset({"mt5", "t5", "umt5"})
"""Model types whose relative position bias is computed here."""


def t5(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    mask: Any = None,
    key_value_states: torch.Tensor | None = None,
    position_bias: Any = None,
    **kwargs: Any,
) -> Any:
    """T5Attention.forward and MT5Attention.forward.

    The first layer owns the table. T5 returns the bias [1, H, S, S] from it, as ``position_bias`` of the later layers; inside a
    region that argument is the first layer's module instead.
    """
    if not isinstance(mask, (MaskDescriptor, CrossMask)):
        return original(hidden_states, mask, key_value_states, position_bias, **kwargs)
    table_owner = self if position_bias is None else position_bias
    options = {name: getattr(table_owner, f"relative_attention_{name}") for name in ("num_buckets", "max_distance")}
    bucket = partial(table_owner._relative_position_bucket, bidirectional=not table_owner.is_decoder, **options)
    return _attend(self, table_owner, bucket, hidden_states, key_value_states, mask), table_owner, None


def umt5(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    cache: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    """UMT5Attention.forward: each layer has a table of its own."""
    if not isinstance(attention_mask, (MaskDescriptor, CrossMask)):
        return original(hidden_states, encoder_hidden_states, cache, attention_mask, **kwargs)
    bucket = self._relative_position_bucket
    return _attend(self, self, bucket, hidden_states, encoder_hidden_states, attention_mask), None


def _attend(
    self: Any,
    table_owner: Any,
    bucket: Callable[[torch.Tensor], torch.Tensor],
    hidden_states: torch.Tensor,
    encoder_states: torch.Tensor | None,
    mask: MaskDescriptor | CrossMask,
) -> torch.Tensor:
    """T5's attention without its residual: [B, L, hidden] to [B, L, hidden].

    Args:
        table_owner: The attention module with the table of the bias. It may have none, as in cross attention.
        bucket: The bucket of each relative position, key minus query.
        encoder_states: [B, keys, hidden], for cross attention.
    """
    key_value_states = hidden_states if encoder_states is None else encoder_states
    query, key, value = (
        projection(states).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        for projection, states in ((self.q, hidden_states), (self.k, key_value_states), (self.v, key_value_states))
    )
    terms: tuple[Term, ...] = ()
    if table_owner.has_relative_attention_bias:
        # A call of the embedding, so that ZeRO-3 gathers its weight; in every layer, so that each checkpoint sees its use.
        buckets = torch.arange(table_owner.relative_attention_num_buckets, device=query.device)
        terms = (BucketedBias(table_owner.relative_attention_bias(buckets), bucket),)
    dropout = self.dropout if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, mask, dropout, 1.0, terms=terms)
    return self.o(out.flatten(2))


REPLACED: dict[str, Replacement] = {
    "T5Attention": Replacement(t5),
    "MT5Attention": Replacement(t5),
    "UMT5Attention": Replacement(umt5),
}
