"""Attention comes in by name: one attention function and one mask function under the name ``ds_cp``.

Inside a region the mask function returns a descriptor instead of a tensor, and the attention function hands q, k and v
to the region. Outside of one both behave as transformers' SDPA.
"""

from __future__ import annotations

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
"""Classes in which a token attends to what layers before made of it, so that nothing is shared."""

HARMLESS = frozenset(
    "position_ids cache_position use_cache output_attentions output_hidden_states return_dict num_items_in_batch "
    "is_causal sliding_window position_embeddings labels shift_labels logits_to_keep layer_idx cache past_key_values "
    "output_router_logits deterministic ignore_index".split()
)
"""Arguments that do not change the scores: the mask descriptor is the authority on windows and causality."""


class QueryBias(NamedTuple):
    """A bias that each query mixes out of profiles over the distance to the keys before it (Inkling).

    Attributes:
        weights: [B, H, L, c].
        profiles: [c, extent].
    """

    weights: torch.Tensor
    profiles: torch.Tensor


def install() -> None:
    """Register the name for attention and for masks; a name without a mask function would drop the padding mask."""
    for registry, function in ((AttentionInterface, attention_forward), (AttentionMaskInterface, mask_forward)):
        if NAME in registry._global_mapping:
            continue
        registry.register(NAME, function)
        patches.record(
            patches.Patch(
                f"transformers.{registry.__name__}[{NAME!r}]",
                "attention goes through the region of the running forward",
                lambda registry=registry: registry._global_mapping.pop(NAME, None),
            )
        )


@torch.compiler.disable
def mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable = causal_mask_function,
    **kwargs: Any,
):
    """A mask descriptor inside a region, SDPA's mask outside; before the decoder of a running model a promise of either."""
    region = current_region()
    if region is None:
        make = outside_region.mask_maker(kwargs.get("config"))
        given = kwargs | dict(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, mask_function=mask_function
        )
        return masks.DeferredMask(make, given) if current_task_head() and not is_stack_running() else make(**given)
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
    """transformers' attention interface: q [B, H, L, d], k and v [B, h, L, d] to [B, L, H, dv]."""
    given = module, query, key, value
    if isinstance(attention_mask, MaskDescriptor):
        return _shared(*given, attention_mask, dropout, scaling, **kwargs), None
    if isinstance(attention_mask, masks.CrossMask):
        return outside_region.sdpa(*given, attention_mask.mask, dropout, scaling, **kwargs | {"is_causal": False})
    if current_region() is not None and type(module).__name__ not in DEPTH_ATTENTION:
        raise BatchError(
            f"{type(module).__name__} got {describe(attention_mask)} instead of the mask of the shared sequence: it would "
            "attend to its own shard only. ds_cp needs the mask that transformers' create_causal_mask builds."
        )
    return outside_region.sdpa(*given, attention_mask, dropout, scaling, **kwargs)


def _shared(
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
    """Attention inside a region.

    Args:
        s_aux: [H], a score per head without a value.
        sinks: [B, H, L, 1], the same per query.
        indices, block_indices: the keys, or blocks of keys, that the module's indexer has chosen (:func:`.sparse_attention.choose`).
        terms, query_scale, compressed_kv: from the forwards in :mod:`.models`.
    """
    if not isinstance(position_bias, QueryBias):
        others["position_bias"], position_bias = position_bias, None
    if not sparse_attention.has_indexer(module):
        others["block_indices"] = block_indices
    _refuse(module, query, key, others)
    region, heads, head_dim = mask.region, query.size(1), query.size(-1)
    chosen = next((each for each in (indices, block_indices, mask.chosen) if each is not None), None)
    if chosen is not None:
        terms = (*terms, sparse_attention.term(module, mask, heads, chosen))
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
    # what a query alone decides on becomes further channels of it: so it travels with it, and so does its gradient
    extra_query_channels = [
        x.to(query.dtype) for x in (position_bias and position_bias.weights, sinks) if x is not None
    ]
    if extra_query_channels:
        query = torch.cat([query, *extra_query_channels], dim=-1)
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        # as SDPA does it: rotary embeddings leave q and k in fp32 beside a v in the lower precision
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(lower) for x in (query, key, value))
    return mask.call.attend(query, key, value, mask.rule, score).transpose(1, 2).contiguous()


def _refuse(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, others: Mapping[str, Any]) -> None:
    """Raise for what a layer asks of its attention that the region cannot give.

    Raises:
        BatchError: other keys than the shared sequence's; an argument that changes scores and is not known.
    """
    if key.size(-2) != query.size(-2):
        raise BatchError(
            f"{type(module).__name__} attends to {key.size(-2)} keys with {query.size(-2)} queries in a shared forward: the "
            "keys are not the sequence that is shared, so a mask of it does not fit them."
        )
    strange = sorted(name for name, given in others.items() if given is not None and name not in HARMLESS)
    if strange:
        layer = f" (layer {module.layer_idx})" if getattr(module, "layer_idx", None) is not None else ""
        raise BatchError(
            f"{type(module).__name__}{layer} passes {', '.join(strange)} to its attention, which ds_cp does not apply: the "
            "scores would silently miss it. This model cannot be shared exactly; take the key out for it."
        )
