"""The attention function and the mask function that transformers looks up under the name ``ds_cp``.

Inside a region the mask function returns a descriptor instead of a tensor, and the attention function passes q, k and v to
the region. Outside of a region both do what transformers' SDPA does.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Mapping, NamedTuple

import torch
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface

from ds_cp import patches
from ds_cp.agreement import BatchError
from ds_cp.attention.score import CompressedKVTerm, Dropout, Score, Term
from ds_cp.attention.terms import DistanceProfiles
from ds_cp.patches.transformers import masks, outside_region
from ds_cp.patches.transformers.ambient import current_region, current_task_head, is_stack_running
from ds_cp.patches.transformers.batch import describe
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor
from ds_cp.patches.transformers.models import sparse_attention

NAME = "ds_cp"

DEPTH_ATTENTION = frozenset(
    {"Inkling2BlockAttentionResidual", "Inkling2LoopBlockAttentionResidual", "Inkling2LoopMessageAttentionResidual"}
)
"""Classes in which each token attends to its own states in earlier layers. Tokens do not mix, so nothing is shared."""

IGNORED_ARGUMENTS = frozenset(
    "position_ids cache_position use_cache output_attentions output_hidden_states return_dict num_items_in_batch "
    "is_causal sliding_window position_embeddings labels shift_labels logits_to_keep layer_idx cache past_key_values "
    "output_router_logits deterministic ignore_index".split()
)
"""Arguments that do not change the scores inside a region: windows and causality come from the mask descriptor."""


class QueryBias(NamedTuple):
    """A bias that each query mixes from profiles over the distance to its keys (Inkling).

    Attributes:
        weights: Weights of the profiles, [B, H, L, c].
        profiles: [c, extent].
    """

    weights: torch.Tensor
    profiles: torch.Tensor


def install() -> None:
    """Register both functions. Without a mask function of its own name, an attention function would get no padding mask."""
    for registry, function in ((AttentionInterface, attention_forward), (AttentionMaskInterface, mask_forward)):
        if NAME in registry._global_mapping:
            continue
        registry.register(NAME, function)
        patches.record(
            patches.Patch(
                f"transformers.{registry.__name__}[{NAME!r}]",
                "attention goes through the region of the running forward",
                partial(_unregister, registry),
            )
        )


def _unregister(registry: Any) -> None:
    registry._global_mapping.pop(NAME, None)


@torch.compiler.disable
def mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable = causal_mask_function,
    **kwargs: Any,
) -> Any:
    """A mask descriptor inside a region, SDPA's mask outside of one.

    Between the start of a model and of its decoder it is not known yet which of the two is needed: then a deferred mask.
    """
    region = current_region()
    if region is None:
        make_mask = outside_region.mask_function_of(kwargs.get("config"))
        arguments = kwargs | dict(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, mask_function=mask_function
        )
        if current_task_head() and not is_stack_running():
            return masks.DeferredMask(make_mask, arguments)
        return make_mask(**arguments)
    if region.encoder_mask is not None and kwargs.get("attention_mask") is region.encoder_mask:
        return masks.cross_mask(mask_function, region)
    return masks.make_descriptor(mask_function, region, q_length, kv_length)


@torch.compiler.disable
def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    Args:
        query: [B, H, L, d].
        key: [B, h, L, d].
        value: [B, h, L, dv].
        attention_mask: The result of :func:`mask_forward`.

    Returns:
        The output [B, L, H, dv], and None in place of attention weights.
    """
    if isinstance(attention_mask, MaskDescriptor):
        return _attend_in_region(module, query, key, value, attention_mask, dropout, scaling, **kwargs), None
    if isinstance(attention_mask, masks.CrossMask):
        kwargs["is_causal"] = False
        return outside_region.sdpa(module, query, key, value, attention_mask.mask, dropout, scaling, **kwargs)
    if current_region() is not None and type(module).__name__ not in DEPTH_ATTENTION:
        raise BatchError(
            f"{type(module).__name__} got {describe(attention_mask)} instead of the mask of the shared sequence: it would "
            "attend to its own shard only. ds_cp needs the mask that transformers' create_causal_mask builds."
        )
    return outside_region.sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def _attend_in_region(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: MaskDescriptor,
    dropout: float,
    scaling: float | None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: QueryBias | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    terms: tuple[Term, ...] = (),
    query_scale: torch.Tensor | None = None,
    compressed_kv: CompressedKVTerm | None = None,
    **others: Any,
) -> torch.Tensor:
    """Attention inside a region, [B, L, H, dv].

    Args:
        s_aux: Sinks, [H]: a score per head that has no value.
        sinks: Sinks per query, [B, H, L, 1].
        position_bias: A bias per query. Any other type is refused.
        indices, block_indices: The keys, or blocks of keys, that the layer's indexer has selected
            (:func:`.sparse_attention.select`).
        terms, query_scale, compressed_kv: From the forwards in :mod:`.models`. ``query_scale`` is multiplied to the query.
    """
    if not isinstance(position_bias, QueryBias):
        others["position_bias"], position_bias = position_bias, None
    if not sparse_attention.has_indexer(module):
        others["block_indices"] = block_indices
    _refuse_unknown(module, query, key, others)
    region, heads, head_dim = mask.region, query.size(1), query.size(-1)
    selected = next((keys for keys in (indices, block_indices, mask.selected) if keys is not None), None)
    if selected is not None:
        terms = (*terms, sparse_attention.selection_term(module, mask, heads, selected))
    if position_bias is not None:
        terms = (*terms, DistanceProfiles(position_bias.profiles))
    layer = region.attended.setdefault(id(module), len(region.attended))
    score = Score(
        head_dim**-0.5 if scaling is None else scaling,
        softcap=softcap,
        terms=mask.terms + terms,
        dropout=Dropout(dropout, region.seed(layer)) if dropout else None,
        sinks=s_aux,
        sinks_in_query=sinks is not None,
        compressed_kv=compressed_kv,
    )
    if query_scale is not None:
        query = (query * query_scale).to(query.dtype)
    # Concatenated to Q, biases and sinks per query follow it through exchange, checkpointing and gradients.
    extra_channels = [x.to(query.dtype) for x in (position_bias and position_bias.weights, sinks) if x is not None]
    if extra_channels:
        query = torch.cat([query, *extra_channels], dim=-1)
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        # As SDPA does: rotary embeddings return q and k in fp32, while v has autocast's dtype.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    return mask.call.attend(query, key, value, mask.rule, score).transpose(1, 2).contiguous()


def _refuse_unknown(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, others: Mapping[str, Any]) -> None:
    """Refuse a layer's attention if ds_cp cannot compute it exactly.

    Raises:
        BatchError: The keys are not those of the shared sequence, or an unknown argument may change the scores.
    """
    if key.size(-2) != query.size(-2):
        raise BatchError(
            f"{type(module).__name__} attends to {key.size(-2)} keys with {query.size(-2)} queries in a shared forward: the "
            "keys are not the sequence that is shared, so a mask of it does not fit them."
        )
    unknown = sorted(name for name, value in others.items() if value is not None and name not in IGNORED_ARGUMENTS)
    if unknown:
        layer = f" (layer {module.layer_idx})" if getattr(module, "layer_idx", None) is not None else ""
        raise BatchError(
            f"{type(module).__name__}{layer} passes {', '.join(unknown)} to its attention, which ds_cp does not apply: the "
            "scores would silently miss it. This model cannot be shared exactly; take the key out for it."
        )
