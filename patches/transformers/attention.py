"""Attention comes in by name: one attention function and one mask function under the name ``ds_cp``.

Inside a region the mask function returns a descriptor instead of a tensor, and the attention function hands q, k and v
to the region. Outside of one both behave as transformers' SDPA.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from ds_cp import patches
from ds_cp.attention.score import Score
from ds_cp.mask import CAUSAL, Rule
from ds_cp.region import BatchError, MaskDescriptor, current

NAME = "ds_cp"

HARMLESS = frozenset(
    "position_ids cache_position use_cache output_attentions output_hidden_states return_dict num_items_in_batch "
    "is_causal sliding_window position_embeddings labels shift_labels logits_to_keep layer_idx cache past_key_values "
    "output_router_logits".split()
)
"""Arguments that do not change the scores: the mask descriptor is the authority on windows and causality."""


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
def mask_forward(*args: Any, mask_function: Callable = causal_mask_function, **kwargs: Any):
    """A mask descriptor inside a region, SDPA's mask outside."""
    region = current()
    if region is None:
        return sdpa_mask(*args, mask_function=mask_function, **kwargs)
    return MaskDescriptor(region, decode(mask_function))


def decode(mask_function: Callable) -> Rule:
    """The band that one of transformers' mask functions describes.

    Raises:
        BatchError: a mask that is not a band inside a document.
    """
    if mask_function is causal_mask_function:
        return CAUSAL
    parts = _closure(mask_function).get("mask_functions", (mask_function,))
    windows = [_closure(part).get("sliding_window") for part in parts if "sliding_window_overlay" in part.__qualname__]
    if len(parts) == 2 and len(windows) == 1 and causal_mask_function in parts:
        return Rule(left=windows[0] - 1)
    names = ", ".join(part.__qualname__.replace(".<locals>", "") for part in parts)
    raise BatchError(
        f"a layer asks for the mask {names}, which ds_cp cannot share exactly yet: with the sequence cut, tokens would see "
        "too much or too little. Causal masks, packed documents, padding and sliding windows work."
    )


def _closure(function: Callable) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells)))


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
    if not isinstance(attention_mask, MaskDescriptor):
        if current() is not None:
            raise BatchError(
                f"{type(module).__name__} got {_kind(attention_mask)} instead of the mask of the shared sequence: it would "
                "attend to its own shard only. ds_cp needs the mask that transformers' create_causal_mask builds."
            )
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    strange = sorted(name for name, given in kwargs.items() if given is not None and name not in HARMLESS)
    if strange:
        raise BatchError(
            f"{type(module).__name__} passes {', '.join(strange)} to its attention, which ds_cp does not apply yet: the "
            "scores would silently miss it. This model cannot be shared exactly; take the key out for it."
        )
    if dropout:
        raise BatchError(
            f"{type(module).__name__} uses attention dropout {dropout:g}, which ds_cp does not apply yet: the model would "
            "train without it. Set the config's attention dropout to 0."
        )
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    region = attention_mask.region
    region.attended.add(id(module))
    out = region.attend(query, key, value, attention_mask.rule, Score(scale))
    return out.transpose(1, 2), None


def _kind(mask: Any) -> str:
    return "no mask" if mask is None else f"a {type(mask).__name__} of shape {tuple(getattr(mask, 'shape', ()))}"
