"""A process group of any size with one process in it: what is sent goes nowhere, what is received is not written."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  registers the backend "fake"

backends: dict[str, str] = {}
"""The backend that was asked for, by the name of the group."""

_stores: list[dist.Store] = []
"""C++ holds the store, but its methods are the Python object's, which somebody must hold too."""


class EchoStore(dist.Store):
    """A store in which every other rank says what this one says: keys end in a rank."""

    def __init__(self, rank: int, world: int):
        super().__init__()
        self._rank, self._world, self._values = str(rank), world, {}

    def set(self, key: str, value: Any) -> None:
        value = value if isinstance(value, bytes) else str(value).encode()
        folder, _, last = key.rpartition("/")
        for rank in map(str, range(self._world)) if last == self._rank else (last,):
            self._values[f"{folder}/{rank}" if folder else rank] = value

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if not self.check(keys):
            raise RuntimeError(f"no rank of the rehearsal has set {keys}")

    def has_extended_api(self) -> bool:
        return False

    def add(self, key: str, amount: int) -> int:
        self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
        return int(self._values[key])


def join(rank: int, world: int) -> None:
    """The world, and new groups that are fake whatever backend they ask for."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    _stores.append(EchoStore(rank, world))
    dist.init_process_group("fake", rank=rank, world_size=world, store=_stores[-1])
    new_group = dist.new_group

    def fake_group(ranks=None, timeout=None, backend=None, **kwargs: Any):
        made = new_group(ranks, timeout=timeout, **{**kwargs, "pg_options": None})
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            backends[made.group_name] = backend or "nccl"
        return made

    dist.new_group = torch.distributed.distributed_c10d.new_group = fake_group

    def all_gather_object(values, value, group=None):
        values[:] = [value] * len(values)

    dist.all_gather_object = torch.distributed.distributed_c10d.all_gather_object = all_gather_object
    from deepspeed.runtime.zero import utils

    utils.get_lst_from_rank0 = lambda values: values  # broadcasts of rank 0, which is not there
    utils.assert_lst_len_same_as_other_ranks = lambda values: None
