"""Whether a replaced layer runs inside a region, and the mask of that region: shared by the modules of this folder."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

from ds_cp.agreement import BatchError
from ds_cp.mask.rules import Rule
from ds_cp.patches.transformers.ambient import current_region
from ds_cp.patches.transformers.mask_descriptor import MaskDescriptor
from ds_cp.region import LayerCall


def has_region_mask(mask: Any, module: torch.nn.Module) -> TypeGuard[MaskDescriptor]:
    """Whether an attention module got the mask descriptor of a region. If not, it runs outside of any region.

    Raises:
        BatchError: The module runs inside a region and got a different mask.
    """
    if not isinstance(mask, MaskDescriptor) and current_region() is not None:
        raise BatchError(
            f"{type(module).__name__} got a mask other than that of the shared sequence: it would attend to its own shard only."
        )
    return isinstance(mask, MaskDescriptor)


def mask_of_current_region(rule: Rule, module: torch.nn.Module) -> MaskDescriptor | None:
    """The mask descriptor of an attention module that gets no mask as an argument; None outside of a region.

    Raises:
        BatchError: The module is being recomputed in the backward pass, when its region is closed.
    """
    region = current_region()
    if region is not None:
        return MaskDescriptor(LayerCall(region), rule)
    if in_backward_pass():
        raise BatchError(
            f"{type(module).__name__} is recomputed in the backward pass, but it gets no mask that says which sequence is "
            "shared: it would attend to its own shard only. Switch gradient checkpointing off for this model."
        )
    return None


def in_backward_pass() -> bool:
    """Whether autograd runs a backward pass in this thread, so that a layer that runs now is being recomputed."""
    return torch._C._current_graph_task_id() != -1
