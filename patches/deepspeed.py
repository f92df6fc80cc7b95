"""DeepSpeed: reads the key in its config, refuses features that would train wrong, and attaches the model in its engine.

DeepSpeed's batch arithmetic and samplers go by data-parallel rank, through :class:`DataParallelMpu`.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, Callable, Mapping

import torch.distributed

from ds_cp import config as key
from ds_cp import patches
from ds_cp.patches import data_parallel


class DataParallelMpu:
    """The two methods of Megatron's ``mpu`` that batch arithmetic and samplers call.

    An engine never keeps it: with an mpu, DeepSpeed's ZeRO stages divide gradients by different numbers of ranks.
    """

    def __init__(self, cp_size: int):
        self._cp_size = cp_size

    def get_data_parallel_world_size(self) -> int:
        return data_parallel.dp_size(self._cp_size)

    def get_data_parallel_rank(self) -> int:
        return data_parallel.dp_rank(self._cp_size)


def watch_config() -> None:
    """Read the key wherever DeepSpeed reads a config: in ``deepspeed.initialize`` and ``zero.Init``."""
    from deepspeed.runtime.config import DeepSpeedConfig

    patches.replace(DeepSpeedConfig, "__init__", _read_key, "reads the key; batch arithmetic by data-parallel rank")


def install() -> None:
    """Attach the model before the engine wraps it; count batches by data-parallel rank."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import z3_leaf_module

    why = "batch arithmetic by data-parallel rank"
    patches.require(DeepSpeedConfig, "__init__", why, "mpu")
    patches.replace(DeepSpeedEngine, "set_train_batch_size", _resize_by_workers, why, "dp_world_size")
    patches.replace(DeepSpeedEngine, "set_train_micro_batch_size", _resize_by_workers, why, "dp_world_size")
    patches.replace(DeepSpeedEngine, "__init__", _attach_model, "attaches the model to the groups of its config")
    patches.require(DeepSpeedEngine, "_set_distributed_vars", "the device is chosen as DeepSpeed does", "device_rank")
    patches.replace(DeepSpeedEngine, "deepspeed_io", _sample_by_dp_rank, "samples by data-parallel rank", "mpu")
    patches.require(sys.modules[z3_leaf_module.__module__], "z3_leaf_module", "weights are gathered once", "_z3_leaf")


def _read_key(original: Callable) -> Callable:
    """``DeepSpeedConfig.__init__``: check the key, install all patches, and give the config's arithmetic an mpu."""

    @functools.wraps(original)
    def __init__(self, config, mpu=None, mesh_device=None):
        data_parallel.refuse_unread_key(config)
        cp_size = data_parallel.cp_size_of_config(config)
        if cp_size == 1:
            return original(self, config, mpu, mesh_device=mesh_device)
        if type(mpu).__name__ == "PipelineParallelGrid":
            raise key.ConfigError(_refusal("PipelineModule", "its stages cut the model where a region is open"))
        if mpu is not None or mesh_device is not None:
            raise key.ConfigError(
                'both "context_parallel" and an mpu or mesh were given to DeepSpeed: its ZeRO stages would divide the '
                "gradients differently. Leave the mpu and mesh_param out. Nothing was started."
            )
        refuse_features(key.load(config))
        patches.install()
        if not torch.distributed.is_initialized():
            import deepspeed

            deepspeed.init_distributed()
        try:
            return original(self, config, DataParallelMpu(cp_size))
        except AssertionError as error:
            if "world_size" not in str(error):
                raise
            ranks = data_parallel.world_size()
            raise key.ConfigError(
                f'{error} where world_size counts groups: {ranks} ranks / "{key.KEY}.size" {cp_size} = '
                f"{ranks // cp_size}, for the ranks of a group read the same batch. Nothing was started."
            ) from error

    return __init__


def _attach_model(original: Callable) -> Callable:
    """``DeepSpeedEngine.__init__``: attach the model before ZeRO hooks and partitions it."""

    @functools.wraps(original)
    def __init__(self, args, model, *rest, **kwargs):
        requested = data_parallel.active_config(kwargs.get("config"))
        if requested is not None:
            from ds_cp.patches.transformers.attach import attach

            _choose_device(args)
            attach(model, requested)
            self._ds_cp_size = requested.size
        return original(self, args, model, *rest, **kwargs)

    return __init__


def _sample_by_dp_rank(original: Callable) -> Callable:
    """``DeepSpeedEngine.deepspeed_io``: the data loader of ``training_data``; the engine has an mpu only meanwhile."""

    @functools.wraps(original)
    def deepspeed_io(self, *args, **kwargs):
        cp_size = getattr(self, "_ds_cp_size", 1)
        if cp_size == 1:
            return original(self, *args, **kwargs)
        engine_mpu, self.mpu = self.mpu, DataParallelMpu(cp_size)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.mpu = engine_mpu

    return deepspeed_io


def _resize_by_workers(original: Callable) -> Callable:
    """``set_train_batch_size`` and ``set_train_micro_batch_size``: divide by the number of data-parallel workers."""

    @functools.wraps(original)
    def resize(self, batch_size):
        ranks = self.dp_world_size
        self.dp_world_size = ranks // getattr(self, "_ds_cp_size", 1)
        try:
            return original(self, batch_size)
        finally:
            self.dp_world_size = ranks

    return resize


def _choose_device(args: Any) -> None:
    """Set the current device as ``DeepSpeedEngine.__init__`` does later, because attaching sends a group's first message.

    Until then every process's current device is the first one, and NCCL refuses a group whose ranks share one GPU.
    """
    from deepspeed.accelerator import get_accelerator

    device_rank = getattr(args, "device_rank", int(os.environ.get("LOCAL_RANK", -1)))
    if device_rank >= 0:
        get_accelerator().set_device(device_rank)


def _value_at(*path: str) -> Callable[[Mapping], Any]:
    def look_up(ds_config: Mapping) -> Any:
        node: Any = ds_config
        for name in path:
            node = node.get(name) if isinstance(node, Mapping) else None
        return node

    return look_up


def _exceeds(limit: int, *path: str) -> Callable[[Mapping], bool]:
    look_up = _value_at(*path)
    return lambda ds_config: isinstance(value := look_up(ds_config), int) and value > limit  # "auto" and None do not


FEATURES: tuple[tuple[str, Callable[[Mapping], Any], str], ...] = (
    ("tensor_parallel.autotp_size", _exceeds(1, "tensor_parallel", "autotp_size"),
     "AutoTP splits the heads that ds_cp plans with, and installs an mpu"),
    ("expert_parallel", _value_at("expert_parallel", "enabled"),
     "AutoEP reduces expert gradients over groups that do not know of the shared sequence"),
    ("compile.deepcompile", _value_at("compile", "deepcompile"),
     "DeepCompile rewrites the graph around collectives it does not know"),
    ("hybrid_engine", _value_at("hybrid_engine", "enabled"), "its inference containers replace the attention layers"),
    ("zero_optimization.mics_shard_size", _exceeds(0, "zero_optimization", "mics_shard_size"),
     "MiCS averages gradients over its own groups only"),
    ("zero_optimization.zero_quantized_weights", _value_at("zero_optimization", "zero_quantized_weights"),
     "quantised weights make no rank's forward exact"),
    ("zero_optimization.zero_quantized_gradients", _value_at("zero_optimization", "zero_quantized_gradients"),
     "the quantised reduction is not the mean that the gradients rely on"),
    ("optimizer.type",
     lambda c: str(_value_at("optimizer", "type")(c)).lower() in ("onebitadam", "onebitlamb", "zerooneadam"),
     "1-bit optimizers keep gradients local, and local gradients here are shares of a sum"),
    ("curriculum_learning", _value_at("curriculum_learning", "enabled"),
     "it cuts the sequence after the groups planned it"),
    ("data_efficiency", _value_at("data_efficiency", "enabled"), "its sampler goes by world rank"),
    ("elasticity", _value_at("elasticity", "enabled"), "it picks batch sizes for a world of data-parallel ranks"),
    ("sequence_parallel_size", _exceeds(1, "sequence_parallel_size"),
     "DeepSpeed's own sequence parallelism would cut the sequence a second time"),
    ("gradient_allreduce_op", lambda c: _value_at("gradient_allreduce_op")(c) == "sum",
     "the gradients of a group are exact only under the mean over the world"),
    ("zero_optimization.zenflow", _value_at("zero_optimization", "zenflow"),
     "it updates from gradients of single ranks"),
    ("amp", _value_at("amp", "enabled"), "apex amp replaces functions inside the shared part"),
)  # fmt: skip
"""Refused features: (name in the JSON, function that tells whether a config enables it, what would go wrong).

The features that work are tested in tests/patches/deepspeed/test_engine_features.py."""


def refuse_features(ds_config: Mapping) -> None:
    """Refuse DeepSpeed features that would train wrong together with the key.

    Raises:
        ConfigError: Names the feature and what would have gone wrong.
    """
    for name, is_enabled, reason in FEATURES:
        if is_enabled(ds_config):
            raise key.ConfigError(_refusal(name, reason))


def _refusal(feature: str, reason: str) -> str:
    return (
        f'"{feature}" together with "context_parallel" is refused: {reason}, so the run would train wrong without saying so. '
        "Take one of the two out. Nothing was started."
    )
