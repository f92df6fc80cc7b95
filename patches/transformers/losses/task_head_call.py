"""One call of a model's task head: what the decoder and the loss inside of it need to know of each other.

The hook of the task head creates it (step 1 of the list in :mod:`~ds_cp.patches.transformers.losses`); projection, loss and the
hook that runs after the task head read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ds_cp.patches.transformers.losses.deferred_logits import DeferredLogits
    from ds_cp.region import Region


@dataclass(eq=False)
class TaskHeadCall:
    """One running call of a task head.

    Attributes:
        keeps_local: Whether the loss takes local logits, so that hidden states stay local. Such a loss also shifts and shards
            the labels.
        labels: Labels of the call, for the digest that ranks compare.
        targets: The labels that the loss reads, shifted or not, for a check on all ranks that they are in the vocabulary.
        vocab: Size of the vocabulary; 0 if unknown.
        ignore_index: The label that does not count.
        input_ids: Ids of the call, also for the digest; the decoder may get embeddings instead.
        batch_facts: Names of the arguments about documents and positions that the caller passed.
        region: The region of the decoder that left its hidden states local; None before that.
        consumed: Whether the loss has taken the local logits.
        loss_after_head: Whether the loss is computed after the head, from the logits that it returns.
        logits_limit: Maximum size in bytes, in fp32, of logits of all tokens that are returned as a tensor; 0 for none.
    """

    keeps_local: bool = False
    labels: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    vocab: int = 0
    ignore_index: int = -100
    input_ids: torch.Tensor | None = None
    batch_facts: frozenset[str] = frozenset()
    region: Region | None = None
    consumed: bool = False
    loss_after_head: bool = False
    logits_limit: int = 0

    def returns_whole_logits(self, logits: torch.Tensor | DeferredLogits) -> bool:
        """Whether the caller gets these local logits [B, L, V] as a tensor of all tokens [B, S, V]."""
        assert self.region is not None, "without a region the logits are not local"
        return logits.size(0) * self.region.layout.seq_len * logits.size(-1) * 4 <= self.logits_limit

    def defers(self, hidden: torch.Tensor) -> bool:
        """Whether the logits of these hidden states are deferred: those of this rank's tokens, [B, L, hidden], for a known loss."""
        if self.region is None or not self.keeps_local or not self.region.plan.tiled_loss:
            return False
        return hidden.dim() == 3 and hidden.size(1) == self.region.layout.local_len
