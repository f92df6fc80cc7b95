"""A group of ranks that are threads of one process: for tests without a backend and for benchmarks on one device.

Only the way a message travels differs from :class:`ds_cp.process_group.Group`; schedules, exchanges and kernels are the same.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from typing import Any, Callable

import torch

from ds_cp.process_group import Group, GroupError, Pending


class Mailroom:
    """Messages between threads. As with any backend, the n-th receive posted for a pair of ranks gets its n-th send."""

    def __init__(self):
        self._lock = threading.Lock()
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue] = {}

    def box(self, source: int, target: int, number: int) -> queue.SimpleQueue:
        with self._lock:
            return self._boxes.setdefault((source, target, number), queue.SimpleQueue())


class InProcessGroup(Group):
    """One rank's view of ``size`` threads that share a mailroom."""

    def __init__(self, mailroom: Mailroom, rank: int, size: int, timeout: float):
        super().__init__("in-process", tuple(range(size)), rank, None, timeout)
        self._mailroom, self._sends, self._receives = mailroom, Counter(), Counter()

    def isend_irecv(self, sends, receives, what):
        self._count(what, [tensor for _, tensor in sends])
        for peer, tensor in sends:
            self._mailroom.box(self.rank, peer, self._sends[peer]).put(tensor.detach().clone())
            self._sends[peer] += 1
        arrivals = []
        for peer, buffer in receives:
            arrivals.append(_Arrival(self._mailroom.box(peer, self.rank, self._receives[peer]), buffer, self))
            self._receives[peer] += 1
        return Pending(self, arrivals, what, ())

    def all_to_all(self, tensor, send_counts, receive_counts, what):
        received = tensor.new_empty((sum(receive_counts), *tensor.shape[1:]))
        peers = range(self.size)
        sends = list(zip(peers, tensor.split(list(send_counts))))
        self.isend_irecv(sends, list(zip(peers, received.split(list(receive_counts)))), what).wait()
        return received


class _Arrival:
    def __init__(self, box: queue.SimpleQueue, buffer: torch.Tensor, group: Group):
        self._box, self._buffer, self._group = box, buffer, group

    def wait(self) -> None:
        try:
            self._buffer.copy_(self._box.get(timeout=self._group.timeout))
        except queue.Empty:
            raise GroupError(f"rank {self._group.rank} waited {self._group.timeout:g} s for a message") from None


def run(size: int, work: Callable[[InProcessGroup], Any], timeout: float = 30.0) -> list[Any]:
    """Call ``work(group)`` on ``size`` threads, one per rank.

    Returns:
        What each rank returned.

    Raises:
        BaseException: after all ranks ended, the first rank's error; one that waited for another in vain comes last.
    """
    mailroom = Mailroom()
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def body(rank: int) -> None:
        try:
            # On CUDA all backwards of a device share one thread of autograd's, where a rank that waits for a message
            # would keep the sender from running. Each rank walks its own graph instead.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = work(InProcessGroup(mailroom, rank, size, timeout))
        except BaseException as error:  # handed to the caller below
            errors[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [error for error in errors if error is not None]
    if raised:
        raise min(raised, key=lambda error: isinstance(error, GroupError))
    return results
