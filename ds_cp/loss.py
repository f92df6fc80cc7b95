"""The next-token loss of a shared sequence: one sum and one count over the group."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ds_cp.collectives import all_reduce
from ds_cp.region import Region


def shift_left(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The label of each token's successor, [..., S] -> [..., S]; the last token has none. Done before sharding: a
    shard's last token is followed by another rank's first."""
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index)


def cross_entropy_sum(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> torch.Tensor:
    """The summed cross entropy of some tokens, in fp32 or fp64.

    Args:
        logits: [..., V].
        targets: [...]; ``ignore_index`` does not count.
        label_smoothing: the share of a token's loss that goes to the mean over the vocabulary.

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
    """The sums of the group's ranks over one count, equal on every rank.

    Args:
        total: scalar, the losses of this rank's tokens.
        targets: [B, S], whole on every rank.
        num_items: what the sum is divided by; default: the targets that are not ignored. With none of them the loss is
            NaN and each gradient zero, as in transformers: Trainer leaves NaN out of the means that it logs.
    """
    count = torch.as_tensor((targets != ignore_index).sum() if num_items is None else num_items, device=total.device)
    nothing = count == 0
    # 0 / 0 would hand a gradient of infinity to the tokens; cross entropy gives zero to those it ignores
    mean = all_reduce(total, region.mesh.cp_group) / count.masked_fill(nothing, 1)
    return mean.masked_fill(nothing, float("nan"))
