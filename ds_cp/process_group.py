"""Communication inside a group of ranks. All messages and collectives of ds_cp go through :class:`Group`."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Iterator, Protocol, Sequence

import torch
import torch.distributed
from deepspeed import comm as dist
from torch.distributed import ProcessGroup

from ds_cp.profiling import named_range

Message = tuple[int, torch.Tensor]
"""Index of a peer in the group, and a contiguous tensor: what is sent to the peer, or the buffer to receive into."""


class GroupError(RuntimeError):
    """Communication failed: another rank of the group has failed, exited or not answered in time."""


class DeviceError(RuntimeError):
    """The accelerator of this rank failed. Communication only raised the error of a kernel that was launched before."""


@dataclass
class Group:
    """The ranks of one mesh axis.

    Each method takes ``what``, a description such as ``"forward rows from rank 2 of the ring"``. Error messages contain it,
    and its first word, the phase, is the key of the counters.

    Backends get detached tensors. A backend's thread releases a message some time after the wait for it has ended. By then a
    received tensor is the output of an autograd function: through its graph the thread would keep the activations of a whole
    step alive, and would be the thread that frees them.

    Attributes:
        name: Name of the axis, for error messages.
        ranks: Global ranks in the order of the axis.
        rank: Index of this rank in ``ranks``.
        handle: Process group of the backend. None for a group of one rank, which never communicates.
        timeout: Seconds after which a waiting rank fails.
        sent: Number of bytes that left this rank, by phase ("forward", "backward", ...).
        calls: Number of collectives and of batches of messages, by phase.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    handle: ProcessGroup | None
    timeout: float
    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def isend_irecv(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> "Pending":
        """Start point-to-point messages. Both sides of a pair must list the messages between them in the same order.

        On CUDA the messages overlap with the kernels that the caller launches next: torch runs them on NCCL's own stream,
        after what the current stream has queued so far, and :meth:`Pending.wait` makes the current stream, not the host,
        wait for them. Callers need no stream of their own.
        """
        backend = dist if hasattr(dist, "batch_isend_irecv") else torch.distributed  # DeepSpeed has it since 0.19.8
        ops = [backend.P2POp(backend.isend, tensor.detach(), self.ranks[peer], self.handle) for peer, tensor in sends]
        ops += [
            backend.P2POp(backend.irecv, tensor.detach(), self.ranks[peer], self.handle) for peer, tensor in receives
        ]
        if not ops:
            return Pending(self, [], what, ())
        sent = [tensor for _, tensor in sends]
        self._count(what, sent)
        with _communication(self, what, "exchange"):
            return Pending(self, backend.batch_isend_irecv(ops), what, sent)

    def all_to_all(
        self, tensor: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], what: str
    ) -> torch.Tensor:
        """Send ``send_counts[i]`` rows of dim 0 to rank i, and concatenate the received rows along dim 0."""
        received = tensor.new_empty((sum(receive_counts), *tensor.shape[1:]))
        even = len({*send_counts, *receive_counts}) == 1
        # Without split sizes the backend does not have to look through two lists on every layer.
        split_sizes = (None, None) if even else (list(receive_counts), list(send_counts))
        self._count(what, [tensor])
        self.sent[_phase(what)] -= tensor.nbytes * send_counts[self.rank] // max(1, len(tensor))
        with _communication(self, what, "all_to_all"):
            dist.all_to_all_single(received.detach(), tensor.detach().contiguous(), *split_sizes, self.handle)
        return received

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """``[n, ...] -> [size, n, ...]``, equal shapes on every rank."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._count(what, [tensor] * (self.size - 1))
        with _communication(self, what, "all_gather"):
            dist.all_gather_into_tensor(gathered.flatten(0, 1).detach(), tensor.detach().contiguous(), self.handle)
        return gathered

    def reduce_scatter(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """``[size, n, ...] -> [n, ...]``: this rank's part of the sum over the group."""
        part = torch.empty_like(tensor[0])
        self._count(what, [tensor[1:]])
        with _communication(self, what, "reduce_scatter"):
            dist.reduce_scatter_tensor(part.detach(), tensor.detach().contiguous().flatten(0, 1), group=self.handle)
        return part

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """The sum over the group, out of place."""
        total = tensor.clone()
        self._count(what, [tensor])
        with _communication(self, what, "all_reduce"):
            dist.all_reduce(total.detach(), group=self.handle)
        return total

    def all_gather_object(self, value: object, what: str) -> list[Any]:
        """A small Python object of every rank."""
        values: list[Any] = [None] * self.size
        with _communication(self, what, "agreement"):
            torch.distributed.all_gather_object(values, value, group=self.handle)
        return values

    def _count(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        self.calls[_phase(what)] += 1
        self.sent[_phase(what)] += sum(tensor.nbytes for tensor in tensors)


def _phase(what: str) -> str:
    return what.split(" ", 1)[0]


@contextmanager
def _communication(group: Group, what: str, profile_range: str) -> Iterator[None]:
    """Turn a backend's failure into a :class:`GroupError` that names rank, group and exchange.

    gloo raises an error in the waiting thread after its timeout. With NCCL it is the watchdog that ends the process; on the
    ranks that survive, the next agreement on a batch, which runs on gloo, raises the :class:`GroupError`.
    """
    start = time.monotonic()
    try:
        with named_range(profile_range):
            yield
    except torch.OutOfMemoryError:
        raise
    except torch.AcceleratorError as error:
        raise DeviceError(
            f"the device of rank {group.ranks[group.rank]} failed; its error was noticed in '{what}' of the {group.name} group. "
            "Kernels run asynchronously, so one that was launched before has caused it, on this rank: the other ranks of the group "
            "will report that they lost this one. Set CUDA_LAUNCH_BLOCKING=1 to see which kernel it is. "
            f"Device: {error}"
        ) from error
    except RuntimeError as error:
        raise GroupError(
            f"rank {group.ranks[group.rank]} lost its {group.name} group {list(group.ranks)} in '{what}', after "
            f"{time.monotonic() - start:.1f} s (timeout {group.timeout:g} s). Another rank of the group has failed, "
            "hangs, or runs a different program: look for the first error among these ranks. "
            f'A slow first step needs a larger "context_parallel.timeout". Backend: {error}'
        ) from error


class _Work(Protocol):
    """A message that a backend has started."""

    def wait(self) -> object: ...


class Pending:
    """Point-to-point messages in flight. Keeps the sent tensors alive until :meth:`wait`."""

    def __init__(self, group: Group, works: Sequence[_Work], what: str, sent: Sequence[torch.Tensor]) -> None:
        self._group, self._works, self._what, self._sent = group, works, what, sent

    def wait(self) -> None:
        """Wait until all messages have been received. On CUDA it is the current stream that waits, not the host."""
        with _communication(self._group, self._what, "exchange"):
            for work in self._works:
                work.wait()
        self._works, self._sent = (), ()
