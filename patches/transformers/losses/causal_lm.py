"""The causal LM loss of transformers' task heads, computed from local logits where the task head left them local.

Steps 3 and 4 of the list in :mod:`~ds_cp.patches.transformers.losses`: labels are shifted at full length, then sharded; the sum of the
cross entropy comes from :class:`.DeferredLogits`; :func:`ds_cp.loss.mean_over_group` makes it the loss of the batch.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any, Callable

import torch
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ds_cp.loss import cross_entropy_sum, mean_over_group, shift_left
from ds_cp.patches import liger
from ds_cp.patches.transformers.ambient import current_task_head
from ds_cp.patches.transformers.losses.deferred_logits import DeferredLogits
from ds_cp.patches.trl import fused_head
from ds_cp.region import Region


def attach(head: torch.nn.Module) -> Callable[[], None]:
    """Set :func:`shared_loss` as the loss function of a model that uses ``ForCausalLMLoss``; returns what undoes it.

    It is set on the model and not in transformers' table of losses: Trainer compares the entry of the table with
    ``ForCausalLMLoss`` to decide how tokens are counted. A loss function that the user has set stays.
    """
    if not _calls_loss_function(head) or head.loss_function is not ForCausalLMLoss or hasattr(head, "_loss_function"):
        return lambda: None
    head.loss_function = shared_loss  # transformers' setter stores it as _loss_function
    head_ref: weakref.ref[Any] = weakref.ref(head)

    def undo() -> None:
        model = head_ref()
        if model is not None and getattr(model, "_loss_function", None) is shared_loss:
            del model._loss_function

    return undo


@torch.compiler.disable
@functools.wraps(ForCausalLMLoss)
def shared_loss(
    logits: Any,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """``ForCausalLMLoss``, of local logits if the task head left them local; labels are of all tokens in either case."""
    call = current_task_head()
    if call is None or call.region is None:
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    call.consumed = True
    targets = shift_left(labels, ignore_index) if shift_labels is None else shift_labels
    return causal_lm_loss(logits, targets, call.region, num_items_in_batch, ignore_index)


def keeps_local(head: torch.nn.Module) -> bool:
    """Whether a model computes its loss through :func:`shared_loss`, so that its hidden states may stay local."""
    return _calls_loss_function(head) and head.loss_function is shared_loss


def _calls_loss_function(head: torch.nn.Module) -> bool:
    """Whether the forward of a model is one of transformers or Liger that calls ``self.loss_function``.

    The user's own forward may do anything with hidden states, so they must not be local there.
    """
    if not isinstance(head, PreTrainedModel):
        return False
    forward: Any = fused_head.plain_forward(head) or type(head).forward
    forward = inspect.unwrap(getattr(forward, "__func__", forward))
    known = getattr(forward, "__module__", "").startswith(("transformers.models.", liger.FORWARDS))
    return known and "loss_function" in forward.__code__.co_names


def causal_lm_loss(
    logits: torch.Tensor | DeferredLogits,
    targets: torch.Tensor,
    region: Region,
    num_items: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The mean cross entropy over a batch, from local logits; equal on all ranks of the context-parallel group.

    Args:
        logits: [B, L, V], of this rank's tokens. Deferred logits are computed chunk by chunk.
        targets: [B, S] or [B * S], shifted, replicated on all ranks.
        region: The region of the forward pass that computed the logits.
        num_items: See :func:`ds_cp.loss.mean_over_group`.
        ignore_index: The label that does not count.
        label_smoothing: See :func:`ds_cp.loss.cross_entropy_sum`.

    Returns:
        Scalar, fp32 or fp64.
    """
    targets = targets.view(logits.size(0), -1)
    local_targets = region.shard(targets.to(logits.device), dim=-1, pad_value=ignore_index)
    if isinstance(logits, DeferredLogits):
        total = logits.cross_entropy(local_targets, ignore_index, label_smoothing)
    else:
        total = cross_entropy_sum(logits, local_targets, ignore_index, label_smoothing)
    return mean_over_group(total, targets, region, num_items, ignore_index)
