"""What a running process has used: peak memory, bytes sent for attention, storages that live."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def memory(field: str) -> int:
    """Bytes of this process's memory.

    Args:
        field: ``"VmHWM"``, the peak, or ``"VmRSS"``, what is held now; on a GPU what torch has allocated on it.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() if field == "VmHWM" else torch.cuda.memory_allocated()
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":")) * 1024


class SentForAttention:
    """Counts the bytes of all-to-alls and of messages from rank to rank, whoever sends them; gradients and weights travel
    in other collectives. One per process, for good."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self._all_to_all = torch.distributed.all_to_all_single
        self._batch = torch.distributed.batch_isend_irecv
        torch.distributed.all_to_all_single = self._counting_all_to_all
        torch.distributed.batch_isend_irecv = self._counting_batch

    def total(self) -> int:
        return self.sent.total()

    def _counting_all_to_all(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        ranks = torch.distributed.get_world_size(kwargs.get("group"))
        self.sent["all-to-all"] += input.numel() * input.element_size() * (ranks - 1) // ranks
        return self._all_to_all(output, input, *args, **kwargs)

    def _counting_batch(self, operations: Any) -> Any:
        for each in operations:
            if each.op is torch.distributed.isend:
                self.sent["messages"] += each.tensor.numel() * each.tensor.element_size()
        return self._batch(operations)


class LiveStorages(TorchDispatchMode):
    """Every storage that is made while this mode is on; :meth:`live` sums those that somebody still holds."""

    counts_meta = False

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), made=False)  # a view's storage is no new one
        found = function(*args, **(kwargs or {}))
        self._note(found, made=True)
        return found

    def _note(self, values: Any, made: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and (self.counts_meta or not tensor.is_meta):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._seen.setdefault(reference.cdata, (reference, storage.nbytes() if made else 0))

    def live(self) -> int:
        """Bytes."""
        return sum(nbytes for reference, nbytes in self._seen.values() if not reference.expired())


class PeakStorages(LiveStorages):
    """The most bytes that lived at any time, in :attr:`most`; storages without data count as well."""

    most = 0
    counts_meta = True

    def __torch_dispatch__(self, *args: Any) -> Any:
        found = super().__torch_dispatch__(*args)
        self._seen = {key: storage for key, storage in self._seen.items() if not storage[0].expired()}
        self.most = max(self.most, self.live())
        return found
