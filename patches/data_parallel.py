"""Data-parallel sizes and ranks under the key: the ranks of a context-parallel group form one data-parallel worker.

All ranks of a group read the same batch. Code of other libraries that sizes, samples or counts batches therefore has to
see workers, not ranks: it gets a :class:`WorkerView` of its object, or the numbers from here.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed

from ds_cp import config as key
from ds_cp import patches

_checked_keys: dict[tuple[str, int], key.ContextParallelConfig | None] = {}
"""Keys that have been checked, by their text and the world size, because other libraries' counters look them up on every
step."""


def world_size() -> int:
    """Number of ranks in the job, also before the process group exists."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """This process's rank in the job, also before the process group exists."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", 0))


def active_config(ds_config: Any) -> key.ContextParallelConfig | None:
    """The checked key of a DeepSpeed config; None if it is absent, switched off, or has size 1.

    Raises:
        ConfigError: A wrong key, or a size that does not divide the world.
    """
    value = key.raw_value(ds_config)
    if value is None or patches.disabled():
        return None
    lookup = repr(value), world_size()
    if lookup not in _checked_keys:
        _checked_keys[lookup] = key.normalise({key.KEY: value}, world_size())
    checked = _checked_keys[lookup]
    return None if checked is None or checked.size == 1 else checked


def refuse_unread_key(ds_config: Any) -> None:
    """Refuse a DeepSpeed config, in any form, that has the key misspelt or in a place where nothing reads it.

    Raises:
        ConfigError: See :func:`ds_cp.config.refuse_unread_key`.
    """
    config = key.load(ds_config)
    if key.unread_key(config) and not patches.disabled():
        key.refuse_unread_key(config)


def cp_size_of_config(ds_config: Any) -> int:
    """Ranks per sequence under a DeepSpeed config; 1 without the key."""
    config = active_config(ds_config)
    if config is None:
        return 1
    assert isinstance(config.size, int), "normalise() fills the size"
    return config.size


def cp_size_of_arguments(args: Any) -> int:
    """Ranks per sequence under TrainingArguments; 1 without a DeepSpeed config."""
    hf_config = getattr(args, "hf_deepspeed_config", None)
    return cp_size_of_config(hf_config.config) if hf_config is not None else 1


def dp_size(cp_size: int) -> int:
    """Number of data-parallel workers: context-parallel groups, which read different batches."""
    return world_size() // cp_size


def dp_rank(cp_size: int) -> int:
    """Index of the context-parallel group that this rank belongs to."""
    return rank() // cp_size


class WorkerView:
    """Another library's object, as code that counts batches must see it: with workers in place of ranks.

    Args:
        wrapped: The object, for example TrainingArguments or an accelerator. It answers for every other attribute.
        cp_size: Ranks per context-parallel group.
        rank_attributes: Names of the attributes that hold a number of ranks, or a rank; they are divided by ``cp_size``.
    """

    def __init__(self, wrapped: Any, cp_size: int, *rank_attributes: str):
        self._wrapped, self._cp_size, self._rank_attributes = wrapped, cp_size, rank_attributes

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._wrapped, name)
        return value // self._cp_size if name in self._rank_attributes else value
