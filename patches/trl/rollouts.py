"""TRL's trainers that generate what they train on (GRPO, RLOO, distillation): one rollout per group, counted once.

They size their generation batch by the world, seed each rank differently, and find their own part of what they gathered
by the rank. Under the key all ranks of a group hold the same prompts, so all of that goes by data-parallel rank, and the
completions and rewards of a group's first rank are the group's.
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
COUNTING = ("_prepare_inputs", "compute_loss", "get_train_dataloader", "_get_train_sampler")
"""Methods that count processes, or look for their own part by the process."""
WHY = "rollouts go by data-parallel rank"


def install_for(args: Any, size: int) -> None:
    """Patch the trainer of these arguments, if it is one that generates.

    Raises:
        ConfigError: a way of generating that would mix the prompts of different groups.
    """
    for owner in type(args).__mro__:
        if owner.__name__ in TRAINERS and owner.__module__.startswith("trl."):
            _refuse_server(args, size)
            _install(owner, *TRAINERS[owner.__name__])


def _refuse_server(args: Any, size: int) -> None:
    if size > 1 and getattr(args, "use_vllm", False) and args.vllm_mode == "server":
        raise ConfigError(
            '"vllm_mode": "server" together with "context_parallel" is refused: TRL sends the prompts of all ranks to the '
            "server, and the ranks of a group hold the same prompts, so completions would come back to other prompts than "
            'they belong to. Use "colocate", or generate with transformers. Nothing was started.'
        )


def _install(config: type, module_name: str, trainer_name: str) -> None:
    module = import_module(module_name)
    trainer = getattr(module, trainer_name)
    if hasattr(config, "generation_batch_size") and "world_size" not in vars(config):
        config.world_size = property(_world_size(config.world_size.fget))
        patches.record(
            patches.Patch(f"{module_name}.{config.__name__}.world_size", WHY, lambda: delattr(config, "world_size"))
        )
    patches.replace(module, "set_seed", _seed, "ranks of a group draw the same completions")
    if hasattr(module, "gather"):
        patches.replace(module, "gather", _gather, WHY)
    patches.replace(module, "gather_object", _gather_object, WHY)
    patches.replace(trainer, "_generate", _of_first_rank, "the completions of a group's first rank are the group's")
    for method in COUNTING:
        patches.replace(trainer, method, _with_groups, WHY)


def _world_size(original: Callable) -> Callable:
    """By groups while the size of the generation batch is worked out, then the world as ever: Trainer counts for itself."""

    def world_size(self) -> int:
        known = self.generation_batch_size is not None and self.steps_per_generation is not None
        return original(self) if known else original(self) // data_parallel.cp_size_of_arguments(self)

    return world_size


def _seed(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_seed(seed, device_specific=False, **kwargs):
        size = accelerate.cp_size_of_accelerator() if device_specific else 1
        if size == 1:
            return original(seed, device_specific, **kwargs)
        return original(seed + data_parallel.dp_rank(size), **kwargs)

    return set_seed


def _gather(original: Callable) -> Callable:
    @functools.wraps(original)
    def gather(tensor):
        size = accelerate.cp_size_of_accelerator()
        return original(tensor) if size == 1 else accelerate.first_of_each_group(original(tensor), size)

    return gather


def _gather_object(original: Callable) -> Callable:
    @functools.wraps(original)
    def gather_object(value):
        size = accelerate.cp_size_of_accelerator()
        return original(type(value)() if size > 1 and data_parallel.rank() % size else value)

    return gather_object


def _of_first_rank(original: Callable) -> Callable:
    """Kernels, tools and servers may answer each rank differently; a group must train on one text."""

    @functools.wraps(original)
    def _generate(self, prompts):
        from ds_cp.patches.transformers.attach import attachment

        mine = original(self, prompts)
        state = attachment(self.model)
        if state is None:
            return mine
        control = state.mesh.control_group
        is_first = torch.distributed.get_rank() == control.ranks[0]
        return control.all_gather_object(mine if is_first else None, "the completions of a group")[0]

    return _generate


def _with_groups(original: Callable) -> Callable:
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        size, own = accelerate.cp_size_of_accelerator(), self.accelerator
        if size == 1 or isinstance(own, accelerate.AcceleratorView):
            return original(self, *args, **kwargs)
        self.accelerator = accelerate.AcceleratorView(own, size)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.accelerator = own

    return method
