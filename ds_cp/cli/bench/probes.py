"""Measurements of the running process: peak memory, bytes sent for attention, and storages of tensors that are alive."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed import P2POp, Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def memory(field: str) -> int:
    """Memory of this process in bytes; where CUDA is available, the bytes that torch has allocated on the device.

    Args:
        field: ``"VmHWM"`` for the peak or ``"VmRSS"`` for the current value, the names in ``/proc/self/status``.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() if field == "VmHWM" else torch.cuda.memory_allocated()
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":")) * 1024


class SentForAttention:
    """Counts the bytes of all-to-alls and of point-to-point messages of this process, whoever sends them.

    Gradients and weights are not counted: they use other collectives. An instance replaces functions of
    ``torch.distributed`` until the process ends, so there must be only one.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self._all_to_all = torch.distributed.all_to_all_single
        self._batch_isend_irecv = torch.distributed.batch_isend_irecv
        torch.distributed.all_to_all_single = self._counting_all_to_all
        torch.distributed.batch_isend_irecv = self._counting_batch_isend_irecv

    def total(self) -> int:
        return self.sent.total()

    def _counting_all_to_all(self, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Work | None:
        ranks = torch.distributed.get_world_size(kwargs.get("group"))
        self.sent["all-to-all"] += input.numel() * input.element_size() * (ranks - 1) // ranks
        work: Work | None = self._all_to_all(output, input, *args, **kwargs)
        return work

    def _counting_batch_isend_irecv(self, p2p_op_list: list[P2POp]) -> list[Work]:
        for operation in p2p_op_list:
            if operation.op is torch.distributed.isend:
                self.sent["messages"] += operation.tensor.numel() * operation.tensor.element_size()
        return self._batch_isend_irecv(p2p_op_list)


class LiveStorages(TorchDispatchMode):
    """Records every storage that is allocated while this mode is active; :meth:`live_bytes` sums those still referenced."""

    counts_meta = False
    """Whether storages on the meta device are recorded, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._record((args, kwargs), allocated=False)  # a result that is a view has the storage of an argument
        result = function(*args, **(kwargs or {}))
        self._record(result, allocated=True)
        return result

    def _record(self, values: Any, allocated: bool) -> None:
        """Record the storages of all tensors in ``values`` that are not known yet, with 0 bytes unless ``allocated``."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and (self.counts_meta or not tensor.is_meta):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._storages.setdefault(reference.cdata, (reference, storage.nbytes() if allocated else 0))

    def live_bytes(self) -> int:
        """Number of bytes in recorded storages that are still referenced."""
        return sum(nbytes for reference, nbytes in self._storages.values() if not reference.expired())


class PeakStorages(LiveStorages):
    """Records the largest number of live bytes at any time, on the meta device as well.

    Attributes:
        peak_bytes: The largest value of :meth:`live_bytes` after any operation so far.
    """

    peak_bytes = 0
    counts_meta = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return result
