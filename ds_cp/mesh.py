"""The mesh of ranks, data-parallel x ring x ulysses, and its process groups.

``rank = (dp_rank * ring + ring_rank) * ulysses + ulysses_rank``. Ulysses ranks are adjacent, so that their all-to-all stays
inside a node, and so are the ranks of one *context-parallel group* (ring x ulysses). DeepSpeed does not know this mesh: it
sees plain data parallelism over the world.
"""

from __future__ import annotations

import atexit
import itertools
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Mapping, Sequence

import torch
import torch.distributed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d

from ds_cp.process_group import Group, GroupError


@dataclass(frozen=True)
class Mesh:
    """One rank's position in the mesh ``world = dp x ring x ulysses``, and its groups.

    Attributes:
        dp_size: Number of context-parallel groups.
        dp_rank: Index of this rank's context-parallel group.
        cp_group: Context-parallel group: the ranks (ring x ulysses) that share a sequence with this rank.
        ring_group: This rank's ring axis of the context-parallel group.
        ulysses_group: This rank's ulysses axis of the context-parallel group.
        control_group: The ranks of ``cp_group`` on gloo, for CPU tensors and objects that must not touch the device.
        attention_calls: Number of attention calls so far, by phase ("forward", "backward").
        axes: Ring and ulysses group of every split that batches may use, by (ring, ulysses).
    """

    dp_size: int
    dp_rank: int
    cp_group: Group
    ring_group: Group
    ulysses_group: Group
    control_group: Group
    attention_calls: Counter[str] = field(default_factory=Counter)
    axes: Mapping[tuple[int, int], tuple[Group, Group]] = field(default_factory=dict)

    def with_split(self, ring: int, ulysses: int) -> Mesh:
        """The same mesh with the axes of another split of its context-parallel group."""
        ring_group, ulysses_group = self.axes[ring, ulysses]
        return replace(self, ring_group=ring_group, ulysses_group=ulysses_group)

    def traffic(self) -> dict[str, float]:
        """Bytes that this rank sent for attention, averaged over attention calls, by phase."""
        groups = [group for axes in self.axes.values() for group in axes]
        return {
            f"{phase}_bytes_per_layer": sum(group.sent[phase] for group in groups) / self.attention_calls[phase]
            for phase in ("forward", "backward")
            if self.attention_calls[phase]
        }


_meshes: dict[tuple[object, tuple[tuple[int, int], ...], float], Mesh] = {}
_store_rounds = itertools.count()


def gather_through_store(value: str, timeout: float) -> list[str]:
    """Gather a short text from every rank of the world through the store of torch's rendezvous.

    It works before there are groups, and it is no collective, so that a missing rank can be named: in a collective the
    others would wait for it without knowing which one it is.

    Raises:
        GroupError: A rank did not call this function in time. The message names it.
    """
    ranks = [str(rank) for rank in range(dist.get_world_size())]
    store = torch.distributed.PrefixStore(f"ds_cp/{next(_store_rounds)}", distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), value)
    try:
        store.wait(ranks, timedelta(seconds=timeout))
    except RuntimeError as error:  # the exception's type depends on the kind of store
        silent = ", ".join(rank for rank in ranks if not store.check([rank])) or "some"
        raise GroupError(
            f'rank {dist.get_rank()} waited {timeout:g} s ("context_parallel.timeout") for rank {silent} to share the same '
            "model: without them nothing can be shared. Look for the first error there, and for what differs on their node: "
            "another DeepSpeed JSON, or DS_CP_DISABLE. A slow start needs a larger timeout. Nothing was started."
        ) from error
    has_multi_get = store.has_extended_api()  # type: ignore[attr-defined]  # missing in torch's stubs
    values = store.multi_get(ranks) if has_multi_get else [store.get(rank) for rank in ranks]
    return [value.decode() for value in values]


def choose_device(model: torch.nn.Module) -> None:
    """Set this rank's current device, in a training loop without a DeepSpeed engine, which would set it.

    Communication uses the current device. By default that is the first device in every process, and NCCL refuses a group
    in which several ranks use the same device.

    Args:
        model: If its parameters are on an accelerator, that device becomes the current one. Otherwise device ``LOCAL_RANK``
            does, unless the script has already set a device other than the first.
    """
    accelerator = get_accelerator()
    name = accelerator.device_name()
    if name == "cpu":
        return
    devices = (parameter.device for parameter in model.parameters())
    index = next((device.index for device in devices if device.type == name and device.index is not None), None)
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", -1))
        if not 0 <= index < accelerator.device_count() or accelerator.current_device() != 0:
            return
    accelerator.set_device(index)


def build(ring: int, ulysses: int, timeout: float, others: Sequence[tuple[int, int]] = ()) -> Mesh:
    """Build a mesh, or return it if it was built before. All ranks of the world must call this in the same order.

    Args:
        ring: Number of ranks on the ring axis.
        ulysses: Number of ranks on the ulysses axis; ``ring * ulysses`` divides the size of the world.
        timeout: Seconds after which a waiting rank fails.
        others: Further splits (ring, ulysses) of the same context-parallel group that batches may use.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    # The key holds the default group itself, so that a later default group cannot have the same identity.
    splits = tuple(dict.fromkeys([(ring, ulysses), *others]))
    key = (torch.distributed.group.WORLD, splits, timeout)
    if key in _meshes:
        return _meshes[key]
    cp_size = ring * ulysses
    cp_ranks = torch.arange(world).view(-1, cp_size).tolist()
    cp_group = _new_axis("context-parallel", cp_ranks, rank, timeout)

    def axis(name: str, rank_lists: list[list[int]]) -> Group:
        if len(rank_lists[0]) == cp_size:  # the axis is the whole context-parallel group: share its communicator
            return replace(cp_group, name=name, sent=Counter(), calls=Counter())
        return _new_axis(name, rank_lists, rank, timeout)

    axes = {}
    for ring_size, ulysses_size in splits:
        grid = torch.arange(world).view(-1, ring_size, ulysses_size)
        axes[ring_size, ulysses_size] = (
            axis("ring", grid.transpose(1, 2).reshape(-1, ring_size).tolist()),
            axis("ulysses", grid.reshape(-1, ulysses_size).tolist()),
        )
    mesh = Mesh(
        dp_size=world // cp_size,
        dp_rank=rank // cp_size,
        cp_group=cp_group,
        ring_group=axes[ring, ulysses][0],
        ulysses_group=axes[ring, ulysses][1],
        control_group=_new_axis("context-parallel", cp_ranks, rank, timeout, backend="gloo"),
        axes=axes,
    )
    _meshes[key] = mesh
    return mesh


def _new_axis(name: str, rank_lists: list[list[int]], rank: int, timeout: float, backend: str | None = None) -> Group:
    """Create one process group per list of ranks; returns the group that contains ``rank``.

    torch creates the process groups, because ``deepspeed.comm.new_group`` takes no timeout.
    """
    own_ranks = next(ranks for ranks in rank_lists if rank in ranks)
    handle = None
    if len(own_ranks) > 1:
        for ranks in rank_lists:
            created = torch.distributed.new_group(ranks, timeout=timedelta(seconds=timeout), backend=backend)
            handle = created if ranks is own_ranks else handle
    group = Group(name, tuple(own_ranks), own_ranks.index(rank), handle, timeout)
    if handle is not None:
        _connect(group, "cpu" if backend == "gloo" else get_accelerator().current_device_name())
    return group


def _connect(group: Group, device: str) -> None:
    """Connect all ranks of a group, and each with each, by one byte.

    NCCL connects a group at its first message, in which all of its ranks must take part; in a step of the ring, a rank whose
    rows nobody needs takes no part. It connects a pair of ranks at the first message between the two, and allocates buffers
    for it: without this, a packed batch late in training could stall, or run out of memory.
    """
    group.all_reduce(torch.zeros(1, device=device), "first contact")
    peers = [peer for peer in range(group.size) if peer != group.rank]
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    buffers = torch.zeros(group.size, dtype=torch.uint8, device=device)
    received = [(peer, buffers[peer : peer + 1]) for peer in peers]
    group.isend_irecv([(peer, byte) for peer in peers], received, "first contact of each pair").wait()


@atexit.register
def release() -> None:
    """Drop the references to all process groups. Threads of a group that is still referenced when the interpreter exits abort
    the process."""
    for mesh in _meshes.values():
        for group in (mesh.cp_group, mesh.control_group, *(group for axes in mesh.axes.values() for group in axes)):
            group.handle = None
    _meshes.clear()


def built_meshes() -> tuple[Mesh, ...]:
    """All meshes that this process has built, in the order in which they were built."""
    return tuple(_meshes.values())
