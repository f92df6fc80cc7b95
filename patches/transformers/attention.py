"""Attention comes in by name: one attention function and one mask function under the name ``ds_cp``.

Inside a region the mask function returns a descriptor instead of a tensor, and the attention function hands q, k and v
to the region. Outside of one both behave as transformers' SDPA.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, NamedTuple

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, eager_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from ds_cp import patches
from ds_cp.agreement import BatchError
from ds_cp.attention.score import Dropout, Entries, Score, Term
from ds_cp.attention.terms import Profiles
from ds_cp.forward.region import MaskDescriptor
from ds_cp.forward.running import current, current_head, is_running
from ds_cp.patches.transformers import masks
from ds_cp.patches.transformers.batch import kind
from ds_cp.patches.transformers.models import indexed

NAME = "ds_cp"

ADDITIVE_MASK = frozenset(
    "bloom deepseek_v4 mpt trocr xglm mvp megatron-bert rembert big_bird roformer gpt_neo gpt_neox_japanese".split()
)
"""Model types whose own attention, which runs outside a region, adds its mask to the scores."""

ACROSS_LAYERS = frozenset(
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
    region = current()
    if region is None:
        make = eager_mask if getattr(kwargs.get("config"), "model_type", None) in ADDITIVE_MASK else sdpa_mask
        given = kwargs | dict(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, mask_function=mask_function
        )
        return masks.Deferred(make, given) if current_head() and not is_running() else make(**given)
    if region.encoder_mask is not None and kwargs.get("attention_mask") is region.encoder_mask:
        return masks.cross_mask(mask_function, region)
    return masks.describe(mask_function, region, q_length, kv_length)


@torch.compiler.disable
def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    terms: tuple[Term, ...] = (),
    query_scale: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    entries: Entries | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: q [B, H, L, d], k and v [B, h, L, d] to [B, L, H, dv].

    ``terms``, ``query_scale`` and ``entries`` come from :mod:`.families` only, inside a region only. ``indices`` or ``block_indices`` are
    the keys or blocks of keys that an indexer has chosen (:func:`.indexed.choose`), outside of a region by the model's own code.
    Among ``kwargs`` may be ``position_bias``, a :class:`QueryBias` inside a region, and ``sinks`` [B, H, L, 1], a score per query.
    """
    if not isinstance(attention_mask, MaskDescriptor):
        chosen = indices, block_indices, kwargs.get("position_ids")
        attention_mask = indexed.hide(module, attention_mask, query, key, *chosen)
    if isinstance(attention_mask, masks.CrossMask):
        seen, kwargs = attention_mask.mask, kwargs | {"is_causal": False}
        return _unshared(module, query, key, value, seen, dropout, scaling, softcap=softcap, s_aux=s_aux, **kwargs)
    if not isinstance(attention_mask, MaskDescriptor):
        if current() is not None and type(module).__name__ not in ACROSS_LAYERS:
            raise BatchError(
                f"{type(module).__name__} got {kind(attention_mask)} instead of the mask of the shared sequence: it would "
                "attend to its own shard only. ds_cp needs the mask that transformers' create_causal_mask builds."
            )
        return _unshared(
            module, query, key, value, attention_mask, dropout, scaling, softcap=softcap, s_aux=s_aux, **kwargs
        )
    if key.size(-2) != query.size(-2):
        raise BatchError(
            f"{type(module).__name__} attends to {key.size(-2)} keys with {query.size(-2)} queries in a shared forward: the "
            "keys are not the sequence that is shared, so a mask of it does not fit them."
        )
    scaling = query.size(-1) ** -0.5 if scaling is None else scaling
    query, profiles, sinks_beside = _with_channels(query, kwargs)
    strange = sorted(name for name, given in kwargs.items() if given is not None and name not in HARMLESS)
    if strange:
        layer = f" (layer {module.layer_idx})" if getattr(module, "layer_idx", None) is not None else ""
        raise BatchError(
            f"{type(module).__name__}{layer} passes {', '.join(strange)} to its attention, which ds_cp does not apply: the "
            "scores would silently miss it. This model cannot be shared exactly; take the key out for it."
        )
    region = attention_mask.region
    chosen = next((each for each in (indices, block_indices, attention_mask.chosen) if each is not None), None)
    if chosen is not None:
        terms = (*terms, indexed.term(module, attention_mask, query.size(1), chosen))
    layer = region.attended.setdefault(id(module), len(region.attended))
    score = Score(
        scaling,
        softcap=softcap,
        terms=attention_mask.terms + terms + profiles,
        dropout=Dropout(dropout, region.seed(layer)) if dropout else None,
        sinks=s_aux,
        sinks_beside=sinks_beside,
        entries=entries,
    )
    if query_scale is not None:
        query = (query * query_scale).to(query.dtype)
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        # as SDPA does it: rotary embeddings leave q and k in fp32 beside a v in the lower precision
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(lower) for x in (query, key, value))
    return region.attend(query, key, value, attention_mask.rule, score).transpose(1, 2).contiguous(), None


def _with_channels(query: torch.Tensor, kwargs: dict[str, Any]) -> tuple[torch.Tensor, tuple[Term, ...], bool]:
    """The query with what it alone decides on in further channels, taken out of ``kwargs``: so it travels with it, and so does
    its gradient. Beside it the term that reads them, and whether the last is a sink."""
    channels, profiles, bias = [query], (), kwargs.get("position_bias")
    if isinstance(bias, QueryBias):
        del kwargs["position_bias"]
        channels, profiles = [query, bias.weights], (Profiles(bias.profiles),)
    sinks = kwargs.pop("sinks", None)
    if sinks is not None:
        channels.append(sinks)
    if len(channels) > 1:
        query = torch.cat([x.to(query.dtype) for x in channels], dim=-1)
    return query, profiles, sinks is not None


def _unshared(
    module, query, key, value, mask, dropout, scaling, softcap, s_aux, sinks=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Attention over keys that this rank holds: SDPA, or the model's own eager attention for what SDPA would drop."""
    dropped = {"softcap": softcap, "s_aux": s_aux, "sinks": sinks}
    extra = {name: given for name, given in dropped.items() if given is not None}
    attend = sdpa_attention_forward
    if extra:
        causal = kwargs.get("is_causal") is not False  # False for cross attention
        attend, mask = sys.modules[type(module).__module__].eager_attention_forward, _additive(mask, query, key, causal)
    return attend(module, query, key, value, mask, dropout=dropout, scaling=scaling, **extra, **kwargs)


def _additive(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, causal: bool) -> torch.Tensor | None:
    """SDPA's mask as eager attention wants it: None means causal to one, unless that was told otherwise, nothing to the other."""
    length = query.size(-2)
    if mask is None and causal and length > 1:
        mask = torch.ones(length, key.size(-2), dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
