"""The attention mask of a layer inside a region: an object in the place of a tensor [B, 1, S, S].

It travels as an argument, from the model's mask function through the layer to the attention function, and carries what
attention needs of the call: so a recomputed layer finds the region of its own forward, whatever has run since.
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
        call: the call of a layer that the mask belongs to. Until a layer has its own, it names the region only.
        rule: which keys a query may see.
        terms: what no rule expresses: dense masks, and masks given as a function of indices.
        chosen: [B, G, L, n], the keys that an indexer has chosen for this rank's queries, where the model combines them
            with its mask.
    """

    call: LayerCall
    rule: Rule
    terms: tuple[Term, ...] = ()
    chosen: torch.Tensor | None = None

    @property
    def region(self) -> Region:
        """The region of the forward that the mask was made for."""
        return self.call.region

    # What single models do to their mask before they hand it on:

    ndim = 0
    """Falcon asks whether its mask has the four dims of a tensor [B, 1, S, S], which it would slice."""

    dtype = torch.bool
    """Qwen4's indexed attention asks whether to combine its mask by ``&`` or by addition."""

    def to(self, *args: object, **kwargs: object) -> "MaskDescriptor":
        """MPT casts its mask to bool."""
        return self

    def __getitem__(self, index: object) -> "MaskDescriptor":
        """DeepSeek's indexer takes the mask of one head."""
        return self

    def __and__(self, chosen: torch.Tensor) -> "MaskDescriptor":
        """Qwen4's indexed attention intersects its mask with the keys that its indexer has chosen.

        Raises:
            BatchError: a mask instead of indices, which would be of this rank's shard.
        """
        if chosen.dtype == torch.bool or chosen.is_floating_point():
            raise BatchError(
                "a layer combines the mask of the shared sequence with one of its own shard, which ds_cp cannot read: tokens would "
                "see too much or too little. This model cannot be shared exactly; take the key out for it."
            )
        return replace(self, chosen=chosen)


def map_masks(value: Any, change: Callable[[MaskDescriptor], MaskDescriptor]) -> Any:
    """Arguments with every mask descriptor in them, and inside of tuples, lists and dicts, changed."""
    if isinstance(value, MaskDescriptor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(map_masks(item, change) for item in value)
    if type(value) is dict:
        return {name: map_masks(item, change) for name, item in value.items()}
    return value
