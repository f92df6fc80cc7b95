"""DeepSpeed: the key in its config, batch arithmetic by data-parallel rank, and the model before the engine wraps it."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, Callable, Mapping

import torch.distributed
from deepspeed.accelerator import get_accelerator

from ds_cp import config as key
from ds_cp import patches
from ds_cp.patches import data_parallel
from ds_cp.patches.data_parallel import active_config, refuse_unread_key, world_size


class DataParallelMpu:
    """The two answers of an mpu that batch arithmetic and samplers ask for. Never left to an engine: DeepSpeed's
    stages would disagree about the gradient's divisor."""

    def __init__(self, size: int):
        self._size = size

    def get_data_parallel_world_size(self) -> int:
        return data_parallel.dp_size(self._size)

    def get_data_parallel_rank(self) -> int:
        return data_parallel.dp_rank(self._size)


def watch_config() -> None:
    """Read the key wherever DeepSpeed reads a config: ``initialize`` and ``zero.Init``."""
    from deepspeed.runtime.config import DeepSpeedConfig

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def __init__(self, config, mpu=None, mesh_device=None):
            refuse_unread_key(config)
            requested = active_config(config)
            if requested is None:
                return original(self, config, mpu, mesh_device=mesh_device)
            if type(mpu).__name__ == "PipelineParallelGrid":
                raise key.ConfigError(_sentence("PipelineModule", "its stages cut the model where a region is open"))
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
                return original(self, config, DataParallelMpu(requested.size))
            except AssertionError as error:
                if "world_size" not in str(error):
                    raise
                raise key.ConfigError(
                    f'{error} where world_size counts groups: {world_size()} ranks / "{key.KEY}.size" {requested.size} = '
                    f"{world_size() // requested.size}, for the ranks of a group read the same batch. Nothing was started."
                ) from error

        return __init__

    patches.replace(DeepSpeedConfig, "__init__", make, "reads the key; batch arithmetic by data-parallel rank")


def install() -> None:
    """Attach the model before the engine wraps it; samplers of ``training_data`` by data-parallel rank."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import z3_leaf_module

    def make_init(original: Callable) -> Callable:
        @functools.wraps(original)
        def __init__(self, args, model, *rest, **kwargs):
            ds_config = kwargs.get("config")
            requested = active_config(ds_config)
            if requested is not None:
                from ds_cp.patches.transformers.attach import attach

                _choose_device(args)
                attach(model, requested)
                self._ds_cp_size = requested.size
            return original(self, args, model, *rest, **kwargs)

        return __init__

    def make_io(original: Callable) -> Callable:
        @functools.wraps(original)
        def deepspeed_io(self, *args, **kwargs):
            size = getattr(self, "_ds_cp_size", 1)
            if size == 1:
                return original(self, *args, **kwargs)
            engine_mpu, self.mpu = self.mpu, DataParallelMpu(size)
            try:
                return original(self, *args, **kwargs)
            finally:
                self.mpu = engine_mpu

        return deepspeed_io

    def make_resize(original: Callable) -> Callable:
        @functools.wraps(original)
        def resize(self, batch_size):
            ranks = self.dp_world_size
            self.dp_world_size = ranks // getattr(self, "_ds_cp_size", 1)
            try:
                return original(self, batch_size)
            finally:
                self.dp_world_size = ranks

        return resize

    why = "batch arithmetic by data-parallel rank"
    patches.require(DeepSpeedConfig, "__init__", why, "mpu")
    patches.replace(DeepSpeedEngine, "set_train_batch_size", make_resize, why, "dp_world_size")
    patches.replace(DeepSpeedEngine, "set_train_micro_batch_size", make_resize, why, "dp_world_size")
    patches.replace(DeepSpeedEngine, "__init__", make_init, "attaches the model to the groups of its config")
    patches.require(DeepSpeedEngine, "_set_distributed_vars", "the device is chosen as DeepSpeed does", "device_rank")
    patches.replace(DeepSpeedEngine, "deepspeed_io", make_io, "samples by data-parallel rank", "mpu")
    patches.require(sys.modules[z3_leaf_module.__module__], "z3_leaf_module", "weights are gathered once", "_z3_leaf")


def _choose_device(args: Any) -> None:
    """Choose the device that ``DeepSpeedEngine.__init__`` chooses a moment later, before a group sends its first message.

    Until then the current device of every process is the first one, and NCCL refuses a group whose ranks all use one card.
    """
    device_rank = getattr(args, "device_rank", int(os.environ.get("LOCAL_RANK", -1)))
    if device_rank >= 0:
        get_accelerator().set_device(device_rank)


def _at(*path: str) -> Callable[[Mapping], Any]:
    def look(ds_config: Mapping) -> Any:
        node: Any = ds_config
        for name in path:
            node = node.get(name) if isinstance(node, Mapping) else None
        return node

    return look


def _above(limit: int, *path: str) -> Callable[[Mapping], bool]:
    look = _at(*path)
    return lambda ds_config: isinstance(value := look(ds_config), int) and value > limit  # or it is "auto", or nothing


FEATURES: tuple[tuple[str, Callable[[Mapping], Any], str], ...] = (
    ("tensor_parallel.autotp_size", _above(1, "tensor_parallel", "autotp_size"),
     "AutoTP splits the heads that ds_cp plans with, and installs an mpu"),
    ("expert_parallel", _at("expert_parallel", "enabled"),
     "AutoEP reduces expert gradients over groups that do not know of the shared sequence"),
    ("compile.deepcompile", _at("compile", "deepcompile"),
     "DeepCompile rewrites the graph around collectives it does not know"),
    ("hybrid_engine", _at("hybrid_engine", "enabled"), "its inference containers replace the attention layers"),
    ("zero_optimization.mics_shard_size", _above(0, "zero_optimization", "mics_shard_size"),
     "MiCS averages gradients over its own groups only"),
    ("zero_optimization.zero_quantized_weights", _at("zero_optimization", "zero_quantized_weights"),
     "quantised weights make no rank's forward exact"),
    ("zero_optimization.zero_quantized_gradients", _at("zero_optimization", "zero_quantized_gradients"),
     "the quantised reduction is not the mean that the gradients rely on"),
    ("optimizer.type", lambda c: str(_at("optimizer", "type")(c)).lower() in ("onebitadam", "onebitlamb", "zerooneadam"),
     "1-bit optimizers keep gradients local, and local gradients here are shares of a sum"),
    ("curriculum_learning", _at("curriculum_learning", "enabled"), "it cuts the sequence after the groups planned it"),
    ("data_efficiency", _at("data_efficiency", "enabled"), "its sampler goes by world rank"),
    ("elasticity", _at("elasticity", "enabled"), "it picks batch sizes for a world of data-parallel ranks"),
    ("sequence_parallel_size", _above(1, "sequence_parallel_size"),
     "DeepSpeed's own sequence parallelism would cut the sequence a second time"),
    ("gradient_allreduce_op", lambda c: _at("gradient_allreduce_op")(c) == "sum",
     "the gradients of a group are exact only under the mean over the world"),
    ("zero_optimization.zenflow", _at("zero_optimization", "zenflow"), "it updates from gradients of single ranks"),
    ("amp", _at("amp", "enabled"), "apex amp replaces functions inside the shared part"),
)  # fmt: skip
"""What is refused: (name in the JSON, is it on, what would go wrong). What else DeepSpeed offers is tested in test_engine_features.py."""


def refuse_features(ds_config: Mapping) -> None:
    """Raise for DeepSpeed features that would train wrong together with the key.

    Raises:
        ConfigError: names the feature and what would have gone wrong.
    """
    for name, is_on, reason in FEATURES:
        if is_on(ds_config):
            raise key.ConfigError(_sentence(name, reason))


def _sentence(name: str, reason: str) -> str:
    return (
        f'"{name}" together with "context_parallel" is refused: {reason}, so the run would train wrong without saying so. '
        "Take one of the two out. Nothing was started."
    )
