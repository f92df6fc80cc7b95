"""A batch cut for one rank: what is per token becomes this rank's tokens, what the region knows is left out."""

from __future__ import annotations

from typing import Any, Mapping

import torch

from ds_cp.agreement import BatchError
from ds_cp.patches.transformers import batch as batches
from ds_cp.patches.transformers import masks
from ds_cp.patches.transformers.batch import ENCODER, OF_THE_HEAD, PACKING_ARGUMENTS, SECOND
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor
from ds_cp.region import Region

TOKENS = ("input_ids", "inputs_embeds")
"""A token past the sequence's end is one that the model knows: a row of zeros may have no gradient (Gemma 3n)."""

WHOLE = frozenset({*ENCODER, *SECOND})
"""Tensors of a second sequence; its length may be that of the first by chance."""


def local_arguments(region: Region, arguments: Mapping[str, Any], shape: tuple[int, int]) -> dict[str, Any]:
    """A stack's arguments for this rank's tokens."""
    batch, seq_len = shape
    per_token = {(batch, seq_len), (1, seq_len)}  # the latter for every row
    local: dict[str, Any] = {}
    positions = arguments.get("position_ids")
    region.last_position = torch.tensor(seq_len - 1) if positions is None else positions.max()
    for name, value in arguments.items():
        if name in PACKING_ARGUMENTS or name in OF_THE_HEAD:
            continue
        value = masks.map_deferred(value, lambda mask: mask.bind(region))
        if name == "position_ids" and value is not None:
            local[name] = region.shard(value, dim=-1)
        elif isinstance(value, torch.Tensor) and tuple(value.shape[:2]) in per_token and name not in WHOLE:
            local[name] = region.shard(value, pad_value=None if name in TOKENS else 0)
        elif isinstance(value, torch.Tensor) and value.dim() == 1 and name == "cache_position":
            local[name] = region.shard(value, dim=0)
        else:
            local[name] = value
    tokens = batches.tokens_of(local)
    if local.get("position_ids") is None:
        everyone = torch.arange(seq_len, device=tokens.device).unsqueeze(0)
        local["position_ids"] = region.shard(everyone)
    mask = local.get("attention_mask")
    if type(mask) is dict and region.dense_mask is not None:
        mask = {name: masks.make_descriptor(None, region, seq_len, seq_len) for name in mask}
    if isinstance(mask, MaskDescriptor):
        region.early_mask = mask.rule, mask.terms  # the decoder asks for masks of its own, and gets this one
    if type(mask) is not dict:
        # All ones: the region knows the padding, and local positions must not be searched for documents.
        mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    return (
        local
        | {"attention_mask": mask}
        | _visual(region, arguments)
        | _encoder_mask(region, arguments)
        | _images(region, arguments)
    )


def _visual(region: Region, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What later layers add to visual tokens (qwen3_vl's deepstack): rows [visual tokens, d], in the order of the tokens."""
    marked, rows = arguments.get("visual_pos_masks"), arguments.get("deepstack_visual_embeds")
    if marked is None or rows is None:
        return {}
    index = marked.flatten().cumsum(0).view_as(marked) - 1
    mine = region.shard(index)[region.shard(marked)]
    return {"deepstack_visual_embeds": [each[mine.to(each.device)] for each in rows]}


def _encoder_mask(region: Region, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The padding of an encoder's tokens, which every rank holds whole; the region recognises it by its identity."""
    states, mask = (arguments.get(name) for name in ENCODER)
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
    return {ENCODER[1]: region.encoder_mask}


def _images(region: Region, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Which parts of images each token sees in mllama's cross attention, [B, 1, S, keys], and whether it sees any."""
    if arguments.get("cross_attention_states") is None:
        return {}
    seen, any_seen = (
        None if (value := arguments.get(name)) is None else region.shard(value, dim=2)
        for name in ("cross_attention_mask", "full_text_row_masked_out_mask")
    )
    return {"cross_attention_mask": masks.CrossMask(seen), "full_text_row_masked_out_mask": any_seen}
