"""Trainer's label smoothing: a known loss that comes after the head, from the logits that it returns.

Trainer takes the labels out of the inputs and computes the smoothed loss from ``outputs.logits``. While such a step runs,
the head leaves its hidden states local, and ``LabelSmoother`` takes the local logits, deferred.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import Any, Callable, Iterator

import torch

from ds_cp import patches
from ds_cp.loss import shift_left
from ds_cp.patches.transformers import bounds
from ds_cp.patches.transformers.losses import causal_lm
from ds_cp.patches.transformers.losses.local_logits import LocalLogits

_steps: list[tuple[bool, bool]] = []
"""(a smoother takes the logits, nobody else asks for them) of the steps that run now, the innermost last."""


def expects(head: torch.nn.Module) -> bool:
    """True while a label smoother waits for the logits of a head whose own loss would be the shared one."""
    return bool(_steps) and _steps[-1][0] and causal_lm.keeps_local(head)


def loss_only() -> bool:
    """True while nobody asks for the logits of an evaluation."""
    return bool(_steps) and _steps[-1][1]


def install() -> None:
    """Patch the steps of Trainer that compute a loss, and the smoother itself."""
    from transformers import Trainer
    from transformers.trainer_pt_utils import LabelSmoother

    patches.replace(Trainer, "training_step", _training_step, "label smoothing takes local logits")
    patches.replace(
        Trainer, "prediction_step", _prediction_step, "an evaluation that wants the loss only holds no logits"
    )
    patches.replace(LabelSmoother, "__call__", _smoothed, "the loss of local logits, summed over the group")


@contextmanager
def _step(smooths: bool, loss_only: bool) -> Iterator[None]:
    _steps.append((smooths, loss_only))
    try:
        yield
    finally:
        _steps.pop()


def _is_known(trainer: Any) -> bool:
    """Whether a Trainer computes its loss as transformers or TRL wrote it; one of the user's own may do anything."""
    return type(trainer).compute_loss.__module__ in ("transformers.trainer", "trl.trainer.sft_trainer")


def _smooths(trainer: Any) -> bool:
    """Whether a Trainer's logits go to its label smoother and nowhere else."""
    return _is_known(trainer) and trainer.label_smoother is not None and trainer.compute_loss_func is None


def _training_step(original: Callable) -> Callable:
    @functools.wraps(original)
    def training_step(self, *args, **kwargs):
        with _step(_smooths(self), False):
            return original(self, *args, **kwargs)

    return training_step


def _prediction_step(original: Callable) -> Callable:
    @functools.wraps(original)
    def prediction_step(self, model, inputs, prediction_loss_only, *args, **kwargs):
        with _step(prediction_loss_only and _smooths(self), prediction_loss_only and _is_known(self)):
            return original(self, model, inputs, prediction_loss_only, *args, **kwargs)

    return prediction_step


def _smoothed(original: Callable) -> Callable:
    @functools.wraps(original)
    def __call__(self, model_output, labels, shift_labels=False, num_items_in_batch=None):
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if not isinstance(logits, LocalLogits):
            return original(self, model_output, labels, shift_labels, num_items_in_batch)
        targets = shift_left(labels, self.ignore_index) if shift_labels else labels
        bounds.refuse_out_of_range([bounds.label_lookup(targets, logits.for_loss().shape[-1], self.ignore_index)])
        return causal_lm.causal_lm_loss(
            logits.for_loss(), targets, logits.region, num_items_in_batch, self.ignore_index, self.epsilon
        )

    return __call__
