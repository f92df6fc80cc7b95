"""Decodes transformers' mask functions into rules, by reading their closures.

A mask is nested functions of (batch, head, q, k) indices: ``and_masks(sliding_window_overlay(8), causal)``. Functions that
are known become a rule. Any other function is evaluated tile by tile, never for all S x S pairs. Inside a region the model
runs on local tokens, so per-token tensors in a closure are shards; they are gathered first.
"""

from __future__ import annotations

import dis
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, Callable

import torch
from transformers import masking_utils

from ds_cp.agreement import BatchError
from ds_cp.attention.score import Term
from ds_cp.attention.terms import DenseMask, MaskFunction
from ds_cp.mask.rules import CAUSAL, EVERYTHING, OPEN, Band, Blocks, ChunkedAttention, Rule
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor
from ds_cp.patches.transformers.models.introspection import closure_variables
from ds_cp.region import LayerCall, Region

RULES: dict[str, Callable[[dict[str, Any], Region], Rule]] = {
    "causal_mask_function": lambda closure, region: CAUSAL,
    "bidirectional_mask_function": lambda closure, region: EVERYTHING,
    "packed_sequence_mask_function": lambda closure, region: EVERYTHING,  # the region restricts keys to the document
    "sliding_window_overlay": lambda closure, region: Band(closure["sliding_window"] - 1, OPEN),
    "sliding_window_bidirectional_overlay": lambda closure, region: _symmetric_band(closure["sliding_window"]),
    # gemma3's and step3p7's own function, whose window does not include its edge
    "_bidirectional_window_overlay": lambda closure, region: _symmetric_band(closure["sliding_window"] - 1),
    # chunks are counted from the start of the document, which is where left padding ends
    "chunked_overlay": lambda closure, region: ChunkedAttention(closure["chunk_size"]),
    "blockwise_overlay": lambda closure, region: Blocks.of(
        _gathered(closure["block_sequence_ids"], region).detach().cpu().numpy()
    ),
}
"""Rules by the name of the outermost function that defines the mask function, made from its closure."""


# ---- masks made before the decoder runs --------------------------------------------------------------------------


class DeferredMask:
    """A mask that a model makes before its decoder runs, when it is not known yet whether and how the sequence is shared.

    The stack's hook replaces it by a descriptor (:meth:`bind`) or by a tensor (:func:`materialise`). Any other use raises.

    Attributes:
        make_mask: transformers' function that builds the mask as a tensor.
        arguments: Arguments of transformers' mask interface: ``batch_size``, ``q_length``, ``kv_length``,
            ``mask_function``, ``attention_mask`` (the 2-D padding mask) and others.
    """

    def __init__(self, make_mask: Callable, arguments: dict[str, Any]):
        self.make_mask, self.arguments = make_mask, arguments

    @property
    def padding(self) -> torch.Tensor | None:
        """The 2-D padding mask [B, S], if there is one."""
        return self.arguments.get("attention_mask")

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that determine the mask: the padding mask, and those in the mask function's closure."""
        arguments = [value for value in self.arguments.values() if isinstance(value, torch.Tensor)]
        return arguments + _tensors_of(self.arguments["mask_function"])

    def bind(self, region: Region) -> MaskDescriptor:
        """The descriptor for a region that holds the same tokens."""
        return make_descriptor(
            self.arguments["mask_function"], region, self.arguments["q_length"], self.arguments["kv_length"]
        )

    def __getattr__(self, name: str) -> Any:
        raise BatchError(self._refusal(f".{name}"))

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise BatchError(cls._refusal(f" in {getattr(function, '__name__', function)}"))

    @staticmethod
    def _refusal(use: str) -> str:
        return (
            f"the model uses its attention mask{use} before its decoder runs; ds_cp has no S x S tensor there, "
            "and the mask of a shard would be another one. This model cannot be shared exactly; take the key out for it."
        )


def map_deferred(value: Any, function: Callable[[DeferredMask], Any]) -> Any:
    """Apply a function to every deferred mask in a value, also inside tuples, lists and dicts."""
    if isinstance(value, DeferredMask):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(map_deferred(item, function) for item in value)
    if type(value) is dict:
        return {name: map_deferred(item, function) for name, item in value.items()}
    return value


def materialise(value: Any) -> Any:
    """Replace every deferred mask in a value by its tensor, for a stack that does not share its sequence."""
    return map_deferred(value, lambda mask: mask.make_mask(**mask.arguments))


# ---- masks inside a region ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CrossMask:
    """The mask of cross attention over a second sequence (an encoder's tokens, or images), which is replicated.

    Attributes:
        mask: [B, 1, 1 or L, keys], bool or additive; None if all keys are seen.
    """

    mask: torch.Tensor | None


def cross_mask(mask_function: Callable, region: Region) -> CrossMask:
    """The mask of a layer whose keys are an encoder's tokens: it hides their padding.

    Raises:
        BatchError: The mask hides more than that.
    """
    if decode(mask_function, region) != (EVERYTHING, ()):
        raise BatchError(
            f"a layer's mask {_qualified_name(mask_function)} of another sequence's keys is more than their padding; ds_cp would let every "
            "query see all of them. This model cannot be shared exactly; take the key out for it."
        )
    unmasked = region.encoder_mask
    return CrossMask(None if unmasked is None or bool(unmasked.all()) else unmasked[:, None, None, :])


def make_descriptor(mask_function: Callable, region: Region, queries: int, keys: int) -> MaskDescriptor:
    """The descriptor of a layer's mask.

    Args:
        queries: Number of local queries.
        keys: Number of local keys.

    Raises:
        BatchError: The mask can be neither decoded nor evaluated by index, or the keys are another sequence's.
    """
    if queries != keys:
        raise BatchError(
            f"a layer asks for a mask of {queries} queries and {keys} keys in a shared forward: the keys belong to another "
            "sequence (cross attention, a cache or a prefix), of which each rank would see what it takes for its shard."
        )
    return shared_descriptor(region) or MaskDescriptor(LayerCall(region), *decode(mask_function, region))


def shared_descriptor(region: Region) -> MaskDescriptor | None:
    """The descriptor that replaces every layer's own mask; None if each layer has its own.

    This is a mask that the model made before its decoder ran, or the caller's dense mask: transformers, too, uses a dense
    mask for every layer.
    """
    if region.early_mask is not None:
        return MaskDescriptor(LayerCall(region), *region.early_mask)
    if region.dense_mask is not None:
        return MaskDescriptor(LayerCall(region), EVERYTHING, (DenseMask(region.dense_mask),))
    return None


# ---- decoding ----------------------------------------------------------------------------------------------------


def decode(function: Callable, region: Region) -> tuple[Rule, tuple[Term, ...]]:
    """A mask function as a rule, and as terms for the part that no rule expresses."""
    if not isinstance(function, FunctionType):
        raise BatchError(
            f"a layer's mask is made by {function!r}, which is no plain function: ds_cp cannot see whether it holds "
            "shards of per-token tensors, and tokens might see too much or too little. Write it as a function."
        )
    factory, closure = _factory_name(function), closure_variables(function)
    if factory in RULES:
        return RULES[factory](closure, region), ()
    if factory == "remap_positions_for_packed_sequence":  # the region's rules count inside documents in any case
        return decode(closure["mask_function"], region)
    if factory == "and_masks":
        rule: Rule = EVERYTHING
        terms: tuple[Term, ...] = ()
        for part in closure["mask_functions"]:
            part_rule, part_terms = decode(part, region)
            rule, terms = rule & part_rule, terms + part_terms
        return rule, terms
    if factory == "or_masks":
        parts = [decode(part, region) for part in closure["mask_functions"]]
        if not any(terms for _, terms in parts):
            rule = parts[0][0]
            for other, _ in parts[1:]:
                rule = rule | other
            return rule, ()
    if not _reads_its_arguments(function) and bool(function()):
        return EVERYTHING, ()
    return EVERYTHING, (_evaluated_by_index(function, region),)


def _evaluated_by_index(function: FunctionType, region: Region) -> MaskFunction:
    """A term that evaluates the function for the pairs of a tile, with the shards in its closure gathered.

    If the closure has no per-token tensor, indices count inside each packed document, as in transformers.
    """
    gathered: list[torch.Tensor] = []
    function = _with_gathered_closure(function, region, gathered)
    is_packed = region.documents.packed
    if gathered and is_packed:
        raise BatchError(
            f"a layer's mask {_qualified_name(function)} looks tokens up by their index in the row, and the row is packed: "
            "transformers asks it for the index inside a document, so it would look at another document's tokens. "
            "Train without packing, or use transformers' blockwise_overlay."
        )
    return MaskFunction(function, region.origin if is_packed else torch.zeros_like(region.origin))


def _with_gathered_closure(function: FunctionType, region: Region, gathered: list[torch.Tensor]) -> FunctionType:
    """A copy of a function in whose closure, and in those of the functions inside it, per-token tensors are gathered.

    Args:
        gathered: Filled with the per-token tensors.
    """

    def convert(value: Any) -> Any:
        lengths = {region.layout.local_len, region.layout.seq_len}
        if isinstance(value, torch.Tensor) and value.dim() and not lengths.isdisjoint(value.shape[-2:]):
            gathered.append(_gathered(value, region))
            return gathered[-1]
        if isinstance(value, (tuple, list)):
            return type(value)(convert(item) for item in value)
        if isinstance(value, FunctionType) and value.__closure__:
            return _with_gathered_closure(value, region, gathered)
        return value

    cells = tuple(CellType(convert(cell.cell_contents)) for cell in function.__closure__ or ())
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    return copy


def _gathered(value: torch.Tensor, region: Region) -> torch.Tensor:
    """A per-token tensor [B, L], [1, L] or [L], gathered to S tokens; one that has S tokens already is returned as it is."""
    if value.size(-1) == region.layout.seq_len:
        return value
    if value.size(-1) != region.layout.local_len:
        raise BatchError(
            f"a layer's mask holds a tensor of shape {tuple(value.shape)}, neither of the row's {region.layout.seq_len} "
            f"tokens nor of this rank's {region.layout.local_len}: ds_cp cannot tell which tokens it describes."
        )
    return region.gather(value, dim=-1)


def _symmetric_band(distance: int) -> Band:
    return Band(distance, distance)


def _factory_name(function: FunctionType) -> str:
    """The function of transformers that defines a mask function: ``blockwise_overlay`` for
    ``blockwise_overlay.<locals>.inner_mask``; "" for a function from elsewhere."""
    is_known = function.__module__ == masking_utils.__name__ or function.__module__.startswith("transformers.models.")
    return function.__qualname__.partition(".<locals>")[0] if is_known else ""


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a function's closure, and in the functions and sequences inside it."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, FunctionType):
        return _tensors_of([cell.cell_contents for cell in value.__closure__ or ()])
    return [tensor for item in value for tensor in _tensors_of(item)] if isinstance(value, (tuple, list)) else []


def _reads_its_arguments(function: FunctionType) -> bool:
    """False for a constant such as ``lambda *args: torch.tensor(True)``."""
    code = function.__code__
    takes_only_varargs = code.co_argcount == 0 and bool(code.co_flags & 0x04)  # CO_VARARGS
    return not takes_only_varargs or any(step.argval == code.co_varnames[0] for step in dis.get_instructions(code))


def _qualified_name(function: Callable) -> str:
    return function.__qualname__.replace(".<locals>", "")
