"""Attention classes that compute plain softmax attention by themselves instead of asking transformers' interface.

Where a class has a method that gets q, k and v, that method is replaced; else its forward. What is done here is what the
class does apart from its own softmax.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, Callable

import torch

from ds_cp.agreement import BatchError
from ds_cp.mask.rules import CAUSAL, OPEN, Band
from ds_cp.patches.transformers.ambient import current_region
from ds_cp.patches.transformers.attention import attention_forward
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor
from ds_cp.patches.transformers.models.replacement import Replacement
from ds_cp.region import LayerCall


def projected(original: Callable, self: Any, hidden_states, *args, **kwargs):
    """TrOCR, XGLM, MVP: BART's attention before it knew the interface. [B, L, hidden] to the same."""
    mask = kwargs.get("attention_mask")
    if runs_alone(self, mask):
        return original(hidden_states, *args, **kwargs)
    if kwargs.get("attn_prompt") is not None:
        raise BatchError(
            f"{type(self).__name__} puts prompts before the keys (use_prompt): they are no tokens of the sequence that is "
            "shared. Train without them."
        )
    states = kwargs.get("key_value_states")
    states = hidden_states if states is None else states
    query, key, value = (
        x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        for x in (self.q_proj(hidden_states), self.k_proj(states), self.v_proj(states))
    )
    out, _ = attention_forward(self, query, key, value, mask, self.dropout if self.training else 0.0, self.scaling)
    return self.out_proj(out.flatten(2)), None


def bert(original: Callable, self: Any, hidden_states, attention_mask=None, *args, **kwargs):
    """MegatronBERT, RemBERT, RoFormer, BigBird's full attention: BERT's attention before it knew the interface."""
    if runs_alone(self, attention_mask):
        return original(hidden_states, attention_mask, *args, **kwargs)
    other, rotary = kwargs.get("encoder_hidden_states"), kwargs.get("sinusoidal_pos")
    states = hidden_states if other is None else other
    query, key, value = (
        x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
        for x in (self.query(hidden_states), self.key(states), self.value(states))
    )
    if rotary is not None and other is None:
        turned = (query, key, value) if self.rotary_value else (query, key)
        turned = self.apply_rotary_position_embeddings(rotary, *turned)
        query, key, value = (*turned, value)[:3]
    rate = self.dropout.p if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, attention_mask, rate)
    return out.flatten(2), None


def gpt_neox_japanese(original: Callable, self: Any, query, key, value, attention_mask=None):
    """GPTNeoXJapaneseAttention._attn: q, k, v [B, H, L, d] to [B, H, L, d]."""
    if runs_alone(self, attention_mask):
        return original(query, key, value, attention_mask)
    rate = self.attention_dropout.p if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, attention_mask, rate, 1 / self.norm_factor)
    return out.transpose(1, 2), None


def gpt_neo(original: Callable, self: Any, query, key, value, attention_mask=None):
    """GPTNeoSelfAttention._attn: scores are not scaled, and every other layer sees a window."""
    if runs_alone(self, attention_mask):
        return original(query, key, value, attention_mask)
    if self.attention_type == "local":
        window = Band(self.config.window_size - 1, OPEN)
        attention_mask = replace(attention_mask, rule=attention_mask.rule & window)
    rate = self.attn_dropout.p if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, attention_mask, rate, 1.0)
    return out.transpose(1, 2), None


def openai(original: Callable, self: Any, q, k, v, attention_mask=None, output_attentions=False):
    """OpenAI GPT's Attention._attn, which gets k as [B, H, d, L] and is causal by a table of its own."""
    mask = of_running(CAUSAL, self)
    if mask is None:
        return original(q, k, v, attention_mask, output_attentions)
    rate = self.attn_dropout.p if self.training else 0.0
    scale = v.size(-1) ** -0.5 if self.scale else 1.0
    out, _ = attention_forward(self, q, k.transpose(-1, -2), v, mask, rate, scale)
    return [out.transpose(1, 2)]


def doge(original: Callable, self: Any, hidden_states, position_embeddings, attention_mask=None, cache=None, **kwargs):
    """DogeAttention: a learned bias per key and key head, which becomes one more head dim: q = (q, 1), k = (k, bias)."""
    if runs_alone(self, attention_mask):
        return original(hidden_states, position_embeddings, attention_mask, cache, **kwargs)
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
    bias = torch.exp(self.A * torch.nn.functional.softplus(bias)).transpose(-1, -2).unsqueeze(-1)
    query = torch.cat([query, torch.ones_like(query[..., :1])], dim=-1)
    key = torch.cat([key, bias.to(key.dtype) / self.scaling], dim=-1)
    to_eight = (0, -query.size(-1) % 8)  # what the flash kernels want
    query, key = (torch.nn.functional.pad(x, to_eight) for x in (query, key))
    rate = self.attention_dropout if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, attention_mask, rate, self.scaling)
    return self.o_proj(out.flatten(2)), None


def runs_alone(module: torch.nn.Module, mask: Any) -> bool:
    """Whether a layer is outside of any region.

    Raises:
        BatchError: it is inside of one and got another mask than the region's.
    """
    if not isinstance(mask, MaskDescriptor) and current_region() is not None:
        raise BatchError(
            f"{type(module).__name__} got another mask than that of the shared sequence: it would attend to its own shard "
            "only."
        )
    return not isinstance(mask, MaskDescriptor)


def of_running(rule: Any, module: torch.nn.Module) -> MaskDescriptor | None:
    """The mask of a layer that gets none, from the region that is open; None outside of one.

    Raises:
        BatchError: the layer is being recomputed, when its region is closed.
    """
    region = current_region()
    if region is not None:
        return MaskDescriptor(LayerCall(region), rule)
    if torch._C._current_graph_task_id() != -1:
        raise BatchError(
            f"{type(module).__name__} is recomputed in the backward pass, but it gets no mask that says which sequence is "
            "shared: it would attend to its own shard only. Switch gradient checkpointing off for this model."
        )
    return None


REPLACED: dict[str, Replacement] = {
    "TrOCRAttention": Replacement(projected),
    "XGLMAttention": Replacement(projected),
    "MvpAttention": Replacement(projected),
    "MegatronBertSelfAttention": Replacement(bert),
    "RemBertSelfAttention": Replacement(bert),
    "BigBirdSelfAttention": Replacement(bert),
    "RoFormerSelfAttention": Replacement(bert),
    "DogeAttention": Replacement(doge),
    "GPTNeoXJapaneseAttention": Replacement(gpt_neox_japanese, "_attn"),
    "GPTNeoSelfAttention": Replacement(gpt_neo, "_attn"),
    "modeling_openai.Attention": Replacement(openai, "_attn"),
}
