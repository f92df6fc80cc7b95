"""The attention mask of a layer inside a region: an object in place of a tensor [B, 1, S, S].

It is passed as an argument from the model's mask function through the layer to the attention function, and carries the
layer's context. A recomputed layer therefore finds the region of its own forward pass, whichever ran since.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable

import torch

from ds_cp.agreement import BatchError
from ds_cp.attention.score import Term
from ds_cp.mask.rules import Rule
from ds_cp.region import LayerCall, Region


@dataclass(frozen=True, eq=False)
class MaskDescriptor:
    """The mask of a layer inside a region.

    Attributes:
        call: Context of the layer's attention. Before a layer runs it names the region only; checkpointing and layers that
            run in chunks then add what they need to it.
        rule: Which keys a query may see.
        terms: The part of the mask that no rule expresses: dense masks, and functions of indices.
        selected: Keys that an indexer has selected for this rank's queries, [B, G, L, n], if the model combines them with its
            mask.
    """

    call: LayerCall
    rule: Rule
    terms: tuple[Term, ...] = ()
    selected: torch.Tensor | None = None

    @property
    def region(self) -> Region:
        """The region of the forward pass that the mask was made for."""
        return self.call.region

    # Operations that single models apply to their mask before they pass it on:

    ndim = 0
    """Falcon slices its mask if it has the four dims of a tensor [B, 1, S, S]."""

    dtype = torch.bool
    """Qwen4's indexed attention combines its mask by ``&`` if it is bool, else by addition."""

    def to(self, *args: object, **kwargs: object) -> "MaskDescriptor":
        """MPT casts its mask to bool."""
        return self

    def __getitem__(self, index: object) -> "MaskDescriptor":
        """DeepSeek's indexer takes the mask of one head."""
        return self

    def __and__(self, selected: torch.Tensor) -> "MaskDescriptor":
        """Qwen4's indexed attention intersects its mask with the keys that its indexer has selected.

        Raises:
            BatchError: The argument is a mask, not indices; it would cover this rank's shard only.
        """
        if selected.dtype == torch.bool or selected.is_floating_point():
            raise BatchError(
                "a layer combines the mask of the shared sequence with one of its own shard, which ds_cp cannot read: tokens would "
                "see too much or too little. This model cannot be shared exactly; take the key out for it."
            )
        return replace(self, selected=selected)


def map_masks(value: Any, function: Callable[[MaskDescriptor], MaskDescriptor]) -> Any:
    """Apply a function to every mask descriptor in a value, also inside tuples, lists and dicts."""
    if isinstance(value, MaskDescriptor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(map_masks(item, function) for item in value)
    if type(value) is dict:
        return {name: map_masks(item, function) for name, item in value.items()}
    return value
