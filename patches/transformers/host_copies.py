"""Host copies of a batch's tensors: one read of the device for all of them, none for those that the host still has.

A read waits for everything that is queued on the device, the backward pass of the micro-batch before included. accelerate's
loaders move each batch from the host to the device, so its tensors are remembered there (:func:`remember`).
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

_originals = WeakTensorKeyDictionary()
"""By tensor on a device: (the tensor on the host that it was copied from, its version at that time)."""


def remember(host: Any, device: Any) -> None:
    """Remember what the integer tensors of a batch were copied from.

    Args:
        host: Batch on the host: a tensor, or nested lists, tuples and mappings of tensors.
        device: The same on the device.
    """
    if isinstance(host, torch.Tensor) and isinstance(device, torch.Tensor):
        is_copy = host.device.type == "cpu" and device.device.type != "cpu" and host.shape == device.shape
        if is_copy and not host.is_floating_point() and host.dtype == device.dtype:
            _originals[device] = host, device._version
    elif isinstance(host, Mapping) and isinstance(device, Mapping):
        for name in host:
            remember(host[name], device.get(name))
    elif isinstance(host, (list, tuple)) and isinstance(device, (list, tuple)):
        for pair in zip(host, device):
            remember(*pair)


def original(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host with the same values, if it is remembered and the tensor has not changed since; else itself."""
    host, version = _originals.get(tensor, (tensor, tensor._version))
    return host if version == tensor._version else tensor


class HostCopies:
    """Arrays of some tensors.

    Args:
        tensors: Tensors of any dtypes. Those on a device are read together.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self._tensors = {id(tensor): tensor for tensor in tensors}  # held, so that ids stay unique
        self._arrays: dict[int, np.ndarray] = {}
        on_device = []
        for key, tensor in self._tensors.items():
            host = original(tensor).detach()
            if host.device.type == "cpu":
                self._arrays[key] = host.numpy()
            else:
                on_device.append((key, host.contiguous()))
        if on_device:
            parts = [host.view(-1).view(torch.uint8) for _, host in on_device]
            read = torch.cat(parts).cpu().split([len(part) for part in parts])
            for (key, host), part in zip(on_device, read, strict=True):
                self._arrays[key] = part.clone().view(host.dtype).view(host.shape).numpy()

    def array(self, tensor: torch.Tensor | None) -> np.ndarray | None:
        """The values of one of the tensors; None for None."""
        return None if tensor is None else self._arrays[id(tensor)]
