"""Local logits: what a model returns as ``logits`` if its loss was computed from this rank's tokens only.

The last step of the list in :mod:`~ds_cp.patches.transformers.losses`.
"""

from __future__ import annotations

from typing import Any, Callable, NoReturn

import torch

from ds_cp.agreement import BatchError
from ds_cp.patches.transformers.losses.deferred_logits import DeferredLogits
from ds_cp.region import Region


class NoTensorError(BatchError, AttributeError):
    """Local logits were used as a tensor. An AttributeError, too, so that ``hasattr`` says what they lack."""


class LocalLogits:
    """Logits of this rank's tokens. Returned in training, and in evaluation if those of all tokens exceed the limit.

    They are not a tensor, so that no metric or loss is computed from a shard by mistake. :attr:`local` is this rank's part
    [B, L, V], and :meth:`whole` gathers all tokens [B, S, V] with gradients. With the chunked loss both compute the logits
    when they are called.

    Args:
        local: [B, L, V].
        region: The region of the forward pass that computed them.
        limit: Maximum size in bytes, in fp32, of logits of all tokens that this call may return as a tensor; 0 for none.
    """

    def __init__(self, local: torch.Tensor | DeferredLogits, region: Region, limit: int = 0):
        self._local, self.region, self._limit = local, region, limit

    @property
    def local(self) -> torch.Tensor:
        """This rank's logits, [B, L, V]. Under ZeRO-3 all ranks of the world must read this."""
        return self._local.computed() if isinstance(self._local, DeferredLogits) else self._local

    def whole(self) -> torch.Tensor:
        """The logits of all tokens, [B, S, V]. All ranks of the context-parallel group must call this, under ZeRO-3 all ranks
        of the world."""
        return self.region.gather(self.local)

    def for_loss(self) -> torch.Tensor | DeferredLogits:
        """This rank's logits, deferred or not, for a loss that takes local logits."""
        return self._local

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)  # protocols of Python, such as copy's
        raise NoTensorError(_refusal(f".{name}", self._limit))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        logits = next((each for each in args if isinstance(each, cls)), None)
        raise NoTensorError(_refusal(f" in {getattr(function, '__name__', function)}", logits._limit if logits else 0))

    def __eq__(self, other: object) -> NoReturn:
        raise NoTensorError(_refusal(" in ==", self._limit))

    def __ne__(self, other: object) -> NoReturn:
        raise NoTensorError(_refusal(" in !=", self._limit))

    __hash__ = object.__hash__

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalLogits":
        return LocalLogits(self._local, self.region, self._limit)  # a region belongs to its process groups


def _refusal(use: str, limit: int) -> str:
    if limit:
        return (
            f"logits{use}: those of the whole sequence take more than the {limit / 2**30:.3g} GiB in fp32 that a rank may "
            "hold, so this is the rank's own part only, and a metric of it would silently be one shard's. Evaluate smaller "
            "batches or the loss alone (Trainer: prediction_loss_only=True); logits.local is this rank's part."
        )
    return (
        f"logits{use}: in training with labels a rank has the logits of its own tokens only, and a loss or metric of them "
        "would silently be one shard's. Use logits.whole(), which gathers all tokens on every rank, or call the model "
        "without labels and compute the loss yourself; logits.local is this rank's part."
    )
