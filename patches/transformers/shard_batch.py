"""Shards a batch: per-token arguments are reduced to this rank's tokens, and what the region knows is left out."""

from __future__ import annotations

from typing import Any, Mapping

import torch

from ds_cp.agreement import BatchError
from ds_cp.patches.transformers import batch as batches
from ds_cp.patches.transformers import masks
from ds_cp.patches.transformers.batch import (
    ENCODER_MASK,
    ENCODER_STATES,
    PACKING_ARGUMENTS,
    SECOND_SEQUENCES,
    TASK_HEAD_ARGUMENTS,
)
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor
from ds_cp.region import Region

TOKEN_ARGUMENTS = ("input_ids", "inputs_embeds")
"""Padded past the end of the sequence with copies of the last token: a row of zeros may give NaN gradients (Gemma 3n)."""

REPLICATED_ARGUMENTS = frozenset({ENCODER_STATES, ENCODER_MASK, *SECOND_SEQUENCES})
"""Tensors of a second sequence, which are not sharded even if it happens to have the first one's length."""


def local_arguments(region: Region, arguments: Mapping[str, Any], shape: tuple[int, int]) -> dict[str, Any]:
    """A stack's arguments for this rank's tokens.

    Args:
        arguments: The stack's arguments by name, of the whole batch.
        shape: (B, S).
    """
    batch, seq_len = shape
    positions = arguments.get("position_ids")
    region.last_position = torch.tensor(seq_len - 1) if positions is None else positions.max()
    local = {
        name: _local_value(region, name, value, batch, seq_len)
        for name, value in arguments.items()
        if name not in PACKING_ARGUMENTS and name not in TASK_HEAD_ARGUMENTS
    }
    tokens = batches.tokens_of(local)
    if local.get("position_ids") is None:
        local["position_ids"] = region.shard(torch.arange(seq_len, device=tokens.device).unsqueeze(0))
    return (
        local
        | {"attention_mask": _local_mask(region, local.get("attention_mask"), tokens)}
        | _visual_embeddings(region, arguments)
        | _encoder_mask(region, arguments)
        | _image_masks(region, arguments)
    )


def _local_value(region: Region, name: str, value: Any, batch: int, seq_len: int) -> Any:
    value = masks.map_deferred(value, lambda mask: mask.bind(region))
    if not isinstance(value, torch.Tensor):
        return value
    if name == "position_ids":
        return region.shard(value, dim=-1)
    if tuple(value.shape[:2]) in {(batch, seq_len), (1, seq_len)} and name not in REPLICATED_ARGUMENTS:
        return region.shard(value, pad_value=None if name in TOKEN_ARGUMENTS else 0)
    if name == "cache_position" and value.dim() == 1:
        return region.shard(value, dim=0)
    return value


def _local_mask(region: Region, mask: Any, tokens: torch.Tensor) -> Any:
    """A stack's mask inside a region: descriptors by kind of layer, or a padding mask of ones.

    It is all ones because the region knows the padding, and because the model would take restarts of local positions for
    packed documents if it had no mask.
    """
    if type(mask) is dict:
        return mask if region.dense_mask is None else {name: masks.shared_descriptor(region) for name in mask}
    if isinstance(mask, MaskDescriptor):  # made before the decoder ran; the decoder will ask for it layer by layer
        region.early_mask = mask.rule, mask.terms
    return torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)


def _visual_embeddings(region: Region, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What layers add to visual tokens (qwen3_vl's deepstack): per layer [visual tokens, d], in the order of the tokens."""
    is_visual, embeddings = arguments.get("visual_pos_masks"), arguments.get("deepstack_visual_embeds")
    if is_visual is None or embeddings is None:
        return {}
    index = is_visual.flatten().cumsum(0).view_as(is_visual) - 1
    local_index = region.shard(index)[region.shard(is_visual)]
    return {"deepstack_visual_embeds": [layer[local_index.to(layer.device)] for layer in embeddings]}


def _encoder_mask(region: Region, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The padding mask of an encoder's tokens, replicated. The mask function recognises it by identity."""
    states, mask = arguments.get(ENCODER_STATES), arguments.get(ENCODER_MASK)
    if states is None:
        return {}
    if mask is None:
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    if tuple(mask.shape) != tuple(states.shape[:2]):
        raise BatchError(
            f"encoder_attention_mask is {batches.describe(mask)} for {states.shape[0]} x {states.shape[1]} encoder tokens; ds_cp takes the "
            "2-D mask of their padding."
        )
    region.encoder_mask = mask.to(device=states.device, dtype=torch.bool)
    return {ENCODER_MASK: region.encoder_mask}


def _image_masks(region: Region, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """mllama's cross attention: which image keys each token sees, [B, 1, S, keys], and whether it sees any."""
    if arguments.get("cross_attention_states") is None:
        return {}
    mask, sees_any = (
        None if (value := arguments.get(name)) is None else region.shard(value, dim=2)
        for name in ("cross_attention_mask", "full_text_row_masked_out_mask")
    )
    return {"cross_attention_mask": masks.CrossMask(mask), "full_text_row_masked_out_mask": sees_any}
