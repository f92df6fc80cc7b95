"""The world counts groups: the ranks of a group read one batch, so whoever counts batches must see groups, not ranks."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed

from ds_cp import config as key
from ds_cp import patches

_checked: dict[tuple[str, int], key.ContextParallelConfig | None] = {}
"""Keys that were found right, by their text and the world: counters of other libraries ask on every step."""


def world_size() -> int:
    """Ranks of the job, also before the process group exists."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """This rank in the job, also before the process group exists."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", 0))


def active_config(ds_config: Any) -> key.ContextParallelConfig | None:
    """The checked key of a DeepSpeed config, if it asks for more than one rank per sequence.

    Raises:
        ConfigError: a wrong key, or a size that does not divide the world.
    """
    value = key.raw_value(ds_config)
    if value is None or patches.disabled():
        return None
    requested = repr(value), world_size()
    if requested not in _checked:
        _checked[requested] = key.normalise({key.KEY: value}, world_size())
    found = _checked[requested]
    return None if found is None or found.size == 1 else found


def refuse_unread_key(ds_config: Any) -> None:
    """Raise where a DeepSpeed config, in any form, names the key so that nobody reads it.

    Raises:
        ConfigError: see :func:`ds_cp.config.refuse_unread_key`.
    """
    config = key.load(ds_config)
    if key.unread_key(config) and not patches.disabled():
        key.refuse_unread_key(config)


def cp_size_of_config(ds_config: Any) -> int:
    """Ranks per sequence that a DeepSpeed config asks for; 1 without the key."""
    requested = active_config(ds_config)
    return requested.size if requested else 1


def cp_size_of_arguments(args: Any) -> int:
    """Ranks per sequence of TrainingArguments; 1 without a DeepSpeed config."""
    hf_config = getattr(args, "hf_deepspeed_config", None)
    return cp_size_of_config(hf_config.config) if hf_config is not None else 1


def dp_size(size: int) -> int:
    """How many groups of ``size`` ranks read different batches."""
    return world_size() // size


def dp_rank(size: int) -> int:
    """Which of the groups this rank belongs to."""
    return rank() // size


class WorkerView:
    """Another library's object as seen by what counts batches: its numbers of ranks are numbers of groups.

    Args:
        whole: the object, TrainingArguments or an accelerator say. Everything else is answered by it.
        size: ranks of a group.
        counts: the attributes that count ranks or name one.
    """

    def __init__(self, whole: Any, size: int, *counts: str):
        self._whole, self._size, self._counts = whole, size, counts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._whole, name)
        return found // self._size if name in self._counts else found
