"""transformers' mask functions, read as rules by walking their closures.

A mask is built by nesting functions of (batch, head, q, k) index: ``and_masks(sliding_window_overlay(8), causal)``. What
is known becomes a rule; the rest is kept as a function and asked tile by tile, never for S x S pairs. Inside a region
the model runs on local tokens, so per-token tensors in a closure are shards: they are made whole first.
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

KNOWN: dict[str, Callable[[dict[str, Any], Region], Rule]] = {
    "causal_mask_function": lambda held, region: CAUSAL,
    "bidirectional_mask_function": lambda held, region: EVERYTHING,
    "packed_sequence_mask_function": lambda held, region: EVERYTHING,  # the region knows which tokens belong together
    "sliding_window_overlay": lambda held, region: Band(held["sliding_window"] - 1, OPEN),
    "sliding_window_bidirectional_overlay": lambda held, region: Band(held["sliding_window"], held["sliding_window"]),
    # gemma3's and step3p7's own: the window does not count its edge
    "_bidirectional_window_overlay": lambda held, region: Band(held["sliding_window"] - 1, held["sliding_window"] - 1),
    # counted from the start of the document, which is where the left padding ends
    "chunked_overlay": lambda held, region: ChunkedAttention(held["chunk_size"]),
    "blockwise_overlay": lambda held, region: Blocks.of(
        _whole(held["block_sequence_ids"], region).detach().cpu().numpy()
    ),
}
"""By the name of the function that makes the mask function."""


class DeferredMask:
    """A mask that a model makes before its decoder runs: whether and how the sequence is shared is not known yet.

    Attributes:
        arguments: of transformers' mask interface: ``batch_size``, ``q_length``, ``kv_length``, ``mask_function``,
            ``attention_mask`` (the 2-D padding mask) and others.
        make: what builds the mask where nothing is shared.
    """

    def __init__(self, make: Callable, arguments: dict[str, Any]):
        self.make, self.arguments = make, arguments

    @property
    def padding(self) -> torch.Tensor | None:
        """The 2-D mask [B, S], if there is one."""
        return self.arguments.get("attention_mask")

    def tensors(self) -> list[torch.Tensor]:
        """All that it knows of the batch: the padding and what its function looks up."""
        arguments = [value for value in self.arguments.values() if isinstance(value, torch.Tensor)]
        return arguments + _tensors_of(self.arguments["mask_function"])

    def bind(self, region: Region) -> MaskDescriptor:
        """The descriptor for a region that holds the same tokens."""
        return make_descriptor(
            self.arguments["mask_function"], region, self.arguments["q_length"], self.arguments["kv_length"]
        )

    def __getattr__(self, name: str):
        raise BatchError(self._refusal(f".{name}"))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise BatchError(cls._refusal(f" in {getattr(function, '__name__', function)}"))

    @staticmethod
    def _refusal(use: str) -> str:
        return (
            f"the model uses its attention mask{use} before its decoder runs; ds_cp has no tensor of all pairs of tokens there, "
            "and the mask of a shard would be another one. This model cannot be shared exactly; take the key out for it."
        )


def map_deferred(value: Any, change: Callable[[DeferredMask], Any]) -> Any:
    """Arguments with every deferred mask in them, and in tuples, lists and dicts inside, changed."""
    if isinstance(value, DeferredMask):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(map_deferred(item, change) for item in value)
    if type(value) is dict:
        return {name: map_deferred(item, change) for name, item in value.items()}
    return value


def materialise(value: Any) -> Any:
    """Arguments of a decoder that runs whole, with its deferred masks made."""
    return map_deferred(value, lambda mask: mask.make(**mask.arguments))


@dataclass(frozen=True)
class CrossMask:
    """What a layer gets as its mask when it attends to a second sequence that every rank holds whole (an encoder's, or of images).

    Attributes:
        mask: [B, 1, 1 or L, keys], bool or what is added; None where all keys are seen.
    """

    mask: torch.Tensor | None


def cross_mask(mask_function: Callable, region: Region) -> CrossMask:
    """The mask of a layer whose keys are a second sequence: all of its tokens that exist.

    Raises:
        BatchError: the layer sees less than that.
    """
    if read(mask_function, region) != (EVERYTHING, ()):
        raise BatchError(
            f"a layer's mask {_name(mask_function)} of another sequence's keys is more than their padding; ds_cp would let every "
            "query see all of them. This model cannot be shared exactly; take the key out for it."
        )
    seen = region.encoder_mask
    return CrossMask(None if seen is None or bool(seen.all()) else seen[:, None, None, :])


def make_descriptor(mask_function: Callable, region: Region, queries: int, keys: int) -> MaskDescriptor:
    """The descriptor of a layer's mask over so many local queries and keys.

    Raises:
        BatchError: a mask that cannot be read nor asked by index, or of another sequence's keys.
    """
    if queries != keys:
        raise BatchError(
            f"a layer asks for a mask of {queries} queries and {keys} keys in a shared forward: the keys belong to another "
            "sequence (cross attention, a cache or a prefix), of which each rank would see what it takes for its shard."
        )
    call = LayerCall(region)
    if region.early_mask is not None:
        return MaskDescriptor(call, *region.early_mask)
    if region.dense_mask is not None:  # transformers, too, lets a mask that is given whole stand for every layer's
        return MaskDescriptor(call, EVERYTHING, (DenseMask(region.dense_mask),))
    return MaskDescriptor(call, *read(mask_function, region))


def read(function: Callable, region: Region) -> tuple[Rule, tuple[Term, ...]]:
    """A mask function as a rule, and as terms for what no rule expresses."""
    if not isinstance(function, FunctionType):
        raise BatchError(
            f"a layer's mask is made by {function!r}, which is no plain function: ds_cp cannot see whether it holds "
            "shards of per-token tensors, and tokens might see too much or too little. Write it as a function."
        )
    maker, held = _maker(function), closure_variables(function)
    if maker in KNOWN:
        return KNOWN[maker](held, region), ()
    if maker == "remap_positions_for_packed_sequence":  # the region counts inside of documents anyway
        return read(held["mask_function"], region)
    if maker == "and_masks":
        rule, terms = EVERYTHING, ()
        for part in held["mask_functions"]:
            part_rule, part_terms = read(part, region)
            rule, terms = rule & part_rule, terms + part_terms
        return rule, terms
    if maker == "or_masks":
        parts = [read(part, region) for part in held["mask_functions"]]
        if not any(terms for _, terms in parts):
            rule = parts[0][0]
            for other, _ in parts[1:]:
                rule = rule | other
            return rule, ()
    if not _reads_its_arguments(function) and bool(function()):
        return EVERYTHING, ()
    return EVERYTHING, (_by_index(function, region),)


def _by_index(function: FunctionType, region: Region) -> MaskFunction:
    """The function with whole tensors in its closure, to be asked for the pairs of a tile.

    Where it holds no per-token tensor it is asked as if each packed document stood alone, as transformers does.
    """
    gathered: list[torch.Tensor] = []
    function = _globalised(function, region, gathered)
    packed = region.documents.packed
    if gathered and packed:
        raise BatchError(
            f"a layer's mask {_name(function)} looks tokens up by their index in the row, and the row is packed: "
            "transformers asks it for the index inside a document, so it would look at another document's tokens. "
            "Train without packing, or use transformers' blockwise_overlay."
        )
    return MaskFunction(function, region.origin if packed else torch.zeros_like(region.origin))


def _globalised(function: FunctionType, region: Region, gathered: list[torch.Tensor]) -> FunctionType:
    """A copy of the function in whose closure, and in the functions inside, shards are whole."""

    def globalise(value: Any) -> Any:
        lengths = {region.layout.local_len, region.layout.seq_len}
        if isinstance(value, torch.Tensor) and value.dim() and not lengths.isdisjoint(value.shape[-2:]):
            whole = _whole(value, region)
            gathered.append(whole)
            return whole
        if isinstance(value, (tuple, list)):
            return type(value)(globalise(item) for item in value)
        if isinstance(value, FunctionType) and value.__closure__:
            return _globalised(value, region, gathered)
        return value

    cells = tuple(CellType(globalise(cell.cell_contents)) for cell in function.__closure__ or ())
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    return copy


def _whole(value: torch.Tensor, region: Region) -> torch.Tensor:
    """A per-token tensor [B, L], [1, L] or [L] for the whole sequence; one that is whole already stays."""
    if value.size(-1) == region.layout.seq_len:
        return value
    if value.size(-1) != region.layout.local_len:
        raise BatchError(
            f"a layer's mask holds a tensor of shape {tuple(value.shape)}, neither of the row's {region.layout.seq_len} "
            f"tokens nor of this rank's {region.layout.local_len}: ds_cp cannot tell which tokens it describes."
        )
    return region.gather(value, dim=-1)


def _maker(function: FunctionType) -> str:
    """The outermost function that made it: ``blockwise_overlay`` for ``blockwise_overlay.<locals>.inner_mask``."""
    known = function.__module__ == masking_utils.__name__ or function.__module__.startswith("transformers.models.")
    return function.__qualname__.partition(".<locals>")[0] if known else ""


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a function's closure, and in the functions and sequences inside."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, FunctionType):
        return _tensors_of([cell.cell_contents for cell in value.__closure__ or ()])
    return [tensor for item in value for tensor in _tensors_of(item)] if isinstance(value, (tuple, list)) else []


def _reads_its_arguments(function: FunctionType) -> bool:
    """False for a constant such as ``lambda *args: torch.tensor(True)``."""
    code = function.__code__
    takes_anything = code.co_argcount == 0 and bool(code.co_flags & 0x04)
    return not takes_anything or any(step.argval == code.co_varnames[0] for step in dis.get_instructions(code))


def _name(function: FunctionType) -> str:
    return function.__qualname__.replace(".<locals>", "")
