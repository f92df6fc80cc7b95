"""What a pretended machine of eight cards answers to ``torch.cuda``. Import this before torch.

The C++ side is ``guard.cpp``: the current device is per thread, as on a real machine, and ``torch.cuda.set_device`` and
autograd's threads change it. What would make the host wait for a card is noted in :data:`notes`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

CARDS = 8
MEMORY = 80 << 30
NAMES = {8: "A100", 9: "H100", 10: "B200"}

assert "torch" not in sys.modules, "the guard must be loaded before torch asks what CUDA says"
_torch = Path(__import__("importlib.util").util.find_spec("torch").origin).parent
for _name in ("libc10.so", "libtorch_cpu.so"):
    ctypes.CDLL(str(_torch / "lib" / _name), mode=ctypes.RTLD_GLOBAL)
_guard = ctypes.CDLL(os.environ["DS_CP_REHEARSAL_GUARD"], mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.cuda.nvtx  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

wait: Callable[[str], None] = lambda what: None  # noqa: E731
"""Called with what makes the host wait for a card; the tape puts itself here."""

chosen: list[int] = []
"""Devices that were set as the current one, in order."""

capability = (9, 0)


def current_device() -> int:
    return _guard.rehearsal_current_device()


def set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        chosen.append(index)
        _guard.rehearsal_set_device(index)


class Event:
    """An event that has happened. Only the host's waits for it are of interest."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.stream: Stream | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        self.stream = stream or current_stream()

    def wait(self, stream: "Stream | None" = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        wait("event.synchronize")

    def elapsed_time(self, end: "Event") -> float:
        wait("event.elapsed_time")
        return 1.0


class Stream:
    """A stream, by number. Work on it is done at once, for there is none."""

    made = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any):
        Stream.made += 1
        index = current_device() if device is None or torch.device(device).index is None else torch.device(device).index
        self.device, self.stream_id, self.cuda_stream, self.priority = (
            torch.device("cuda", index), Stream.made, Stream.made, priority,
        )  # fmt: skip

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        wait("stream.synchronize")

    def __enter__(self) -> "Stream":
        _running.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _running.pop()


_running: list[Stream] = []


def current_stream(device: Any = None) -> Stream:
    return _running[-1] if _running else Stream(device)


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=NAMES[capability[0]], major=capability[0], minor=capability[1], total_memory=MEMORY,
        multi_processor_count=132, warp_size=32, gcnArchName="",
    )  # fmt: skip


def pretend() -> None:
    """Put the answers into ``torch.cuda``."""
    generator_state = torch.zeros(16, dtype=torch.uint8)
    nothing, zero = (lambda *a, **k: None), (lambda *a, **k: 0)
    answers = dict(
        is_available=lambda: True, is_initialized=lambda: True, init=nothing, _lazy_init=nothing,
        device_count=lambda: CARDS, current_device=current_device, set_device=set_device,
        get_device_capability=lambda *a: capability, get_device_name=lambda *a: NAMES[capability[0]],
        get_device_properties=_properties, is_bf16_supported=lambda *a, **k: True,
        mem_get_info=lambda *a: (MEMORY, MEMORY), memory_stats=lambda *a, **k: {},
        Stream=Stream, Event=Event, current_stream=current_stream, default_stream=current_stream, stream=lambda s: s,
        synchronize=lambda *a: wait("torch.cuda.synchronize"),
        get_rng_state=lambda *a: generator_state.clone(), set_rng_state=nothing, initial_seed=zero,
        get_rng_state_all=lambda: [generator_state.clone()] * CARDS, set_rng_state_all=nothing,
    )  # fmt: skip
    answers |= dict.fromkeys(("manual_seed", "manual_seed_all", "empty_cache", "ipc_collect"), nothing)
    answers |= dict.fromkeys(
        ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), nothing
    )
    answers |= dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), zero
    )
    answers |= dict.fromkeys(("memory_cached", "max_memory_cached"), zero)
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer if isinstance(answer, type) else _function(answer))
    torch.cuda.device = _Device
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _function(zero))
    torch.Tensor.record_stream = nothing
    FakeTensorMode.avoid_device_init = property(lambda self: True)
    torch.nn.Module._apply = _apply


def _function(answer: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own for each name: TorchDynamo looks its rules up by function."""
    return lambda *args, **kwargs: answer(*args, **kwargs)


class _Device:
    """``with torch.cuda.device(i)``."""

    def __init__(self, device: Any):
        self._index, self._before = device if isinstance(device, int) else torch.device(device).index, 0

    def __enter__(self) -> None:
        self._before = current_device()
        _guard.rehearsal_set_device(self._before if self._index is None else self._index)

    def __exit__(self, *error: Any) -> None:
        _guard.rehearsal_set_device(self._before)


def _apply(
    self: torch.nn.Module, function: Callable, recurse: bool = True, done: dict | None = None
) -> torch.nn.Module:
    """``Module._apply`` for fake parameters: what changes is replaced, for torch cannot swap what has weak references."""
    done = {} if done is None else done
    for child in self.children() if recurse else ():
        _apply(child, function, done=done)
    for tensors in (self._parameters, self._buffers):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if id(tensor) not in done:
                with torch.no_grad():
                    new = function(tensor)
                if isinstance(tensor, torch.nn.Parameter) and new is not tensor:
                    new = torch.nn.Parameter(new, tensor.requires_grad)
                done[id(tensor)] = tensor, new  # the old one too, so that its id stays taken
            tensors[name] = done[id(tensor)][1]
    return self
