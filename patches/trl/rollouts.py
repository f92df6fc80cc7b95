"""TRL's trainers that generate their training data (GRPO, RLOO, distillation): one rollout per context-parallel group.

These trainers size their generation batch by the number of ranks, seed each rank differently, and find their own part of
gathered data by rank. Under the key all ranks of a group hold the same prompts, so all of this goes by data-parallel rank,
and all ranks of a group train on the completions and rewards of the group's first rank.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any, Callable

import torch

from ds_cp import patches
from ds_cp.config import ConfigError
from ds_cp.patches import accelerate, data_parallel

TRAINERS = {
    "GRPOConfig": ("trl.trainer.grpo_trainer", "GRPOTrainer"),
    "RLOOConfig": ("trl.trainer.rloo_trainer", "RLOOTrainer"),
    "DistillationConfig": ("trl.trainer.distillation_trainer", "DistillationTrainer"),
}
"""Module and class of the trainer, by the class of its arguments."""

METHODS_THAT_COUNT_RANKS = ("_prepare_inputs", "compute_loss", "get_train_dataloader", "_get_train_sampler")
"""Methods that use the number of processes, or find their own part of a batch by the process index."""

WHY = "rollouts go by data-parallel rank"


def install_for(args: Any, cp_size: int) -> None:
    """Patch the trainer that belongs to these TrainingArguments, if it is one that generates.

    Raises:
        ConfigError: The way of generating would mix the prompts of different groups.
    """
    for owner in type(args).__mro__:
        if owner.__name__ in TRAINERS and owner.__module__.startswith("trl."):
            _refuse_server(args, cp_size)
            _install(owner, *TRAINERS[owner.__name__])


def _refuse_server(args: Any, cp_size: int) -> None:
    if cp_size > 1 and getattr(args, "use_vllm", False) and args.vllm_mode == "server":
        raise ConfigError(
            '"vllm_mode": "server" together with "context_parallel" is refused: TRL sends the prompts of all ranks to the '
            "server, and the ranks of a group hold the same prompts, so completions would come back to other prompts than "
            'they belong to. Use "colocate", or generate with transformers. Nothing was started.'
        )


def _install(config_class: Any, module_name: str, trainer_name: str) -> None:
    module = import_module(module_name)
    trainer = getattr(module, trainer_name)
    if hasattr(config_class, "generation_batch_size") and "world_size" not in vars(config_class):
        config_class.world_size = property(_world_size(config_class.world_size.fget))
        target = f"{module_name}.{config_class.__name__}.world_size"
        patches.record(patches.Patch(target, WHY, lambda: delattr(config_class, "world_size")))
    patches.replace(module, "set_seed", _seed_by_dp_rank, "ranks of a group draw the same completions")
    if hasattr(module, "gather"):
        patches.replace(module, "gather", _gather_once_per_group, WHY)
    patches.replace(module, "gather_object", _gather_object_once_per_group, WHY)
    why = "a group trains on the completions of its first rank"
    patches.replace(trainer, "_generate", _completions_of_first_rank, why)
    for method in METHODS_THAT_COUNT_RANKS:
        patches.replace(trainer, method, _with_accelerator_view, WHY)


def _world_size(original: Callable) -> Callable:
    """``world_size`` counts workers until ``generation_batch_size`` is computed from it, then ranks.

    Trainer itself reads ranks, and has patches of its own.
    """

    def world_size(self) -> int:
        is_sized = self.generation_batch_size is not None and self.steps_per_generation is not None
        return original(self) if is_sized else original(self) // data_parallel.cp_size_of_arguments(self)

    return world_size


def _seed_by_dp_rank(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_seed(seed, device_specific=False, **kwargs):
        cp_size = accelerate.cp_size_of_accelerator() if device_specific else 1
        if cp_size == 1:
            return original(seed, device_specific, **kwargs)
        return original(seed + data_parallel.dp_rank(cp_size), **kwargs)

    return set_seed


def _gather_once_per_group(original: Callable) -> Callable:
    @functools.wraps(original)
    def gather(tensor):
        cp_size = accelerate.cp_size_of_accelerator()
        return original(tensor) if cp_size == 1 else accelerate.first_of_each_group(original(tensor), cp_size)

    return gather


def _gather_object_once_per_group(original: Callable) -> Callable:
    @functools.wraps(original)
    def gather_object(value):
        cp_size = accelerate.cp_size_of_accelerator()
        return original(type(value)() if cp_size > 1 and data_parallel.rank() % cp_size else value)

    return gather_object


def _completions_of_first_rank(original: Callable) -> Callable:
    """Each rank generates; kernels, tools and servers may answer differently, so the first rank's completions are taken."""

    @functools.wraps(original)
    def _generate(self, prompts):
        from ds_cp.patches.transformers.attach import attachment

        own_completions = original(self, prompts)
        attached = attachment(self.model)
        if attached is None:
            return own_completions
        control_group = attached.mesh.control_group
        is_first = torch.distributed.get_rank() == control_group.ranks[0]
        return control_group.all_gather_object(own_completions if is_first else None, "the completions of a group")[0]

    return _generate


def _with_accelerator_view(original: Callable) -> Callable:
    """Run a trainer's method with an accelerator whose processes are the data-parallel workers."""

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        cp_size, accelerator = accelerate.cp_size_of_accelerator(), self.accelerator
        if cp_size == 1 or isinstance(accelerator, accelerate.AcceleratorView):
            return original(self, *args, **kwargs)
        self.accelerator = accelerate.AcceleratorView(accelerator, cp_size)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.accelerator = accelerator

    return method
