"""What a call says of its batch: arguments by name, shapes, documents and padding. :mod:`.cut` then cuts it."""

from __future__ import annotations

import inspect
from typing import Any, Mapping

import torch

from ds_cp.agreement import BatchError
from ds_cp.mask.documents import Documents
from ds_cp.patches.transformers import masks
from ds_cp.patches.transformers.losses.task_head_call import TaskHeadCall

PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that say which tokens belong together; the region knows, and a local attention must not read them."""

OF_THE_HEAD = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")
"""Arguments for the head alone. Heads pass them on to their stacks, and these to layers, which do not look at them."""

PADS_BY_ID = frozenset({"T5GemmaDecoder"})
"""Stacks that take their padding from the ids where there is no mask."""

ENCODER = ("encoder_hidden_states", "encoder_attention_mask")
"""A second sequence, which cross attention sees, and its padding; every rank holds them whole."""

SECOND = (ENCODER[0], "cross_attention_states")
"""The states of a second sequence: an encoder's, or mllama's images."""


def arguments_by_name(signature: inspect.Signature, args: tuple, kwargs: dict) -> dict[str, Any]:
    """All arguments by name."""
    bound = signature.bind_partial(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return dict(bound)


def with_assumed_mask(module: torch.nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the mask that a stack makes of its ids by itself, where it was given none (T5Gemma)."""
    ids = arguments.get("input_ids")
    if type(module).__name__ not in PADS_BY_ID or ids is None or mask_of(arguments) is not None:
        return arguments
    return arguments | {"attention_mask": (ids != module.config.pad_token_id).long()}


def facts(arguments: Mapping[str, Any]) -> frozenset[str]:
    """Which arguments about documents and positions a call was given."""
    return frozenset(name for name in ("position_ids", *PACKING_ARGUMENTS) if arguments.get(name) is not None)


def check_shapes(arguments: Mapping[str, Any], labels: torch.Tensor | None, batch: int, seq_len: int) -> None:
    """Refuse tensors per token that are not as long as the sequence, before anybody waits for this rank.

    Raises:
        BatchError: names the argument and both shapes.
    """
    tokens = tokens_of(arguments)
    if tokens.dim() != (3 if arguments.get("input_ids") is None else 2):
        raise BatchError(
            f"the tokens have shape {tuple(tokens.shape)}; ds_cp shares [B, S] ids or [B, S, hidden] embeddings."
        )
    positions, index = arguments.get("position_ids"), arguments.get("seq_idx")
    per_token = {
        "position_ids": positions,
        "seq_idx": index,
        "labels": labels,
        "shift_labels": arguments.get("shift_labels"),
        "token_type_ids": arguments.get("token_type_ids"),
        "langs": arguments.get("langs"),
    }
    for name, value in per_token.items():
        if value is None:
            continue
        value = torch.as_tensor(value)
        flat = name == "shift_labels" and value.numel() == batch * seq_len
        rows = (batch,) if name in ("labels", "shift_labels") else (1, batch)
        if not flat and (value.dim() < 2 or value.size(-1) != seq_len or value.size(-2) not in rows):
            raise BatchError(
                f"{name} has shape {tuple(value.shape)} for a batch of {batch} x {seq_len} tokens: each rank would cut other "
                "tokens than you meant."
            )
    boundaries = arguments.get("cu_seq_lens_q")
    if boundaries is not None and boundaries.dim() != 1:
        raise BatchError(
            f"cu_seq_lens_q has shape {tuple(boundaries.shape)}; it is a list of borders, [documents + 1]."
        )


def contents(arguments: Mapping[str, Any], call: TaskHeadCall) -> list[torch.Tensor]:
    """What must be equal on all ranks of a group: every integer of the batch, in masks that the model makes early too.
    Embeddings are not compared, for floats may differ by rounding where they were computed; the ids that the head made
    them from are."""
    found: list[torch.Tensor] = []
    for _, value in sorted(arguments.items()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        masks.map_deferred(value, lambda mask: found.extend(mask.tensors()))
    return found + [value for value in (call.labels, call.input_ids) if isinstance(value, torch.Tensor)]


def refuse_lost_facts(batch_facts: frozenset[str], arguments: Mapping[str, Any]) -> None:
    """Raise when a head was told of documents or positions and its decoder was not (bloom, mpt).

    Raises:
        BatchError: names the arguments.
    """
    lost = sorted(batch_facts - facts(arguments))
    if lost:
        raise BatchError(
            f"the model does not pass {', '.join(lost)} on to its decoder, so packed documents would see each other (they do "
            "in plain transformers too). Give it one document per row, padded, or pass the argument to the decoder itself."
        )


def tokens_of(arguments: Mapping[str, Any]) -> torch.Tensor:
    """Ids [B, S], or where there are none embeddings [B, S, hidden].

    Raises:
        BatchError: there is neither.
    """
    tokens = arguments.get("input_ids") if arguments.get("input_ids") is not None else arguments.get("inputs_embeds")
    if tokens is None:
        raise BatchError("the decoder got neither input_ids nor inputs_embeds, so there is no sequence to share.")
    return tokens


def shape_of(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """(B, S) of the batch."""
    tokens = tokens_of(arguments)
    return tokens.shape[0], tokens.shape[1]


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """The cache that the caller handed over, by whichever name the model takes it."""
    return arguments.get("cache") if arguments.get("cache") is not None else arguments.get("past_key_values")


def mask_of(arguments: Mapping[str, Any]) -> Any:
    """The attention mask as the caller gave it, also where the model has made masks of it already, one per kind of layer."""
    mask = arguments.get("attention_mask")
    made: list[masks.DeferredMask] = []
    masks.map_deferred(mask, made.append)
    if made:
        return made[0].padding
    if type(mask) is dict and len({id(each) for each in mask.values()}) == 1:
        return next(iter(mask.values()))
    return mask


def documents(arguments: Mapping[str, Any], batch: int, seq_len: int) -> Documents:
    """Documents and padding from positions, 2-D mask, ``cu_seq_lens_q`` and ``seq_idx``."""
    mask = mask_of(arguments)
    if dense_mask(arguments, batch, seq_len) is not None:
        return Documents.find(batch, seq_len)  # it says everything, as in transformers: packing and padding too
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        shape = f" of shape {tuple(mask.shape)}" if hasattr(mask, "shape") else ""
        raise BatchError(
            f"attention_mask is a {type(mask).__name__}{shape}: that is not the whole mask of this batch, so it cannot be "
            f"cut exactly, and ignoring it would let tokens see what you hid. Pass the 2-D mask {[batch, seq_len]}, packed "
            f"rows with position_ids that restart, or a mask {[batch, 1, seq_len, seq_len]} of bool or of what is added."
        )
    if mask is not None and tuple(mask.shape) != (batch, seq_len):
        raise BatchError(f"attention_mask has shape {tuple(mask.shape)} for a batch of {batch} x {seq_len} tokens.")
    positions = arguments.get("position_ids")
    if positions is not None and positions.dim() == 3:
        positions = positions[0] if positions.size(0) == 4 else None
    boundaries = arguments.get("cu_seq_lens_q")
    keys = arguments.get("cu_seq_lens_k")
    if boundaries is not None and keys is not None and not torch.equal(boundaries, keys):
        raise BatchError("cu_seq_lens_q and cu_seq_lens_k differ; a decoder's queries and keys are the same tokens.")
    return Documents.find(
        batch,
        seq_len,
        positions=_numpy(positions),
        unmasked=None if mask is None else _numpy(mask) != 0,
        boundaries=_numpy(boundaries),
        seq_idx=_numpy(arguments.get("seq_idx")),
    )


def dense_mask(arguments: Mapping[str, Any], batch: int, seq_len: int) -> torch.Tensor | None:
    """A mask [B or 1, H or 1, S, S] that the user made; every rank holds it whole and cuts it per tile."""
    mask = mask_of(arguments)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or tuple(mask.shape[2:]) != (seq_len, seq_len):
        return None
    if mask.requires_grad:
        raise BatchError(
            "attention_mask is a whole mask that asks for a gradient, which ds_cp does not compute: what made it would "
            "silently not train. Detach it."
        )
    readable = mask.dtype == torch.bool or mask.is_floating_point()
    return mask if readable and mask.size(0) in (1, batch) else None


def describe(value: Any) -> str:
    """What an argument is, for messages."""
    return "nothing" if value is None else f"a {type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))}"


def _numpy(tensor: torch.Tensor | None):
    return None if tensor is None else tensor.detach().cpu().numpy()
