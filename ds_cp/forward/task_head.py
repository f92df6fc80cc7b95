"""A running head: what it wants of its decoder, and the logits that it returns when its loss took local ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ds_cp.agreement import BatchError
from ds_cp.patches.transformers.losses.deferred_logits import DeferredLogits

if TYPE_CHECKING:
    from ds_cp.forward.region import Region


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
        loss_outside: the known loss comes after the head, from the logits that it returns.
        limit: the most bytes of whole logits that the caller gets as a tensor, in fp32; 0 for never as a tensor.
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
    loss_outside: bool = False
    limit: int = 0

    def returns_whole(self, logits: torch.Tensor | DeferredLogits) -> bool:
        """Whether these local logits [B, L, V] go back to the caller as a whole tensor [B, S, V]."""
        return logits.size(0) * self.region.layout.seq_len * logits.size(-1) * 4 <= self.limit

    def defers(self, hidden: torch.Tensor) -> bool:
        """True for this rank's hidden states [B, L, hidden] on their way to the logits of a known loss."""
        if self.region is None or not self.keeps_local or not self.region.plan.tiled_loss:
            return False
        return hidden.dim() == 3 and hidden.size(1) == self.region.layout.local_len


class NoTensorError(BatchError, AttributeError):
    """Local logits were used as a tensor; for ``hasattr`` they lack what a tensor has."""


class LocalLogits:
    """What a model returns as ``logits`` when its loss was computed on local tokens: always in training, and in evaluation
    where whole ones would pass the limit.

    Not a tensor, so that nothing is computed from a shard by mistake. ``local`` is this rank's [B, L, V];
    ``whole()`` gathers all of it, [B, S, V], differentiably. With the tiled loss they are computed only now.

    Args:
        limit: the most bytes of whole logits that this call may return; 0 if it returns none of any size.
    """

    def __init__(self, local: torch.Tensor | DeferredLogits, region: Region, limit: int = 0):
        self._local, self.region, self._limit = local, region, limit

    @property
    def local(self) -> torch.Tensor:
        """This rank's logits, [B, L, V]. Under ZeRO-3 all ranks of the world must ask for them."""
        return self._local.computed() if isinstance(self._local, DeferredLogits) else self._local

    def whole(self) -> torch.Tensor:
        """The logits of the whole sequence on every rank of the group; all of them (ZeRO-3: of the world) must call."""
        return self.region.gather(self.local)

    def for_loss(self) -> torch.Tensor | DeferredLogits:
        """This rank's logits for a loss that knows that they are a shard's."""
        return self._local

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)  # Python's own questions, of copy say
        raise NoTensorError(self._refusal(f".{name}"))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        first = next((each for each in args if isinstance(each, cls)), None)
        limit = first._limit if first else 0
        raise NoTensorError(cls._refused(f" in {getattr(function, '__name__', function)}", limit))

    def __eq__(self, other: object):
        raise NoTensorError(self._refusal(" in =="))

    def __ne__(self, other: object):
        raise NoTensorError(self._refusal(" in !="))

    __hash__ = object.__hash__

    def __deepcopy__(self, memo: dict) -> "LocalLogits":
        return LocalLogits(self._local, self.region, self._limit)  # a region belongs to its process groups

    def _refusal(self, use: str) -> str:
        return self._refused(use, self._limit)

    @staticmethod
    def _refused(use: str, limit: int) -> str:
        if limit:
            return (
                f"logits{use}: those of the whole sequence take more than the {limit / 2**30:.3g} GiB in fp32 that a rank may "
                "hold, so this is the rank's own part only, and a metric of it would silently be one shard's. Evaluate smaller "
                "batches or the loss alone (Trainer: prediction_loss_only=True); logits.local is this rank's part."
            )
        return (
            f"logits{use}: in training with labels a rank has the logits of its own tokens only, and a loss or metric of them "
            "would silently be one shard's. Use logits.whole(), which holds all tokens on every rank, or call the model "
            "without labels and compute the loss yourself; logits.local is this rank's part."
        )
