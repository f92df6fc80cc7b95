"""The causal LM loss of transformers' heads: on local logits where a head left them local."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ds_cp import patches
from ds_cp.loss import causal_lm_loss, shift_left
from ds_cp.region import current_exit


def install() -> None:
    """Wrap every entry of transformers' table that is the causal LM loss."""
    for name, function in list(LOSS_MAPPING.items()):
        if function is ForCausalLMLoss:
            patches.replace(LOSS_MAPPING, name, lambda original: shared_loss, "sums the loss over the group")


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
    """``ForCausalLMLoss``; inside a local exit the logits are local, labels are full-length and shifted here."""
    wish = current_exit()
    if wish is None or wish.region is None:
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    wish.consumed = True
    targets = shift_left(labels, ignore_index) if shift_labels is None else shift_labels
    return causal_lm_loss(logits, targets, wish.region, num_items_in_batch, ignore_index)


def keeps_local(model: torch.nn.Module) -> bool:
    """True when this head computes its loss through :func:`shared_loss`, so that its hidden states may stay local."""
    forward: Callable = functools.reduce(lambda f, _: getattr(f, "__wrapped__", f), range(16), type(model).forward)
    return "loss_function" in forward.__code__.co_names and model.loss_function is shared_loss
