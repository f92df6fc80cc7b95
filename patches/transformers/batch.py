"""Reads a batch from the arguments of a call: its shape, documents, padding and masks.

Every rank of a context-parallel group gets the same full batch. :mod:`.shard_batch` then shards it.
"""

from __future__ import annotations

import inspect
from typing import Any, Mapping

import numpy as np
import torch

from ds_cp.agreement import BatchError
from ds_cp.mask.documents import Documents
from ds_cp.patches.transformers import masks
from ds_cp.patches.transformers.host_copies import HostCopies
from ds_cp.patches.transformers.losses.task_head_call import TaskHeadCall

PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that describe packed documents. The region holds their content; layers, which see local tokens, must not."""

TASK_HEAD_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")
"""Arguments for the task head. Some models pass them on to their stack and its layers, which do not use them."""

PADDING_FROM_IDS = frozenset({"T5GemmaDecoder"})
"""Classes of stacks that derive their padding mask from the ids if they get none."""

ENCODER_STATES, ENCODER_MASK = "encoder_hidden_states", "encoder_attention_mask"
"""The keys of cross attention, and their padding mask; replicated on every rank."""

SECOND_SEQUENCES = (ENCODER_STATES, "cross_attention_states")
"""States of a second sequence that cross attention sees: an encoder's, or mllama's images."""


# ---- arguments ---------------------------------------------------------------------------------------------------


def arguments_by_name(signature: inspect.Signature, args: tuple, kwargs: dict) -> dict[str, Any]:
    """All arguments of a call by name, those of ``**kwargs`` included."""
    bound = signature.bind_partial(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return dict(bound)


def with_padding_from_ids(module: torch.nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """Add the padding mask that a stack would itself derive from the ids, if it has no mask (T5Gemma)."""
    ids = arguments.get("input_ids")
    if type(module).__name__ not in PADDING_FROM_IDS or ids is None or mask_of(arguments) is not None:
        return arguments
    config: Any = module.config
    return arguments | {"attention_mask": (ids != config.pad_token_id).long()}


def tokens_of(arguments: Mapping[str, Any]) -> torch.Tensor:
    """The ids [B, S], or if there are none the embeddings [B, S, hidden].

    Raises:
        BatchError: There is neither.
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
    """The KV cache that the caller passes, under either of its names."""
    return arguments.get("cache") if arguments.get("cache") is not None else arguments.get("past_key_values")


def mask_of(arguments: Mapping[str, Any]) -> Any:
    """The caller's attention mask, also if the model has already made masks from it, one per kind of layer."""
    mask = arguments.get("attention_mask")
    deferred: list[masks.DeferredMask] = []
    masks.map_deferred(mask, deferred.append)
    if deferred:
        return deferred[0].padding
    if type(mask) is dict and len({id(each) for each in mask.values()}) == 1:
        return next(iter(mask.values()))
    return mask


def dense_mask(arguments: Mapping[str, Any], batch: int, seq_len: int) -> torch.Tensor | None:
    """The caller's mask [B or 1, H or 1, S, S], if it is one, bool or additive. It is replicated, and sliced per tile."""
    mask = mask_of(arguments)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or tuple(mask.shape[2:]) != (seq_len, seq_len):
        return None
    if mask.requires_grad:
        raise BatchError(
            "attention_mask is a whole mask that requires grad, and ds_cp computes no gradient for it: the module that made it "
            "would silently not train. Detach it."
        )
    is_readable = mask.dtype == torch.bool or mask.is_floating_point()
    return mask if is_readable and mask.size(0) in (1, batch) else None


# ---- documents ---------------------------------------------------------------------------------------------------


def document_tensors(arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that :func:`documents` reads."""
    mask = mask_of(arguments)
    names = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
    tensors = [value for value in map(arguments.get, names) if isinstance(value, torch.Tensor)]
    return tensors + ([mask] if isinstance(mask, torch.Tensor) and mask.dim() == 2 else [])


def documents(arguments: Mapping[str, Any], batch: int, seq_len: int, host: HostCopies) -> Documents:
    """Documents and padding, from positions, the 2-D mask, ``cu_seq_lens_q`` and ``seq_idx``.

    A dense mask describes packing and padding completely, as in transformers, so each row is then one document.

    Args:
        host: Copies of :func:`document_tensors`.
    """
    mask = mask_of(arguments)
    if dense_mask(arguments, batch, seq_len) is not None:
        return Documents.find(batch, seq_len)
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        shape = f" of shape {tuple(mask.shape)}" if hasattr(mask, "shape") else ""
        raise BatchError(
            f"attention_mask is a {type(mask).__name__}{shape}: that is not the whole mask of this batch, so it cannot be "
            f"cut exactly, and ignoring it would let tokens see what you hid. Pass the 2-D mask {[batch, seq_len]}, packed "
            f"rows with position_ids that restart, or a mask {[batch, 1, seq_len, seq_len]} of bool or of what is added."
        )
    if mask is not None and tuple(mask.shape) != (batch, seq_len):
        raise BatchError(f"attention_mask has shape {tuple(mask.shape)} for a batch of {batch} x {seq_len} tokens.")
    positions = host.array(arguments.get("position_ids"))
    if positions is not None and positions.ndim == 3:  # M-RoPE: [3, B, S] without text positions, [4, B, S] with them
        positions = positions[0] if len(positions) == 4 else None
    boundaries, key_boundaries = host.array(arguments.get("cu_seq_lens_q")), host.array(arguments.get("cu_seq_lens_k"))
    if boundaries is not None and key_boundaries is not None and not np.array_equal(boundaries, key_boundaries):
        raise BatchError("cu_seq_lens_q and cu_seq_lens_k differ; a decoder's queries and keys are the same tokens.")
    unmasked = host.array(mask)
    return Documents.find(
        batch,
        seq_len,
        positions=positions,
        unmasked=None if unmasked is None else unmasked != 0,
        boundaries=boundaries,
        seq_idx=host.array(arguments.get("seq_idx")),
    )


def document_arguments(arguments: Mapping[str, Any]) -> frozenset[str]:
    """Names of the arguments about documents and positions that a call has."""
    return frozenset(name for name in ("position_ids", *PACKING_ARGUMENTS) if arguments.get(name) is not None)


def refuse_dropped_arguments(head_arguments: frozenset[str], arguments: Mapping[str, Any]) -> None:
    """Refuse a model that does not pass its arguments about documents and positions on to its decoder (bloom, mpt).

    Args:
        head_arguments: :func:`document_arguments` of the task head's call.
        arguments: The decoder's arguments.

    Raises:
        BatchError: Names the arguments.
    """
    dropped = sorted(head_arguments - document_arguments(arguments))
    if dropped:
        raise BatchError(
            f"the model does not pass {', '.join(dropped)} on to its decoder, so packed documents would see each other (they do "
            "in plain transformers too). Give it one document per row, padded, or pass the argument to the decoder itself."
        )


# ---- checks ------------------------------------------------------------------------------------------------------


def check_shapes(arguments: Mapping[str, Any], labels: torch.Tensor | None, batch: int, seq_len: int) -> None:
    """Refuse per-token tensors of another length than the sequence, before any rank waits for this one.

    Raises:
        BatchError: Names the argument and both shapes.
    """
    tokens = tokens_of(arguments)
    if tokens.dim() != (3 if arguments.get("input_ids") is None else 2):
        raise BatchError(
            f"the tokens have shape {tuple(tokens.shape)}; ds_cp shares [B, S] ids or [B, S, hidden] embeddings."
        )
    names = ("position_ids", "seq_idx", "shift_labels", "token_type_ids", "langs")
    per_token = {name: arguments.get(name) for name in names} | {"labels": labels}
    for name, value in per_token.items():
        if value is None:
            continue
        value = torch.as_tensor(value)
        is_flat = name == "shift_labels" and value.numel() == batch * seq_len
        row_counts = (batch,) if name in ("labels", "shift_labels") else (1, batch)
        if not is_flat and (value.dim() < 2 or value.size(-1) != seq_len or value.size(-2) not in row_counts):
            raise BatchError(
                f"{name} has shape {tuple(value.shape)} for a batch of {batch} x {seq_len} tokens: each rank would cut other "
                "tokens than you meant."
            )
    boundaries = arguments.get("cu_seq_lens_q")
    if boundaries is not None and boundaries.dim() != 1:
        raise BatchError(
            f"cu_seq_lens_q has shape {tuple(boundaries.shape)}; it is a list of boundaries, [documents + 1]."
        )


def tensors_to_compare(arguments: Mapping[str, Any], call: TaskHeadCall) -> list[torch.Tensor]:
    """The tensors that must be equal on all ranks of a group, those in deferred masks included.

    Floats are left out: they may differ by rounding between ranks. For embeddings, the ids that the task head computed them
    from are compared instead.
    """
    tensors: list[torch.Tensor] = []
    for _, value in sorted(arguments.items()):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        masks.map_deferred(value, lambda mask: tensors.extend(mask.tensors()))
    tensors += [value for value in (call.labels, call.input_ids) if isinstance(value, torch.Tensor)]
    return [tensor for tensor in tensors if not tensor.is_floating_point()]


def describe(value: Any) -> str:
    """What an argument is, for messages."""
    return "nothing" if value is None else f"a {type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))}"
