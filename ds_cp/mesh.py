"""Ranks as dp x ring x ulysses, their process groups, and the only place where messages leave a rank.

``rank = (dp_rank * ring + ring_rank) * ulysses + ulysses_rank``: ulysses ranks are adjacent, so their all-to-all stays
inside a node; the ranks of one *cp group* (ring x ulysses) are adjacent too. DeepSpeed is not told of any of this: it
sees plain data parallelism over the whole world.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Sequence

import torch
import torch.distributed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d

from ds_cp.profiling import named_range


class GroupError(RuntimeError):
    """A rank of the group failed, left or did not answer in time."""


@dataclass
class Group:
    """The ranks of one mesh axis.

    Attributes:
        ranks: global ranks, in the order of the axis.
        rank: this rank's index among them.
        handle: the process group; None for a group of one, which never communicates.
        timeout: seconds after which a waiting rank fails.
        sent: bytes that left this rank, by the first phase of what was exchanged ("forward", "backward", ...).
        calls: how many messages or collectives, by the same phase.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    handle: object | None
    timeout: float
    sent: Counter = field(default_factory=Counter)
    calls: Counter = field(default_factory=Counter)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def _count(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        phase = what.split(" ", 1)[0]
        self.calls[phase] += 1
        self.sent[phase] += sum(tensor.nbytes for tensor in tensors)

    def isend_irecv(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], what: str
    ) -> "Pending":
        """Start point-to-point messages; both sides must list the same messages in the same order.

        On CUDA they run beside the kernels that the caller launches next: torch puts a batch of messages on NCCL's own
        stream, behind what the current stream has queued so far, and :meth:`Pending.wait` makes the current stream, not
        the host, wait for them. Nobody else needs a stream.

        Args:
            sends: (index in the group, contiguous tensor).
            receives: (index in the group, contiguous buffer).
            what: for the error message and the counters, e.g. ``"forward rows from rank 2 of the ring"``.
        """
        by = dist if hasattr(dist, "batch_isend_irecv") else torch.distributed  # DeepSpeed has it since 0.19.8
        ops = [by.P2POp(by.isend, _without_graph(tensor), self.ranks[peer], self.handle) for peer, tensor in sends]
        ops += [by.P2POp(by.irecv, _without_graph(tensor), self.ranks[peer], self.handle) for peer, tensor in receives]
        if not ops:
            return Pending(self, [], what, ())
        self._count(what, [tensor for _, tensor in sends])
        with _Waiting(self, what, "exchange"):
            return Pending(self, by.batch_isend_irecv(ops), what, [tensor for _, tensor in sends])

    def all_to_all(
        self, tensor: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], what: str
    ) -> torch.Tensor:
        """Send ``send_counts[i]`` rows of dim 0 to rank i, concatenate what arrives along dim 0."""
        received = tensor.new_empty((sum(receive_counts), *tensor.shape[1:]))
        even = len({*send_counts, *receive_counts}) == 1
        sizes = (None, None) if even else (list(receive_counts), list(send_counts))  # lists are walked on every layer
        self._count(what, [tensor])
        self.sent[what.split(" ", 1)[0]] -= tensor.nbytes * send_counts[self.rank] // max(1, len(tensor))
        with _Waiting(self, what, "all_to_all"):
            dist.all_to_all_single(_without_graph(received), _without_graph(tensor).contiguous(), *sizes, self.handle)
        return received

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """``[n, ...] -> [size, n, ...]``, equal shapes on every rank."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._count(what, [tensor] * (self.size - 1))
        with _Waiting(self, what, "all_gather"):
            dist.all_gather_into_tensor(
                _without_graph(gathered.flatten(0, 1)), _without_graph(tensor).contiguous(), self.handle
            )
        return gathered

    def reduce_scatter(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """``[size, n, ...] -> [n, ...]``: this rank's part of the sum over the group."""
        part = torch.empty_like(tensor[0])
        self._count(what, [tensor[1:]])
        with _Waiting(self, what, "reduce_scatter"):
            dist.reduce_scatter_tensor(
                _without_graph(part), _without_graph(tensor).contiguous().flatten(0, 1), group=self.handle
            )
        return part

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """The sum over the group, out of place."""
        total = tensor.clone()
        self._count(what, [tensor])
        with _Waiting(self, what, "all_reduce"):
            dist.all_reduce(_without_graph(total), group=self.handle)
        return total

    def all_gather_object(self, value: object, what: str) -> list:
        """A small Python object of every rank, for messages and records."""
        values: list = [None] * self.size
        with _Waiting(self, what, "agreement"):
            torch.distributed.all_gather_object(values, value, group=self.handle)
        return values


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """What a backend is given: the tensor without its graph.

    A backend's thread lets go of a message some time after the wait for it has ended. What was received is by then the output
    of an autograd function: the thread would keep a whole step's activations alive, and be the one that frees them.
    """
    return tensor.detach()


class _Waiting:
    """Turns a backend's failure into a sentence that names rank, group and exchange.

    gloo raises it here after the timeout; NCCL's own watchdog ends the process instead, and the next agreement on a batch,
    which runs on gloo, is what says the sentence on the ranks that are left.
    """

    __slots__ = "_group", "_range", "_start", "_what"

    def __init__(self, group: Group, what: str, kind: str):
        self._group, self._what, self._start = group, what, time.monotonic()
        self._range = named_range(kind)

    def __enter__(self) -> None:
        self._range.__enter__()

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        self._range.__exit__(None, None, None)
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            group = self._group
            raise GroupError(
                f"rank {group.ranks[group.rank]} lost its {group.name} group {list(group.ranks)} in '{self._what}', after "
                f"{time.monotonic() - self._start:.1f} s (timeout {group.timeout:g} s). Another rank of the group has failed, "
                "hangs, or runs a different program: look for the first error among these ranks. "
                f'A slow first step needs a larger "context_parallel.timeout". Backend: {error}'
            ) from error


class Pending:
    """Messages under way; keeps what is sent alive until :meth:`wait`."""

    def __init__(self, group: Group, works: list, what: str, held: Sequence[torch.Tensor]):
        self._group, self._works, self._what, self._held = group, works, what, held

    def wait(self) -> None:
        """Block until all messages arrived (on CUDA: until the current stream may use them)."""
        with _Waiting(self._group, self._what, "exchange"):
            for work in self._works:
                work.wait()
        self._works, self._held = [], ()


@dataclass(frozen=True)
class Mesh:
    """One rank's place in ``world = dp x ring x ulysses`` and its groups.

    Attributes:
        cp_group: the ranks that share this rank's sequences (ring x ulysses).
        ring_group, ulysses_group: its two axes.
        control_group: the cp group again, on gloo and CPU, for records that must not touch the device.
        dp_size, dp_rank: how many groups there are, and which one this is.
        attention_calls: "forward" and "backward" passes of attention layers so far.
    """

    dp_size: int
    dp_rank: int
    cp_group: Group
    ring_group: Group
    ulysses_group: Group
    control_group: Group
    attention_calls: Counter = field(default_factory=Counter)

    def traffic(self) -> dict[str, float]:
        """Bytes that this rank sent for attention, per attention call so far, forward and backward."""
        return {
            f"{phase}_bytes_per_layer": (self.ring_group.sent[phase] + self.ulysses_group.sent[phase])
            / self.attention_calls[phase]
            for phase in ("forward", "backward")
            if self.attention_calls[phase]
        }


_meshes: dict[tuple, Mesh] = {}
_agreements = itertools.count()


def gather_through_store(value: str, timeout: float) -> list[str]:
    """A short text of every rank of the world, before there is any group: through the store that ranks met in.

    No collective is used: a rank that does not come would leave the others in one that nobody can name.

    Raises:
        GroupError: a rank did not come in time; names it.
    """
    ranks = [str(rank) for rank in range(dist.get_world_size())]
    store = torch.distributed.PrefixStore(f"ds_cp/{next(_agreements)}", distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), value)
    try:
        store.wait(ranks, timedelta(seconds=timeout))
    except RuntimeError as error:  # what a store raises depends on its kind
        silent = ", ".join(rank for rank in ranks if not store.check([rank])) or "some"
        raise GroupError(
            f'rank {dist.get_rank()} waited {timeout:g} s ("context_parallel.timeout") for rank {silent} to share the same '
            "model: without them nothing can be shared. Look for the first error there, and for what differs on their node: "
            "another DeepSpeed JSON, or DS_CP_DISABLE. A slow start needs a larger timeout. Nothing was started."
        ) from error
    values = store.multi_get(ranks) if store.has_extended_api() else [store.get(rank) for rank in ranks]
    return [value.decode() for value in values]


def choose_device(model: torch.nn.Module) -> None:
    """Make this rank's accelerator the current device, in a loop without a DeepSpeed engine, which would do so itself.

    Messages leave from the current device. As long as nobody chooses one, that is the first device in every process, and
    NCCL refuses a group whose ranks all use one card.

    Args:
        model: if its parameters lie on an accelerator, that device is chosen. Otherwise device ``LOCAL_RANK`` is, unless
            the script has chosen a device other than the first.
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


def build(ring: int, ulysses: int, timeout: float) -> Mesh:
    """Make (or find again) the groups of a mesh shape. Every rank of the world must call this in the same order.

    Args:
        ring, ulysses: sizes of the axes; their product divides the world.
        timeout: seconds.
    """
    world, me = dist.get_world_size(), dist.get_rank()
    key = (torch.distributed.group.WORLD, ring, ulysses, timeout)  # held, so that no later world is taken for this one
    if key in _meshes:
        return _meshes[key]
    size = ring * ulysses
    grid = torch.arange(world).view(world // size, ring, ulysses)
    cp = _axis("context-parallel", grid.flatten(1).tolist(), me, timeout)

    def axis(name: str, lines: list[list[int]]) -> Group:
        # the same ranks as the whole cp group need no second communicator
        return (
            replace(cp, name=name, sent=Counter(), calls=Counter())
            if len(lines[0]) == size
            else _axis(name, lines, me, timeout)
        )

    mesh = Mesh(
        dp_size=world // size,
        dp_rank=me // size,
        cp_group=cp,
        ring_group=axis("ring", grid.transpose(1, 2).reshape(-1, ring).tolist()),
        ulysses_group=axis("ulysses", grid.reshape(-1, ulysses).tolist()),
        control_group=_axis("context-parallel", grid.flatten(1).tolist(), me, timeout, backend="gloo"),
    )
    _meshes[key] = mesh
    return mesh


def _axis(name: str, lines: list[list[int]], me: int, timeout: float, backend: str | None = None) -> Group:
    """One process group per line; deepspeed.comm's own new_group knows no timeout, so torch makes them."""
    mine = next(line for line in lines if me in line)
    handle = None
    if len(mine) > 1:
        for line in lines:
            made = torch.distributed.new_group(line, timeout=timedelta(seconds=timeout), backend=backend)
            handle = made if line is mine else handle
    group = Group(name, tuple(mine), mine.index(me), handle, timeout)
    if handle is not None:
        # Connects all ranks now: NCCL must not meet its first message of a group on some of the ranks only, and a step
        # in which nobody needs this rank's rows leaves it out.
        device = "cpu" if backend == "gloo" else get_accelerator().current_device_name()
        group.all_reduce(torch.zeros(1, device=device), "first contact")
    return group


@atexit.register
def release() -> None:
    """Let go of every group. While Python still holds one, its threads outlive the interpreter and abort the process."""
    for mesh in _meshes.values():
        for group in (mesh.cp_group, mesh.ring_group, mesh.ulysses_group, mesh.control_group):
            group.handle = None
    _meshes.clear()


def built_meshes() -> tuple[Mesh, ...]:
    """Every mesh that this process has built."""
    return tuple(_meshes.values())
