"""Trainer's label smoothing: a known loss that is computed after the task head, from the logits that it returns.

Step 3 of the list in :mod:`~ds_cp.patches.transformers.losses`, in place of :mod:`.causal_lm`: with ``label_smoothing_factor``,
Trainer takes the labels out of the inputs and passes ``outputs.logits`` to its ``LabelSmoother``. During such a step the task
head leaves its hidden states local and returns :class:`.LocalLogits`, from which the smoother computes the loss.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import Any, Callable, Iterator, NamedTuple

import torch

from ds_cp import patches
from ds_cp.loss import shift_left
from ds_cp.patches.transformers import bounds
from ds_cp.patches.transformers.losses import causal_lm
from ds_cp.patches.transformers.losses.local_logits import LocalLogits


class _Step(NamedTuple):
    """A running step of Trainer that computes a loss.

    Attributes:
        smooths: Whether the logits go to the label smoother and nowhere else.
        loss_only: Whether the step is an evaluation that returns no logits.
    """

    smooths: bool
    loss_only: bool


_running_steps: list[_Step] = []
"""The innermost is the last."""


def expects(head: torch.nn.Module) -> bool:
    """Whether a label smoother takes the logits of a model whose own loss is :func:`.causal_lm.shared_loss`."""
    return bool(_running_steps) and _running_steps[-1].smooths and causal_lm.keeps_local(head)


def loss_only() -> bool:
    """Whether an evaluation runs that returns no logits."""
    return bool(_running_steps) and _running_steps[-1].loss_only


def install() -> None:
    """Patch Trainer's steps that compute a loss, and its label smoother."""
    from transformers import Trainer
    from transformers.trainer_pt_utils import LabelSmoother

    patches.replace(Trainer, "training_step", _training_step, "label smoothing takes local logits")
    patches.replace(
        Trainer, "prediction_step", _prediction_step, "an evaluation that returns the loss only keeps no logits"
    )
    patches.replace(LabelSmoother, "__call__", _smooth, "the loss of local logits, summed over the group")


@contextmanager
def _running(step: _Step) -> Iterator[None]:
    _running_steps.append(step)
    try:
        yield
    finally:
        _running_steps.pop()


def _is_known(trainer: Any) -> bool:
    """Whether a Trainer's ``compute_loss`` is that of transformers or TRL. The user's own may do anything with the logits."""
    return type(trainer).compute_loss.__module__ in ("transformers.trainer", "trl.trainer.sft_trainer")


def _smooths(trainer: Any) -> bool:
    """Whether a Trainer's logits go to its label smoother and nowhere else."""
    return _is_known(trainer) and trainer.label_smoother is not None and trainer.compute_loss_func is None


def _training_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _running(_Step(_smooths(self), loss_only=False)):
            return original(self, *args, **kwargs)

    return training_step


def _prediction_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prediction_step(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        step = _Step(prediction_loss_only and _smooths(self), prediction_loss_only and _is_known(self))
        with _running(step):
            return original(self, model, inputs, prediction_loss_only, *args, **kwargs)

    return prediction_step


def _smooth(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(
        self: Any,
        model_output: Any,
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if not isinstance(logits, LocalLogits):
            return original(self, model_output, labels, shift_labels, num_items_in_batch)
        targets = shift_left(labels, self.ignore_index) if shift_labels else labels
        bounds.refuse_out_of_range([bounds.label_lookup(targets, logits.for_loss().shape[-1], self.ignore_index)])
        return causal_lm.causal_lm_loss(
            logits.for_loss(), targets, logits.region, num_items_in_batch, self.ignore_index, self.epsilon
        )

    return __call__
