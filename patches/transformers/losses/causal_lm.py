"""The causal LM loss of transformers' heads: on local logits where a head left them local."""

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
    """Give a head the shared loss where it would use ``ForCausalLMLoss``; returns what undoes it.

    Set on the model, not in transformers' table: Trainer compares the table's entry with ``ForCausalLMLoss`` to decide
    how tokens are counted. A loss function of the user's own stays, before and after.
    """
    if not _calls_loss_function(head) or head.loss_function is not ForCausalLMLoss or hasattr(head, "_loss_function"):
        return lambda: None
    head.loss_function = shared_loss
    alive = weakref.ref(head)

    def undo() -> None:
        if getattr(alive(), "_loss_function", None) is shared_loss:
            del alive()._loss_function

    return undo


@torch.compiler.disable
@functools.wraps(ForCausalLMLoss)
def shared_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """``ForCausalLMLoss``; when the head kept them local, the logits are local, labels are full-length and shifted here."""
    task_head_call = current_task_head()
    if task_head_call is None or task_head_call.region is None:
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    task_head_call.consumed = True
    targets = shift_left(labels, ignore_index) if shift_labels is None else shift_labels
    return causal_lm_loss(logits, targets, task_head_call.region, num_items_in_batch, ignore_index)


def keeps_local(head: torch.nn.Module) -> bool:
    """True when this head computes its loss through :func:`shared_loss`, so that its hidden states may stay local."""
    return _calls_loss_function(head) and head.loss_function is shared_loss


def _calls_loss_function(head: torch.nn.Module) -> bool:
    if not isinstance(head, PreTrainedModel):
        return False
    forward = fused_head.plain_forward(head) or type(head).forward
    forward = inspect.unwrap(getattr(forward, "__func__", forward))
    # a forward of the user's own may do anything with the hidden states
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
    """Cross entropy of local logits, equal on every rank of the group.

    Args:
        logits: [B, L, V], this rank's tokens; deferred ones are never computed all at once.
        targets: [B, S] or [B * S], already shifted, whole on every rank.
        region: the forward that made the logits.
        num_items: see :func:`ds_cp.loss.mean_over_group`.
        ignore_index: the label that does not count.
        label_smoothing: see :func:`ds_cp.loss.cross_entropy_sum`.

    Returns:
        Scalar, fp32 or fp64.
    """
    targets = targets.view(logits.size(0), -1)  # a collator may hand them over flat
    local_targets = region.shard(targets.to(logits.device), dim=-1, pad_value=ignore_index)
    if isinstance(logits, DeferredLogits):
        total = logits.cross_entropy(local_targets, ignore_index, label_smoothing)
    else:
        total = cross_entropy_sum(logits, local_targets, ignore_index, label_smoothing)
    return mean_over_group(total, targets, region, num_items, ignore_index)
