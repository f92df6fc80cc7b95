"""Model families whose attention counts tokens by itself: a forward per attention class, bound to one model's modules.

bloom, falcon and mpt compute attention without transformers' interface and build ALiBi from the tokens that they see;
llama4 scales queries by their index. Inside a region these must come from the whole sequence. Those that compute plain
attention by themselves are in :mod:`.plain`.
"""

from __future__ import annotations

import sys
from functools import partial
from types import MethodType
from typing import Any, Callable

import torch

from ds_cp.attention.terms import ALiBi, BucketedBias
from ds_cp.patches.transformers.attention import attention_forward
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor
from ds_cp.patches.transformers.masks import CrossMask
from ds_cp.patches.transformers.models import deepseek_v4, eager_only, inkling, positions, sparse_attention, xlm
from ds_cp.patches.transformers.models.replacement import Replacement


def bloom(original: Callable, self: Any, hidden_states, residual, alibi, attention_mask, **kwargs):
    """BloomAttention: [B, L, hidden] to [B, L, hidden], the residual added."""
    if not isinstance(attention_mask, MaskDescriptor):
        return original(hidden_states, residual, alibi, attention_mask, **kwargs)
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    out, _ = attention_forward(
        self, query, key, value, attention_mask, _rate(self), self.inv_norm_factor,
        terms=(ALiBi(_slopes(self, query), attention_mask.region.positions),),
    )  # fmt: skip
    out = torch.nn.functional.dropout(self.dense(out.flatten(2)), self.hidden_dropout, self.training)
    return out + residual, None


def falcon(original: Callable, self: Any, hidden_states, alibi, attention_mask, position_embeddings=None, **kwargs):
    """FalconAttention, rotary or with ALiBi, which falcon rounds to bf16 and scales with the scores."""
    if not isinstance(attention_mask, MaskDescriptor):
        # under another name than "sdpa" falcon would add its ALiBi, which is in the mask already, a second time
        name, self.config._attn_implementation = self.config._attn_implementation, "sdpa"
        try:
            return original(hidden_states, alibi, attention_mask, position_embeddings=position_embeddings, **kwargs)
        finally:
            self.config._attn_implementation = name
    query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    terms, dropout = (), _rate(self)
    if alibi is None:
        rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
        (query, key), dropout = rotate(query, key, *position_embeddings), 0.0  # falcon drops with ALiBi only
    else:
        positions = attention_mask.region.positions
        terms = (ALiBi(_slopes(self, query), positions, self.inv_norm_factor, torch.bfloat16),)
    scale = self.head_dim**-0.5 if alibi is None else self.inv_norm_factor
    out, _ = attention_forward(self, query, key, value, attention_mask, dropout, scale, terms=terms)
    return self.dense(out.flatten(2)), None


def mpt(original: Callable, self: Any, hidden_states, position_bias, cache=None, attention_mask=None, **kwargs):
    """MptAttention."""
    if not isinstance(attention_mask, MaskDescriptor):
        return original(hidden_states, position_bias, cache, attention_mask, **kwargs)
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, dim=-1))
    terms = ()
    if position_bias is not None:
        slopes = position_bias[:, 0, 1] - position_bias[:, 0, 0]
        terms = (ALiBi(slopes, attention_mask.region.positions),)
    dropout = self.attn_dropout_p if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, attention_mask, dropout, self.softmax_scale, terms=terms)
    return self.out_proj(out.flatten(2)), None


def llama4(original: Callable, self: Any, hidden_states, position_embeddings, attention_mask, *args, **kwargs):
    """Llama4TextAttention: queries of layers without rotary positions grow with their index in the document."""
    arguments = hidden_states, position_embeddings, attention_mask, *args
    if not isinstance(attention_mask, MaskDescriptor) or self.use_rope or not self.attn_temperature_tuning:
        return original(*arguments, **kwargs)
    region = attention_mask.region
    precise = torch.promote_types(hidden_states.dtype, torch.float32)
    index = region.shard(region.positions).to(hidden_states.device, precise)
    scale = torch.log1p(torch.floor((index + 1) / self.floor_scale)) * self.attn_scale + 1
    self.attn_temperature_tuning = False  # for this call: it would count from the shard's first token
    try:
        return original(*arguments, query_scale=scale[:, None, :, None], **kwargs)
    finally:
        self.attn_temperature_tuning = True


def t5(original: Callable, self: Any, hidden_states, mask=None, key_value_states=None, position_bias=None, **kwargs):
    """T5Attention and its like: the first layer's bias module goes from layer to layer instead of S x S."""
    if not isinstance(mask, (MaskDescriptor, CrossMask)):
        return original(hidden_states, mask, key_value_states, position_bias, **kwargs)
    owner = self if position_bias is None else position_bias
    numbers = {name: getattr(owner, f"relative_attention_{name}") for name in ("num_buckets", "max_distance")}
    bucket = partial(owner._relative_position_bucket, bidirectional=not owner.is_decoder, **numbers)
    return _by_bucket(self, owner, bucket, hidden_states, key_value_states, mask), owner, None


def umt5(
    original: Callable, self: Any, hidden_states, encoder_hidden_states=None, cache=None, attention_mask=None, **kwargs
):
    """UMT5Attention: each layer has a bias of its own."""
    if not isinstance(attention_mask, (MaskDescriptor, CrossMask)):
        return original(hidden_states, encoder_hidden_states, cache, attention_mask, **kwargs)
    bucket = self._relative_position_bucket
    return _by_bucket(self, self, bucket, hidden_states, encoder_hidden_states, attention_mask), None


def _by_bucket(
    self: Any, owner: Any, bucket: Callable, hidden: torch.Tensor, encoder_states: torch.Tensor | None, mask: Any
):
    """T5's attention [B, L, hidden] with the bias of ``owner``, if it has one; to ``encoder_states`` [B, keys, hidden]
    where that is given."""
    states = hidden if encoder_states is None else encoder_states
    query, key, value = (
        projection(arguments).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        for projection, arguments in ((self.q, hidden), (self.k, states), (self.v, states))
    )
    terms = ()
    if owner.has_relative_attention_bias:
        # asked of the module, so that ZeRO-3 gathers it; in each layer anew, so that any kind of checkpointing sees its use
        table = owner.relative_attention_bias(torch.arange(owner.relative_attention_num_buckets, device=query.device))
        terms = (BucketedBias(table, bucket),)
    dropout = self.dropout if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, mask, dropout, 1.0, terms=terms)
    return self.o(out.flatten(2))


REPLACED: dict[str, Replacement] = {
    "T5Attention": Replacement(t5),
    "MT5Attention": Replacement(t5),
    "UMT5Attention": Replacement(umt5),
    "BloomAttention": Replacement(bloom),
    "FalconAttention": Replacement(falcon),
    "MptAttention": Replacement(mpt),
    "Llama4TextAttention": Replacement(llama4, fills_cache=True),
    **eager_only.REPLACED,
    **xlm.REPLACED,
    **sparse_attention.REPLACED,
    **deepseek_v4.REPLACED,
    **inkling.REPLACED,
}
"""By class; by module and class where others have the same name."""

BIAS_HANDLED = frozenset({"mt5", "t5", "umt5"})
"""Model types whose relative position bias comes from a forward of this file."""


def replacement_of(kind: type) -> Replacement | None:
    """What runs in the place of a method of a class of transformers."""
    if not kind.__module__.startswith("transformers."):
        return None
    return REPLACED.get(kind.__name__) or REPLACED.get(f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}")


def attach(decoder: torch.nn.Module) -> Callable[[], None]:
    """Bind the forwards that a decoder's attention modules need, and tell it positions; returns what undoes it."""
    known = {module: found for module in decoder.modules() if (found := replacement_of(type(module)))}
    choosing = [module for module, found in known.items() if found.role in ("indexer", "compressor")]
    others = [positions.attach(decoder), xlm.attach(decoder), sparse_attention.attach(choosing)]
    for module, found in known.items():
        setattr(module, found.method, MethodType(partial(_call, found), module))

    def undo() -> None:
        for module, found in known.items():
            module.__dict__.pop(found.method, None)
        for forget in others:
            forget()

    return undo


def _call(replacement: Replacement, self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    # the class's own method is looked up here: a deep copy of the model must run on the copy's weights
    return replacement.run(MethodType(getattr(type(self), replacement.method), self), self, *args, **kwargs)


def _slopes(module: torch.nn.Module, query: torch.Tensor) -> torch.Tensor:
    """[H], from the model's own table: the bias of the second key of two."""
    build = sys.modules[type(module).__module__].build_alibi_tensor
    two = torch.ones(1, 2, dtype=torch.long, device=query.device)
    return build(two, module.num_heads, torch.float32)[:, 0, 1]


def _rate(module: torch.nn.Module) -> float:
    return module.attention_dropout.p if module.training else 0.0
