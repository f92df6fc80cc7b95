"""accelerate: the key where its DeepSpeed config is read, and data loaders by data-parallel rank."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Callable

import torch

from ds_cp import config as key
from ds_cp import patches
from ds_cp.patches import data_parallel
from ds_cp.patches.deepspeed import refuse_features


def cp_size_of_accelerator() -> int:
    """Ranks per sequence of the DeepSpeed plugin that accelerate runs with; 1 without one, or without the key."""
    from accelerate.state import AcceleratorState

    plugin = getattr(AcceleratorState(), "deepspeed_plugin", None)
    return data_parallel.cp_size_of_config(plugin.deepspeed_config) if plugin is not None else 1


class AcceleratorView(data_parallel.WorkerView):
    """An ``Accelerator`` whose processes are the groups."""

    def __init__(self, whole: Any, size: int):
        super().__init__(whole, size, "num_processes", "process_index")

    def gather(self, tensor: Any) -> Any:
        return first_of_each_group(self._whole.gather(tensor), self._size)

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum", scale: float = 1.0) -> torch.Tensor:
        reduced = self._whole.reduce(tensor, reduction, scale)
        return reduced / self._size if reduction == "sum" else reduced


def first_of_each_group(gathered: Any, size: int) -> Any:
    """What was gathered over the world, [world * n, ...] in tensors, lists and dicts, without what groups hold twice."""
    from accelerate.state import PartialState
    from accelerate.utils import recursively_apply

    world = PartialState().num_processes
    if world == 1:
        return gathered  # accelerate gathers from nobody
    return recursively_apply(lambda tensor: tensor.unflatten(0, (world, -1))[::size].flatten(0, 1), gathered)


def watch_config() -> None:
    """Read the key in ``HfDeepSpeedConfig``, which Trainer, accelerate and ``zero.Init`` users build first of all."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    def make(original: Callable) -> Callable:
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
                # whoever fills it multiplies by the world; DeepSpeed itself derives it from the other two, by dp
                del self.config["train_batch_size"]

        return __init__

    patches.replace(HfDeepSpeedConfig, "__init__", make, "reads the key before anything is built from the config")


def watch_launcher() -> None:
    """Refuse the key among the fields of ``accelerate launch``, which hands on only those that it knows."""
    from accelerate.commands.config.config_args import ClusterConfig

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def __post_init__(self):
            original(self)
            found = key.unread_key(self.deepspeed_config, read_here=())
            if found and not patches.disabled():
                raise key.ConfigError(
                    f'"{found}" under deepspeed_config in accelerate\'s own config is not handed on to the processes, so no '
                    f'sequence would be shared, without a word. Put "{key.KEY}" into a DeepSpeed JSON, with the other DeepSpeed '
                    "settings, and name that file there as deepspeed_config_file. Nothing was started."
                )

        return __post_init__

    patches.replace(ClusterConfig, "__post_init__", make, "the key where nobody would read it", "deepspeed_config")


def install() -> None:
    """Give all ranks of a group the same batches."""
    import accelerate.accelerator as module
    from accelerate import scheduler
    from accelerate.data_loader import DataLoaderDispatcher
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState

    patches.require(AcceleratorState, "deepspeed_plugin", "the key is found in its config")
    patches.replace(AcceleratorState, "__init__", _not_without_deepspeed, "a key that nobody obeys", "deepspeed_plugin")
    patches.replace(
        ParallelismConfig, "get_device_mesh", _one_way_only, "two ways to share a sequence exclude each other"
    )
    why = "all ranks of a group read the same batches"
    patches.replace(module, "prepare_data_loader", _by_data_parallel_rank, why, "num_processes", "process_index")
    patches.require(module.Accelerator, "prepare_data_loader", why, "prepare_data_loader")
    patches.replace(DataLoaderDispatcher, "__init__", _dispatch_by_group, why, "state", "slice_fn")
    why = "metrics count each group's samples once"
    patches.replace(module.Accelerator, "gather_for_metrics", _one_per_group, why, "gather", "use_gather_object")
    why = "a schedule is counted in batches, and a group reads one"
    patches.require(scheduler.AcceleratedScheduler, "step", why, "AcceleratorState", "num_processes")
    patches.replace(scheduler, "AcceleratorState", _of_groups, why)
    patches.replace(module.Accelerator, "_prepare_deepspeed", _dummy_by_group, why, "total_num_steps", "num_processes")


def _not_without_deepspeed(original: Callable) -> Callable:
    """``Accelerator(cpu=True)`` leaves the DeepSpeed config alone that it was given."""

    @functools.wraps(original)
    def __init__(self, *args, deepspeed_plugin=None, **kwargs):
        original(self, *args, deepspeed_plugin=deepspeed_plugin, **kwargs)
        plugins = deepspeed_plugin.values() if isinstance(deepspeed_plugin, dict) else [deepspeed_plugin]
        requested = any(
            data_parallel.active_config(plugin.deepspeed_config) for plugin in plugins if plugin is not None
        )
        if requested and getattr(self, "deepspeed_plugin", None) is None:
            raise key.ConfigError(
                f'accelerate was given a DeepSpeed config with "{key.KEY}" and runs {self.distributed_type.value} instead of '
                "DeepSpeed, as it does with Accelerator(cpu=True): no sequence would be shared and no ZeRO stage used, "
                "without a word. On CPUs leave that argument out, and call accelerate.PartialState(cpu=True) before. Nothing "
                "was started."
            )

    return __init__


def _of_groups(original: Callable) -> Callable:
    """What a prepared scheduler asks for the number of its steps per training step."""

    def state():
        whole, size = original(), cp_size_of_accelerator()
        return whole if size == 1 else data_parallel.WorkerView(whole, size, "num_processes")

    return state


def _dummy_by_group(original: Callable) -> Callable:
    """A ``DummyScheduler`` hands on its length over the number of ranks: over the number of groups here."""

    @functools.wraps(original)
    def _prepare_deepspeed(self, *args):
        size = cp_size_of_accelerator()
        if size > 1 and self.is_main_process and any(hasattr(each, "get_last_lr") for each in args):
            warnings.warn(
                f"ds_cp: accelerate steps this scheduler {data_parallel.dp_size(size)} times per training step, once per data-parallel "
                "worker. Where a script multiplies its length by accelerator.num_processes, the number of ranks, let it "
                "multiply by ds_cp.dp_size(config).",
                stacklevel=3,
            )
        counted = [
            each for each in args if size > 1 and getattr(each, "total_num_steps", None) and not self.split_batches
        ]
        for each in counted:
            each.total_num_steps *= size
        try:
            return original(self, *args)
        finally:
            for each in counted:
                each.total_num_steps //= size

    return _prepare_deepspeed


def _by_data_parallel_rank(original: Callable) -> Callable:
    @functools.wraps(original)
    def prepare_data_loader(dataloader, device=None, num_processes=None, process_index=None, **kwargs):
        size = cp_size_of_accelerator()
        if size > 1:
            # torch's numbers: on a CPU without `cpu=True` accelerate takes each rank for the only one
            num_processes = data_parallel.dp_size(size)
            process_index = data_parallel.dp_rank(size)
            _seed_workers_by(dataloader, process_index)
        return original(dataloader, device, num_processes, process_index, **kwargs)

    return prepare_data_loader


def _one_way_only(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_device_mesh(self, *args, **kwargs):
        size = cp_size_of_accelerator()
        requested = {
            name: getattr(self, name, 1) for name in ("cp_size", "sp_size", "tp_size")
        }  # accelerate 1.10 has no sp_size
        given = {name: value for name, value in requested.items() if value > 1}
        if size > 1 and given:
            listed = " and ".join(f"{name} = {value}" for name, value in given.items())
            raise key.ConfigError(
                f'"context_parallel" (size {size}) in the DeepSpeed config and {listed} in accelerate\'s ParallelismConfig both '
                "share the work of one batch: the sequence would be cut twice, or batches sent to the wrong ranks. Leave one "
                "of the two out (the settings PARALLELISM_CONFIG_* of the environment count too). Nothing was started."
            )
        return original(self, *args, **kwargs)

    return get_device_mesh


def _dispatch_by_group(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        size = cp_size_of_accelerator()
        if size == 1:
            return
        # its rank stays the world's: rank 0 of the world reads, for as many receivers as there are groups
        self.state, cut = data_parallel.WorkerView(self.state, size, "num_processes"), self.slice_fn

        def slice_fn(batch, part, process_index=None, num_processes=None):
            group = process_index // size
            if part.start:  # this rank's part, by its rank in the world; what starts at 0 is equal for all, or rank 0's
                length = part.stop - part.start
                part = slice(group * length, (group + 1) * length)
            return cut(batch, part, process_index=group, num_processes=num_processes)

        self.slice_fn = slice_fn

    return __init__


def _one_per_group(original: Callable) -> Callable:
    @functools.wraps(original)
    def gather_for_metrics(self, input_data, use_gather_object=False):
        size = cp_size_of_accelerator()
        if size == 1:
            return original(self, input_data, use_gather_object)
        use_gather_object = use_gather_object or not _all_tensors(input_data)  # as accelerate decides
        if use_gather_object and self.process_index % size:
            input_data = type(input_data)()
        self.gather = lambda data: first_of_each_group(type(self).gather(self, data), size)
        try:
            return original(self, input_data, use_gather_object)
        finally:
            del self.gather

    return gather_for_metrics


def _all_tensors(data: Any) -> bool:
    from accelerate.utils import recursively_apply

    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _seed_workers_by(dataloader: Any, dp_rank: int) -> None:
    """Random collators must agree inside a group: Trainer seeds loader workers by world rank."""
    seed = dataloader.worker_init_fn
    if isinstance(seed, functools.partial) and "rank" in seed.keywords:
        dataloader.worker_init_fn = functools.partial(seed.func, *seed.args, **{**seed.keywords, "rank": dp_rank})
