"""Trainer: batch sizes, samplers and counters go by data-parallel rank. Its loss is not changed here."""

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


def arguments_view(args: Any, cp_size: int) -> data_parallel.WorkerView:
    """TrainingArguments whose processes are the data-parallel workers, for batch arithmetic and samplers."""
    return data_parallel.WorkerView(args, cp_size, "world_size", "process_index")


def install() -> None:
    """Patch the config's batch size check, which TrainingArguments calls.

    Trainer itself is patched only then, because its import costs a training loop without Trainer one second.
    """
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    why = "batch sizes by dp"
    patches.replace(
        HfTrainerDeepSpeedConfig, "trainer_config_process", _check_batch_sizes_by_workers, why, "world_size"
    )


def _check_batch_sizes_by_workers(original: Callable) -> Callable:
    @functools.wraps(original)
    def trainer_config_process(self, args, *rest, **kwargs):
        cp_size = data_parallel.cp_size_of_config(self.config)
        _install_trainer()
        rollouts.install_for(args, cp_size)
        return original(self, arguments_view(args, cp_size), *rest, **kwargs)

    return trainer_config_process


def _install_trainer() -> None:
    """Patch the methods of Trainer that count ranks."""
    from transformers import Trainer, TrainingArguments, trainer

    patches.require(TrainingArguments, "__post_init__", "the key is found in its config", "hf_deepspeed_config")

    why = "batch sizes and loss count each group once"
    patches.replace(Trainer, "get_tp_size", _ranks_per_batch, why)
    patches.require(Trainer, "get_total_train_batch_size", why, "get_tp_size")
    patches.require(Trainer, "compute_loss", why, "get_tp_size")
    why = "a count of one rank holds no batch twice"
    patches.replace(Trainer, "_get_num_items_in_batch", _count_of_this_rank, why, "get_tp_size")

    why = "counts each group once"
    patches.replace(Trainer, "_track_num_input_tokens", _count_once_per_group("num_input_tokens_seen"), why)
    patches.replace(Trainer, "store_flos", _count_once_per_group("total_flos"), why)
    why = "samplers that go by rank go by data-parallel rank"
    patches.replace(Trainer, "_get_train_sampler", _sample_by_dp_rank, why)
    why = "samples of a group are gathered once"
    patches.replace(Trainer, "evaluation_loop", _gather_once_per_group, why, "gather_function")

    why = "steps per second by data-parallel rank"
    patches.replace(Trainer, "evaluate", _note_evaluation, why, "speed_metrics")
    patches.replace(Trainer, "predict", _note_evaluation, why, "speed_metrics")
    patches.replace(trainer, "speed_metrics", _steps_by_workers, why, "num_samples", "num_steps")

    label_smoothing.install()
    neftune.install()


def _cp_size(trainer: Any) -> int:
    return data_parallel.cp_size_of_arguments(trainer.args)


def _ranks_per_batch(original: Callable) -> Callable:
    """``Trainer.get_tp_size``: number of ranks that see one batch.

    Trainer and TRL divide the world by it, for batch sizes, for token counts, and for the factor of a loss that is a sum
    divided by a count over the world.
    """

    @functools.wraps(original)
    def get_tp_size(self):
        return original(self) * _cp_size(self)

    return get_tp_size


def _count_of_this_rank(original: Callable) -> Callable:
    """``Trainer._get_num_items_in_batch``: it divides by the ranks that see one batch even if it did not sum over ranks."""

    @functools.wraps(original)
    def _get_num_items_in_batch(self, *args, **kwargs):
        count = original(self, *args, **kwargs)
        is_sum_over_world = self.args.average_tokens_across_devices and self.args.world_size > 1
        return count if is_sum_over_world or not torch.is_tensor(count) else count * _cp_size(self)

    return _get_num_items_in_batch


def _count_once_per_group(counter: str) -> Callable:
    """Patch a method that adds a sum over the world to ``counter`` of Trainer's state."""

    def make_replacement(original: Callable) -> Callable:
        @functools.wraps(original)
        def method(self, *args, **kwargs):
            before = getattr(self.state, counter)
            original(self, *args, **kwargs)
            cp_size = _cp_size(self)
            if cp_size > 1:
                added = getattr(self.state, counter) - before
                setattr(self.state, counter, before + type(before)(added // cp_size))

        return method

    return make_replacement


def _sample_by_dp_rank(original: Callable) -> Callable:
    @functools.wraps(original)
    def _get_train_sampler(self, *args, **kwargs):
        cp_size, arguments = _cp_size(self), self.args
        if cp_size == 1:
            return original(self, *args, **kwargs)
        self.args = arguments_view(arguments, cp_size)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.args = arguments

    return _get_train_sampler


def _gather_once_per_group(original: Callable) -> Callable:
    """``Trainer.evaluation_loop``: Seq2SeqTrainer gathers by ``Accelerator.gather``, over all ranks of the world.

    ``Accelerator.gather_for_metrics``, which Trainer uses otherwise, has a patch of its own.
    """

    @functools.wraps(original)
    def evaluation_loop(self, *args, **kwargs):
        cp_size, gather = _cp_size(self), self.gather_function
        if cp_size > 1 and getattr(gather, "__func__", None) is type(self.accelerator).gather:
            self.gather_function = lambda data: accelerate.first_of_each_group(gather(data), cp_size)
        return original(self, *args, **kwargs)

    return evaluation_loop


_evaluating_trainers: list[Any] = []
"""Trainers that evaluate or predict now, the innermost last: ``speed_metrics`` gets no trainer."""


def _note_evaluation(original: Callable) -> Callable:
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        _evaluating_trainers.append(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _evaluating_trainers.pop()

    return method


def _steps_by_workers(original: Callable) -> Callable:
    """``speed_metrics``: Trainer counts the steps of an evaluation by the number of ranks."""

    @functools.wraps(original)
    def speed_metrics(split, start_time, num_samples=None, num_steps=None, num_tokens=None):
        cp_size = _cp_size(_evaluating_trainers[-1]) if _evaluating_trainers else 1
        if cp_size > 1 and num_samples and num_steps:
            args = arguments_view(_evaluating_trainers[-1].args, cp_size)
            num_steps = math.ceil(num_samples / (args.eval_batch_size * args.world_size))
        return original(split, start_time, num_samples, num_steps, num_tokens)

    return speed_metrics
