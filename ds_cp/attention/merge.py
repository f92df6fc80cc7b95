"""Merging partial attention over disjoint sets of keys."""

from __future__ import annotations

import torch


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Fold the attention over more keys into ``out`` and ``lse``, in place.

    With ``out_i = softmax(s_i) v_i`` and ``lse_i = log sum exp s_i`` over disjoint key sets, the attention over their
    union has ``lse = log(e^lse_1 + e^lse_2)`` and ``out = sum_i e^(lse_i - lse) out_i`` (online softmax, Milakov and
    Gimelshein 2018). A row that has seen no key has lse = -inf and out = 0; two such rows merge into one.

    Args:
        out: [B, H, L, d] in the accumulator's dtype.
        lse: [B, H, L], natural log.
        part, part_lse: the same shapes; part may have a lower precision.
    """
    total = torch.logaddexp(lse, part_lse)
    weight = torch.exp(part_lse - total).nan_to_num_(nan=0.0)  # -inf - -inf: no key on either side
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(total)
