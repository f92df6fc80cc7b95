"""Liger: its fused linear cross entropy computes the sum over this rank's tokens, which is then summed over the group.

Liger sets a ``forward`` on a model, one per family, which passes hidden states and the LM head's weight to
``LigerForCausalLMLoss`` instead of computing logits. That function is replaced in the module of each family. Liger's other
kernels act on each token by itself and are left as they are.
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
"""Prefix of the modules that hold Liger's forwards, one module per family."""

LOSS = "LigerForCausalLMLoss"


def install() -> None:
    """Replace the loss in the modules of all families that are imported by now. Called for every model that is attached."""
    for name, module in list(sys.modules.items()):
        if name.startswith(FORWARDS) and LOSS in vars(module) and not hasattr(vars(module)[LOSS], "ds_cp"):
            _replace_loss(module)


def _replace_loss(module: Any) -> None:
    original = vars(module)[LOSS]
    setattr(module, LOSS, _loss_of_local_tokens(original))
    why = "scores this rank's tokens, summed over the group"
    patches.record(patches.Patch(f"{module.__name__}.{LOSS}", why, lambda: setattr(module, LOSS, original)))


def _loss_of_local_tokens(original: Callable) -> Callable:
    @torch.compiler.disable
    @functools.wraps(original)
    def liger_loss(
        hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, ignore_index=-100,
        shift_labels=None, *args, **kwargs,
    ):  # fmt: skip
        call = current_task_head()
        if call is None or call.region is None:
            return original(
                hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch, ignore_index, shift_labels,
                *args, **kwargs,
            )  # fmt: skip
        if kwargs.get("return_token_accuracy") or kwargs.get("return_predicted_tokens"):
            raise BatchError(
                "return_token_accuracy and return_predicted_tokens ask Liger for numbers of the tokens it sees, and it sees "
                "one shard's: they would silently be that shard's. Leave them out, or compute them from the whole logits."
            )
        call.consumed = True
        targets = shift_left(labels, ignore_index) if shift_labels is None else shift_labels
        targets = targets.view(hidden_states.size(0), -1)
        local_targets = call.region.shard(targets.to(hidden_states.device), dim=-1, pad_value=ignore_index)
        hidden_states = hidden_states.contiguous()  # Liger views it as [B * L, hidden]
        # num_items_in_batch = 1, so that Liger returns a sum
        total = original(
            hidden_states, lm_head_weight, None, hidden_size, 1, ignore_index, local_targets, *args, **kwargs
        )
        return mean_over_group(total, targets, call.region, num_items_in_batch, ignore_index)

    liger_loss.ds_cp = True
    return liger_loss
