"""Liger: its fused linear cross entropy gets this rank's hidden states and labels, and its sum is summed over the group.

Liger gives a model a ``forward`` of its own, one per family, which hands hidden states and the head's weight to
``LigerForCausalLMLoss`` instead of computing logits. That function is replaced where the families look it up; its other
kernels act token by token and stay as they are.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable

import torch

from ds_cp import patches
from ds_cp.agreement import BatchError
from ds_cp.loss import mean_over_group, shift_left
from ds_cp.patches.transformers.ambient import current_task_head

FORWARDS = "liger_kernel.transformers.model."
"""Where Liger's forwards live: a module per family."""

LOSS = "LigerForCausalLMLoss"


def install() -> None:
    """Replace the loss in every family that is imported by now; again after a model was changed by Liger."""
    for name, module in list(sys.modules.items()):
        if name.startswith(FORWARDS) and LOSS in vars(module) and not hasattr(vars(module)[LOSS], "ds_cp"):
            _replace(module)


def _replace(module: Any) -> None:
    original = vars(module)[LOSS]
    setattr(module, LOSS, _shared(original))
    why = "scores this rank's tokens, summed over the group"
    patches.record(patches.Patch(f"{module.__name__}.{LOSS}", why, lambda: setattr(module, LOSS, original)))


def _shared(original: Callable) -> Callable:
    @torch.compiler.disable
    @functools.wraps(original)
    def liger_loss(
        hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, ignore_index=-100,
        shift_labels=None, *args, **kwargs,
    ):  # fmt: skip
        given = (hidden_size, num_items_in_batch, ignore_index, shift_labels)
        call = current_task_head()
        if call is None or call.region is None:
            return original(hidden_states, lm_head_weight, labels, *given, *args, **kwargs)
        if kwargs.get("return_token_accuracy") or kwargs.get("return_predicted_tokens"):
            raise BatchError(
                "return_token_accuracy and return_predicted_tokens ask Liger for numbers of the tokens it sees, and it sees "
                "one shard's: they would silently be that shard's. Leave them out, or compute them from the whole logits."
            )
        call.consumed = True
        targets = shift_left(labels, ignore_index) if shift_labels is None else shift_labels
        targets = targets.view(hidden_states.size(0), -1)
        local = call.region.shard(targets.to(hidden_states.device), dim=-1, pad_value=ignore_index)
        hidden_states = hidden_states.contiguous()  # it is viewed as [B * L, hidden]
        total = original(hidden_states, lm_head_weight, None, hidden_size, 1, ignore_index, local, *args, **kwargs)
        return mean_over_group(total, targets, call.region, num_items_in_batch, ignore_index)

    liger_loss.ds_cp = True
    return liger_loss
