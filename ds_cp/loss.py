"""Next-token loss of a sharded sequence: each rank sums over its own tokens, and the total is divided by one count."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ds_cp.collectives import all_reduce
from ds_cp.region import Region


def shift_left(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Labels of the next tokens, ``[..., S] -> [..., S]``; the last token gets ``ignore_index``.

    Call it before sharding: the token after the last one of a shard belongs to another rank.
    """
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index)


def cross_entropy_sum(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Cross entropy summed over tokens, in fp32 or fp64.

    Args:
        logits: [..., V].
        targets: [...]; tokens whose target is ``ignore_index`` add nothing.
        label_smoothing: Weight of the mean over the vocabulary in a token's loss.

    Returns:
        Scalar.
    """
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2),
        targets.flatten(),
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def mean_over_group(
    total: torch.Tensor,
    targets: torch.Tensor,
    region: Region,
    num_items: torch.Tensor | int | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Sum of the losses over the context-parallel group, divided by one count; equal on every rank.

    Args:
        total: Scalar, sum of the losses of this rank's tokens.
        targets: [B, S], replicated on every rank.
        num_items: Divisor. Default: number of targets that are not ignored. If it is 0, the loss is NaN and all
            gradients are 0, as in transformers, whose Trainer leaves NaN out of the means that it logs.
    """
    count = torch.as_tensor((targets != ignore_index).sum() if num_items is None else num_items, device=total.device)
    is_empty = count == 0
    # Dividing by 0 would give the tokens infinite gradients; cross entropy gives 0 to tokens that it ignores.
    mean = all_reduce(total, region.mesh.cp_group) / count.masked_fill(is_empty, 1)
    return mean.masked_fill(is_empty, float("nan"))
