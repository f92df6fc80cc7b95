"""One call of a model's task head: what its loss takes, and what its decoder has left local for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ds_cp.patches.transformers.losses.deferred_logits import DeferredLogits
    from ds_cp.region import Region


@dataclass(eq=False)
class TaskHeadCall:
    """One running head: what it wants of the decoder that it is about to call, and what came of it.

    Attributes:
        keeps_local: its loss is known and takes local logits, so hidden states may stay local; that loss owns shifting
            and sharding of the labels.
        labels: for the digest of the batch.
        targets: the labels that its loss takes, shifted or not, for every rank to look whether they are in the vocabulary.
        vocab: how many logits a token has; 0 where that is not known.
        ignore_index: the label that does not count.
        input_ids: for the digest, too; the decoder may get embeddings instead.
        batch_facts: arguments about documents and positions that the caller gave to the head.
        region: set by the decoder that left its hidden states local.
        consumed: set by the loss.
        loss_after_head: the known loss comes after the head, from the logits that it returns.
        logits_limit: the most bytes of whole logits that the caller gets as a tensor, in fp32; 0 for never as a tensor.
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
        """Whether these local logits [B, L, V] go back to the caller as a whole tensor [B, S, V]."""
        return logits.size(0) * self.region.layout.seq_len * logits.size(-1) * 4 <= self.logits_limit

    def defers(self, hidden: torch.Tensor) -> bool:
        """True for this rank's hidden states [B, L, hidden] on their way to the logits of a known loss."""
        if self.region is None or not self.keeps_local or not self.region.plan.tiled_loss:
            return False
        return hidden.dim() == 3 and hidden.size(1) == self.region.layout.local_len
