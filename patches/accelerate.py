"""accelerate: reads the key in its DeepSpeed config, and loads data and counts metrics by data-parallel rank."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Callable

import torch

from ds_cp import config as key
from ds_cp import patches
from ds_cp.patches import data_parallel
from ds_cp.patches.deepspeed import refuse_features

# ---- the size, and views of accelerate's objects -----------------------------------------------------------------


def cp_size_of_accelerator() -> int:
    """Ranks per sequence under the DeepSpeed plugin that accelerate runs with; 1 without a plugin or without the key."""
    from accelerate.state import AcceleratorState

    plugin = getattr(AcceleratorState(), "deepspeed_plugin", None)
    return data_parallel.cp_size_of_config(plugin.deepspeed_config) if plugin is not None else 1


class AcceleratorView(data_parallel.WorkerView):
    """An ``Accelerator`` whose processes are the data-parallel workers."""

    def __init__(self, accelerator: Any, cp_size: int):
        super().__init__(accelerator, cp_size, "num_processes", "process_index")

    def gather(self, tensor: Any) -> Any:
        return first_of_each_group(self._wrapped.gather(tensor), self._cp_size)

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum", scale: float = 1.0) -> torch.Tensor:
        reduced = self._wrapped.reduce(tensor, reduction, scale)
        return reduced / self._cp_size if reduction == "sum" else reduced


def first_of_each_group(gathered: Any, cp_size: int) -> Any:
    """Keep the samples that each context-parallel group's first rank contributed to a gather over the world.

    Args:
        gathered: Tensors [world * n, ...], or lists and dicts of them.
    """
    from accelerate.state import PartialState
    from accelerate.utils import recursively_apply

    world = PartialState().num_processes
    if world == 1:
        return gathered  # accelerate has not gathered
    return recursively_apply(lambda tensor: tensor.unflatten(0, (world, -1))[::cp_size].flatten(0, 1), gathered)


# ---- configs -----------------------------------------------------------------------------------------------------


def watch_config() -> None:
    """Read the key in ``HfDeepSpeedConfig``, which Trainer, accelerate and users of ``zero.Init`` build first."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    why = "reads the key before anything is built from the config"
    patches.replace(HfDeepSpeedConfig, "__init__", _read_key, why)


def watch_launcher() -> None:
    """Refuse the key in ``accelerate launch``'s own config, which passes on only the DeepSpeed fields that it knows."""
    from accelerate.commands.config.config_args import ClusterConfig

    why = "refuses the key where it is not read"
    patches.replace(ClusterConfig, "__post_init__", _refuse_key_in_launch_config, why, "deepspeed_config")


def _read_key(original: Callable) -> Callable:
    """``HfDeepSpeedConfig.__init__``: check the key, write its explicit form into the config, install all patches."""

    @functools.wraps(original)
    def __init__(self, config_file_or_dict):
        original(self, config_file_or_dict)
        data_parallel.refuse_unread_key(self.config)
        requested = data_parallel.active_config(self.config)
        if key.KEY in self.config and not patches.disabled():
            key.normalise(self.config, data_parallel.world_size())
        if requested is None:
            return
        refuse_features(self.config)
        patches.install()
        if self.config.get("train_batch_size") == "auto":
            # Trainer and accelerate would fill it in by the world size; DeepSpeed derives it from the micro batch and
            # the accumulation steps, by the data-parallel size.
            del self.config["train_batch_size"]

    return __init__


def _refuse_key_in_launch_config(original: Callable) -> Callable:
    @functools.wraps(original)
    def __post_init__(self):
        original(self)
        name = key.unread_key(self.deepspeed_config, read_here=())
        if name and not patches.disabled():
            raise key.ConfigError(
                f'"{name}" under deepspeed_config in accelerate\'s own config is not passed on to the processes, so no '
                f'sequence would be shared, silently. Put "{key.KEY}" into a DeepSpeed JSON, with the other DeepSpeed '
                "settings, and name that file there as deepspeed_config_file. Nothing was started."
            )

    return __post_init__


# ---- what a run with the key patches -----------------------------------------------------------------------------


def install() -> None:
    """Refuse combinations that would ignore the key, and count batches, samples and steps by data-parallel worker."""
    import accelerate.accelerator as module
    from accelerate import data_loader, scheduler
    from accelerate.data_loader import DataLoaderDispatcher
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState

    patches.require(AcceleratorState, "deepspeed_plugin", "the key is found in its config")
    why = "refuses a run that would ignore the key"
    patches.replace(AcceleratorState, "__init__", _refuse_run_without_deepspeed, why, "deepspeed_plugin")
    why = "two ways to share a sequence exclude each other"
    patches.replace(ParallelismConfig, "get_device_mesh", _refuse_other_parallelism, why)

    why = "all ranks of a group read the same batches"
    patches.replace(module, "prepare_data_loader", _load_by_dp_rank, why, "num_processes", "process_index")
    patches.require(module.Accelerator, "prepare_data_loader", why, "prepare_data_loader")
    patches.replace(DataLoaderDispatcher, "__init__", _dispatch_by_dp_rank, why, "state", "slice_fn")
    why = "batches are read on the host, where their tensors come from"
    patches.replace(data_loader, "send_to_device", _remember_host_tensors, why)

    why = "metrics count each group's samples once"
    patches.replace(
        module.Accelerator, "gather_for_metrics", _gather_once_per_group, why, "gather", "use_gather_object"
    )

    why = "a schedule is counted in batches, and a group reads one"
    patches.require(scheduler.AcceleratedScheduler, "step", why, "AcceleratorState", "num_processes")
    patches.replace(scheduler, "AcceleratorState", _step_by_workers, why)
    names = "total_num_steps", "num_processes"
    patches.replace(module.Accelerator, "_prepare_deepspeed", _size_dummy_scheduler_by_workers, why, *names)


def _refuse_run_without_deepspeed(original: Callable) -> Callable:
    """``AcceleratorState.__init__``: ``Accelerator(cpu=True)`` ignores the DeepSpeed plugin that it gets."""

    @functools.wraps(original)
    def __init__(self, *args, deepspeed_plugin=None, **kwargs):
        original(self, *args, deepspeed_plugin=deepspeed_plugin, **kwargs)
        plugins = deepspeed_plugin.values() if isinstance(deepspeed_plugin, dict) else [deepspeed_plugin]
        has_key = any(data_parallel.active_config(plugin.deepspeed_config) for plugin in plugins if plugin is not None)
        if has_key and getattr(self, "deepspeed_plugin", None) is None:
            raise key.ConfigError(
                f'accelerate was given a DeepSpeed config with "{key.KEY}" and runs {self.distributed_type.value} instead of '
                "DeepSpeed, as it does with Accelerator(cpu=True): no sequence would be shared and no ZeRO stage used, "
                "silently. On CPUs leave that argument out, and call accelerate.PartialState(cpu=True) before. Nothing "
                "was started."
            )

    return __init__


def _refuse_other_parallelism(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_device_mesh(self, *args, **kwargs):
        cp_size = cp_size_of_accelerator()
        sizes = {name: getattr(self, name, 1) for name in ("cp_size", "sp_size", "tp_size")}  # 1.10 has no sp_size
        others = " and ".join(f"{name} = {size}" for name, size in sizes.items() if size > 1)
        if cp_size > 1 and others:
            raise key.ConfigError(
                f'"context_parallel" (size {cp_size}) in the DeepSpeed config and {others} in accelerate\'s ParallelismConfig both '
                "share the work of one batch: the sequence would be cut twice, or batches sent to the wrong ranks. Leave one "
                "of the two out (the settings PARALLELISM_CONFIG_* of the environment count too). Nothing was started."
            )
        return original(self, *args, **kwargs)

    return get_device_mesh


def _load_by_dp_rank(original: Callable) -> Callable:
    @functools.wraps(original)
    def prepare_data_loader(dataloader, device=None, num_processes=None, process_index=None, **kwargs):
        cp_size = cp_size_of_accelerator()
        if cp_size > 1:
            # From torch.distributed: on CPUs without `cpu=True` accelerate believes that each rank is the only one.
            num_processes = data_parallel.dp_size(cp_size)
            process_index = data_parallel.dp_rank(cp_size)
            _seed_loader_workers(dataloader, process_index)
        return original(dataloader, device, num_processes, process_index, **kwargs)

    return prepare_data_loader


def _remember_host_tensors(original: Callable) -> Callable:
    """``accelerate.data_loader.send_to_device``, by which loaders move batches to the device."""
    from ds_cp.patches.transformers import host_copies

    @functools.wraps(original)
    def send_to_device(tensor, device, *args, **kwargs):
        sent = original(tensor, device, *args, **kwargs)
        host_copies.remember(tensor, sent)
        return sent

    return send_to_device


def _seed_loader_workers(dataloader: Any, dp_rank: int) -> None:
    """Seed a loader's worker processes by data-parallel rank, where Trainer seeds them by rank.

    Collators that draw random numbers must produce the same batch on all ranks of a group.
    """
    seed = dataloader.worker_init_fn
    if isinstance(seed, functools.partial) and "rank" in seed.keywords:
        dataloader.worker_init_fn = functools.partial(seed.func, *seed.args, **{**seed.keywords, "rank": dp_rank})


def _dispatch_by_dp_rank(original: Callable) -> Callable:
    """``DataLoaderDispatcher.__init__``: rank 0 of the world reads, and sends one part of a batch to each group."""

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        cp_size = cp_size_of_accelerator()
        if cp_size == 1:
            return
        # only num_processes: the rank stays the world's, because one rank of the world reads for all
        self.state, slice_by_worker = data_parallel.WorkerView(self.state, cp_size, "num_processes"), self.slice_fn

        def slice_fn(batch, part, process_index=None, num_processes=None):
            dp_rank = process_index // cp_size
            if part.start:  # computed from the rank in the world; a part that starts at 0 is rank 0's, or equal for all
                length = part.stop - part.start
                part = slice(dp_rank * length, (dp_rank + 1) * length)
            return slice_by_worker(batch, part, process_index=dp_rank, num_processes=num_processes)

        self.slice_fn = slice_fn

    return __init__


def _gather_once_per_group(original: Callable) -> Callable:
    @functools.wraps(original)
    def gather_for_metrics(self, input_data, use_gather_object=False):
        cp_size = cp_size_of_accelerator()
        if cp_size == 1:
            return original(self, input_data, use_gather_object)
        use_gather_object = use_gather_object or not _holds_only_tensors(input_data)  # accelerate's own condition
        if use_gather_object and self.process_index % cp_size:
            input_data = type(input_data)()
        self.gather = lambda data: first_of_each_group(type(self).gather(self, data), cp_size)
        try:
            return original(self, input_data, use_gather_object)
        finally:
            del self.gather

    return gather_for_metrics


def _holds_only_tensors(data: Any) -> bool:
    from accelerate.utils import recursively_apply

    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _step_by_workers(original: Callable) -> Callable:
    """``AcceleratorState`` as a prepared scheduler sees it, which steps ``num_processes`` times per training step."""

    def state():
        whole_state, cp_size = original(), cp_size_of_accelerator()
        return whole_state if cp_size == 1 else data_parallel.WorkerView(whole_state, cp_size, "num_processes")

    return state


def _size_dummy_scheduler_by_workers(original: Callable) -> Callable:
    """``Accelerator._prepare_deepspeed``: it divides a ``DummyScheduler``'s length by the ranks; workers are wanted."""

    @functools.wraps(original)
    def _prepare_deepspeed(self, *args):
        cp_size = cp_size_of_accelerator()
        if cp_size > 1 and self.is_main_process and any(hasattr(arg, "get_last_lr") for arg in args):
            warnings.warn(
                f"ds_cp: accelerate steps this scheduler {data_parallel.dp_size(cp_size)} times per training step, once per data-parallel "
                "worker. Where a script multiplies its length by accelerator.num_processes, the number of ranks, let it "
                "multiply by ds_cp.dp_size(config).",
                stacklevel=3,
            )
        is_sized_by_ranks = cp_size > 1 and not self.split_batches
        dummies = [arg for arg in args if is_sized_by_ranks and getattr(arg, "total_num_steps", None)]
        for dummy in dummies:
            dummy.total_num_steps *= cp_size
        try:
            return original(self, *args)
        finally:
            for dummy in dummies:
                dummy.total_num_steps //= cp_size

    return _prepare_deepspeed
