"""Ranks as threads of one process: for tests without a communication backend, and for benchmarks of a ring on one device.

Only the transport of messages differs from :class:`ds_cp.process_group.Group`. Schedules, exchanges and kernels are the same.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from typing import Any, Callable, Sequence

import torch

from ds_cp.process_group import Group, GroupError, Message, Pending

TensorQueue = queue.SimpleQueue[torch.Tensor]


class MessageQueues:
    """Messages between threads: as with any backend, the n-th receive of a pair of ranks gets the n-th send of the pair."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int, int], TensorQueue] = {}

    def get(self, source: int, target: int, number: int) -> TensorQueue:
        """The queue of the message with this number from rank ``source`` to rank ``target``."""
        with self._lock:
            return self._queues.setdefault((source, target, number), queue.SimpleQueue())


class InProcessGroup(Group):
    """The group of ``size`` threads, as seen by one of them.

    Args:
        messages: Queues that all ranks of the group share.
        rank: Rank of this thread.
        size: Number of ranks.
        timeout: Seconds that a receive waits before it raises an error.
    """

    def __init__(self, messages: MessageQueues, rank: int, size: int, timeout: float) -> None:
        super().__init__("in-process", tuple(range(size)), rank, None, timeout)
        self._messages = messages
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()

    def isend_irecv(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Pending:
        self._count(what, [tensor for _, tensor in sends])
        for peer, tensor in sends:
            self._messages.get(self.rank, peer, self._num_sent[peer]).put(tensor.detach().clone())
            self._num_sent[peer] += 1
        works = []
        for peer, buffer in receives:
            works.append(_Receive(self._messages.get(peer, self.rank, self._num_received[peer]), buffer, self))
            self._num_received[peer] += 1
        return Pending(self, works, what, ())

    def all_to_all(
        self, tensor: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], what: str
    ) -> torch.Tensor:
        received = tensor.new_empty((sum(receive_counts), *tensor.shape[1:]))
        peers = range(self.size)
        sends = list(zip(peers, tensor.split(list(send_counts))))
        receives = list(zip(peers, received.split(list(receive_counts))))
        self.isend_irecv(sends, receives, what).wait()
        return received


class _Receive:
    """The counterpart of the work that ``torch.distributed.irecv`` returns."""

    def __init__(self, messages: TensorQueue, buffer: torch.Tensor, group: Group) -> None:
        self._messages, self._buffer, self._group = messages, buffer, group

    def wait(self) -> None:
        try:
            self._buffer.copy_(self._messages.get(timeout=self._group.timeout))
        except queue.Empty:
            raise GroupError(f"rank {self._group.rank} waited {self._group.timeout:g} s for a message") from None


def run(size: int, work: Callable[[InProcessGroup], Any], timeout: float = 30.0) -> list[Any]:
    """Call ``work(group)`` on ``size`` threads, one per rank.

    Returns:
        The results, in the order of the ranks.

    Raises:
        BaseException: An error of a rank, after all ranks have ended: of the lowest rank that raised one. Errors of ranks
            that only waited for another rank (``GroupError``) come last.
    """
    messages = MessageQueues()
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run_rank(rank: int) -> None:
        try:
            # On CUDA autograd runs all backward passes of a device on one thread of its own. A rank that waits there for a
            # message would block the rank that sends it. Without multithreading each rank runs its own backward pass.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = work(InProcessGroup(messages, rank, size, timeout))
        except BaseException as error:  # raised below, on the thread of the caller
            errors[rank] = error

    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [error for error in errors if error is not None]
    if raised:
        raise min(raised, key=lambda error: isinstance(error, GroupError))
    return results
