"""The logits that a model returns when its loss has taken those of this rank's tokens only."""

from __future__ import annotations

import torch

from ds_cp.agreement import BatchError
from ds_cp.patches.transformers.losses.deferred_logits import DeferredLogits
from ds_cp.region import Region


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
