"""Trainer: batch sizes, samplers and counters by data-parallel rank. The loss stays Trainer's own."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable

import torch

from ds_cp import patches
from ds_cp.patches import accelerate, data_parallel
from ds_cp.patches.transformers import neftune
from ds_cp.patches.transformers.losses import label_smoothing
from ds_cp.patches.trl import rollouts


def arguments_view(args: Any, size: int) -> data_parallel.WorkerView:
    """TrainingArguments as seen by batch arithmetic and samplers."""
    return data_parallel.WorkerView(args, size, "world_size", "process_index")


def install() -> None:
    """Patch the config's batch size check, which TrainingArguments calls; the Trainer itself only then, for importing
    it costs a plain loop a second."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    patches.replace(
        HfTrainerDeepSpeedConfig, "trainer_config_process", _config_process, "batch sizes by dp", "world_size"
    )


def _install_trainer() -> None:
    """Patch the Trainer's places that count the world's ranks."""
    from transformers import Trainer, TrainingArguments, trainer

    patches.require(TrainingArguments, "__post_init__", "the key is found in its config", "hf_deepspeed_config")
    patches.replace(Trainer, "get_tp_size", _ranks_per_batch, "batch sizes and loss count each group once")
    patches.require(Trainer, "get_total_train_batch_size", "batch sizes count each group once", "get_tp_size")
    patches.require(Trainer, "compute_loss", "the loss counts each group once", "get_tp_size")
    why = "a count of one rank holds no batch twice"
    patches.replace(Trainer, "_get_num_items_in_batch", _local_count, why, "get_tp_size")
    patches.replace(
        Trainer, "_track_num_input_tokens", _counted_once("num_input_tokens_seen"), "counts each group once"
    )
    patches.replace(Trainer, "store_flos", _counted_once("total_flos"), "counts each group once")
    patches.replace(Trainer, "_get_train_sampler", _sampler, "samplers that go by rank go by data-parallel rank")
    patches.replace(Trainer, "evaluation_loop", _gathering, "samples of a group are gathered once", "gather_function")
    why = "steps per second by data-parallel rank"
    patches.replace(Trainer, "evaluate", _evaluating, why, "speed_metrics")
    patches.replace(Trainer, "predict", _evaluating, why, "speed_metrics")
    patches.replace(trainer, "speed_metrics", _speed, why, "num_samples", "num_steps")
    label_smoothing.install()
    neftune.install()


def _config_process(original: Callable) -> Callable:
    @functools.wraps(original)
    def trainer_config_process(self, args, *rest, **kwargs):
        size = data_parallel.cp_size_of_config(self.config)
        _install_trainer()
        rollouts.install_for(args, size)
        return original(self, arguments_view(args, size), *rest, **kwargs)

    return trainer_config_process


def _ranks_per_batch(original: Callable) -> Callable:
    """How many ranks see one batch: what Trainer and TRL divide the world by, for batch sizes, token counts and the
    factor of a loss that is a sum over a count of the world."""

    @functools.wraps(original)
    def get_tp_size(self):
        return original(self) * _size(self)

    return get_tp_size


def _local_count(original: Callable) -> Callable:
    """Trainer divides by the ranks that see one batch also where it did not sum over the world."""

    @functools.wraps(original)
    def _get_num_items_in_batch(self, *args, **kwargs):
        count = original(self, *args, **kwargs)
        is_sum = self.args.average_tokens_across_devices and self.args.world_size > 1
        return count if is_sum or not torch.is_tensor(count) else count * _size(self)

    return _get_num_items_in_batch


def _counted_once(counter: str) -> Callable:
    """What a method adds to a counter of the state is a sum over the world: count each group once."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def method(self, *args, **kwargs):
            before = getattr(self.state, counter)
            original(self, *args, **kwargs)
            size = _size(self)
            if size > 1:
                added = getattr(self.state, counter) - before
                setattr(self.state, counter, before + type(before)(added // size))

        return method

    return make


def _sampler(original: Callable) -> Callable:
    @functools.wraps(original)
    def _get_train_sampler(self, *args, **kwargs):
        size, own = _size(self), self.args
        if size == 1:
            return original(self, *args, **kwargs)
        self.args = arguments_view(own, size)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.args = own

    return _get_train_sampler


_evaluated: list[Any] = []
"""The trainers that evaluate or predict now, the innermost last."""


def _evaluating(original: Callable) -> Callable:
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        _evaluated.append(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _evaluated.pop()

    return method


def _gathering(original: Callable) -> Callable:
    """Seq2SeqTrainer gathers by ``Accelerator.gather``, which knows no groups, unlike ``gather_for_metrics``."""

    @functools.wraps(original)
    def evaluation_loop(self, *args, **kwargs):
        size, gather = _size(self), self.gather_function
        if size > 1 and getattr(gather, "__func__", None) is type(self.accelerator).gather:
            self.gather_function = lambda data: accelerate.first_of_each_group(gather(data), size)
        return original(self, *args, **kwargs)

    return evaluation_loop


def _speed(original: Callable) -> Callable:
    @functools.wraps(original)
    def speed_metrics(split, start_time, num_samples=None, num_steps=None, num_tokens=None):
        if _evaluated and num_samples and num_steps and _size(_evaluated[-1]) > 1:
            args = arguments_view(_evaluated[-1].args, _size(_evaluated[-1]))
            num_steps = math.ceil(num_samples / (args.eval_batch_size * args.world_size))
        return original(split, start_time, num_samples, num_steps, num_tokens)

    return speed_metrics


def _size(trainer: Any) -> int:
    return data_parallel.cp_size_of_arguments(trainer.args)
