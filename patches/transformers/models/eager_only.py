"""Models with eager attention only: TrOCR, XGLM, MVP; MegatronBERT, RemBERT, BigBird, RoFormer; GPT-NeoX-Japanese, GPT-Neo
and OpenAI GPT.

Their classes compute softmax attention themselves instead of calling the attention interface, so each rank would attend to
its own shard. Each function below does what the class does apart from softmax attention, and calls
:func:`~ds_cp.patches.transformers.attention.attention_forward`. It replaces the method that gets q, k and v (``_attn``)
where the class has one, else the forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

import torch

from ds_cp.agreement import BatchError
from ds_cp.mask.rules import CAUSAL, OPEN, Band
from ds_cp.patches.transformers.attention import attention_forward
from ds_cp.patches.transformers.models.region_mask import has_region_mask, mask_of_current_region
from ds_cp.patches.transformers.models.replacement import Replacement


def bart_like(
    original: Callable[..., Any], self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """TrOCRAttention, XGLMAttention, MvpAttention: BART's attention from before the interface. [B, L, hidden] to [B, L, hidden].

    Raises:
        BatchError: MVP's prompts (``use_prompt``) are prepended to the keys.
    """
    mask = kwargs.get("attention_mask")
    if not has_region_mask(mask, self):
        return original(hidden_states, *args, **kwargs)
    if kwargs.get("attn_prompt") is not None:
        raise BatchError(
            f"{type(self).__name__} puts prompts before the keys (use_prompt): they are no tokens of the sequence that is "
            "shared. Train without them."
        )
    other_states = kwargs.get("key_value_states")
    key_value_states = hidden_states if other_states is None else other_states
    query, key, value = (
        x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        for x in (self.q_proj(hidden_states), self.k_proj(key_value_states), self.v_proj(key_value_states))
    )
    dropout = self.dropout if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, mask, dropout, self.scaling)
    return self.out_proj(out.flatten(2)), None


def bert_like(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """MegatronBERT, RemBERT, RoFormer and BigBird's full attention: BERT's attention from before the interface.

    RoFormer's rotary embeddings apply to self attention only, and to V if ``rotary_value`` is set.
    """
    if not has_region_mask(attention_mask, self):
        return original(hidden_states, attention_mask, *args, **kwargs)
    encoder_states, rotary = kwargs.get("encoder_hidden_states"), kwargs.get("sinusoidal_pos")
    key_value_states = hidden_states if encoder_states is None else encoder_states
    query, key, value = (
        x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
        for x in (self.query(hidden_states), self.key(key_value_states), self.value(key_value_states))
    )
    if rotary is not None and encoder_states is None:
        if self.rotary_value:
            query, key, value = self.apply_rotary_position_embeddings(rotary, query, key, value)
        else:
            query, key = self.apply_rotary_position_embeddings(rotary, query, key)
    dropout = self.dropout.p if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, attention_mask, dropout)
    return out.flatten(2), None


def gpt_neox_japanese(
    original: Callable[..., Any],
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
) -> tuple[Any, ...]:
    """GPTNeoXJapaneseAttention._attn: q, k, v [B, H, L, d] to [B, H, L, d]."""
    if not has_region_mask(attention_mask, self):
        return original(query, key, value, attention_mask)
    dropout = self.attention_dropout.p if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, attention_mask, dropout, 1 / self.norm_factor)
    return out.transpose(1, 2), None


def gpt_neo(
    original: Callable[..., Any],
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
) -> tuple[Any, ...]:
    """GPTNeoSelfAttention._attn: scores are not scaled, and every other layer has a sliding window."""
    if not has_region_mask(attention_mask, self):
        return original(query, key, value, attention_mask)
    if self.attention_type == "local":
        window = Band(self.config.window_size - 1, OPEN)
        attention_mask = replace(attention_mask, rule=attention_mask.rule & window)
    dropout = self.attn_dropout.p if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, attention_mask, dropout, 1.0)
    return out.transpose(1, 2), None


def openai_gpt(
    original: Callable[..., Any],
    self: Any,
    query: torch.Tensor,
    key_transposed: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    output_attentions: bool = False,
) -> list[Any]:
    """OpenAI GPT's Attention._attn: K is [B, H, d, L], and the causal mask is a buffer of the class, not an argument."""
    mask = mask_of_current_region(CAUSAL, self)
    if mask is None:
        return original(query, key_transposed, value, attention_mask, output_attentions)
    dropout = self.attn_dropout.p if self.training else 0.0
    scale = value.size(-1) ** -0.5 if self.scale else 1.0
    out, _ = attention_forward(self, query, key_transposed.transpose(-1, -2), value, mask, dropout, scale)
    return [out.transpose(1, 2)]


REPLACED: dict[str, Replacement] = {
    "TrOCRAttention": Replacement(bart_like),
    "XGLMAttention": Replacement(bart_like),
    "MvpAttention": Replacement(bart_like),
    "MegatronBertSelfAttention": Replacement(bert_like),
    "RemBertSelfAttention": Replacement(bert_like),
    "BigBirdSelfAttention": Replacement(bert_like),
    "RoFormerSelfAttention": Replacement(bert_like),
    "GPTNeoXJapaneseAttention": Replacement(gpt_neox_japanese, "_attn"),
    "GPTNeoSelfAttention": Replacement(gpt_neo, "_attn"),
    "modeling_openai.Attention": Replacement(openai_gpt, "_attn"),
}
