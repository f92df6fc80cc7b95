"""The recorder: every operation on fake tensors passes here, with what it launches, allocates, sends and waits for.

Used as the innermost mode over a FakeTensorMode, with :class:`Functions` for what is decided above the dispatcher.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
from rehearsal import checks, values
from rehearsal.places import place
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

READS = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "_is_all_true", "_is_any_true"})
SIZES = frozenset(
    "nonzero masked_select _unique2 unique_dim unique_consecutive unique_dim_consecutive bincount repeat_interleave".split()
)
"""Operations whose result has a size that only the card knows."""

NO_LAUNCH = frozenset(
    "detach alias lift_fresh lift _unsafe_view empty empty_like empty_strided new_empty new_empty_strided is_pinned "
    "set_ _reshape_alias resize_".split()
)

ENGINE = ("deepspeed/runtime/engine", "deepspeed/runtime/utils", "deepspeed/runtime/zero/stage") + tuple(
    f"deepspeed/runtime/zero/{name}" for name in ("partition", "parameter", "utils")
)
"""What gathers weights and reduces gradients; the products of ZeRO-3 layers in ``zero/linear.py`` are the model's."""


class Tape(TorchDispatchMode):
    """What happened.

    Attributes:
        device: the card of this rank; other cards must not be used.
        phase: "initialize", "forward", "backward", ...; set by the scenario.
        layer: the index of the decoder layer that runs, None outside of layers.
        launches: by (phase, layer, operation); those of DeepSpeed's own code are under the layer "deepspeed".
        waits: by (phase, what, place): what makes the host wait for the card.
        host_tensors: by (phase, place): tensors with dims in host memory that a layer makes, pinned ones aside.
        faults: what must not be, each once.
        messages: (phase, operation, group, device of the tensors, current device, bytes).
        peak: the most bytes of the card's tensors that lived at the same time, "anywhere" and "in layers".
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.phase, self.layer = device, "setup", None
        self.launches: Counter = Counter()
        self.waits: Counter = Counter()
        self.host_tensors: Counter = Counter()
        self.faults: dict[tuple[str, str, str], int] = {}
        self.messages: list[tuple] = []
        self.calls: Counter = Counter()  # of the private operations that checks.py looks at
        self.peak: dict[str, int] = {"anywhere": 0, "in layers": 0}
        self.peak_at: dict[str, str] = {}
        self._now = 0
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self.refuses_float16 = True

    def fault(self, kind: str, what: str) -> None:
        key = kind, what, place()
        self.faults[key] = self.faults.get(key, 0) + 1

    def wait(self, what: str) -> None:
        self.waits[self.phase, what, place()] += 1

    # ---- pinned host memory

    def pin(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        reference = self._pinned.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()

    # ---- operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        name = func._schema.name.split("::")[-1]
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._message(func, name, args, kwargs, inputs)
        on_card = any(t.is_cuda for t in inputs)
        value = values.compute(func, name, args, kwargs, inputs) if func.namespace != "rehearsal" else None
        if name in READS:
            return self._read(name, inputs, on_card, value)
        if on_card and (name in SIZES or _by_mask(name, args)):
            self.wait(f"{name}: its size")
        if on_card:
            checks.product(self, name, args, kwargs)
        out = self._run(func, args, kwargs, inputs, value)
        if kwargs.get("pin_memory"):
            self.pin(out)
        values.attach(func, name, args, kwargs, inputs, out, value)
        self._account(func, name, args, kwargs, inputs, [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)])
        return out

    def _run(self, func, args, kwargs, inputs, value):
        if func is torch.ops.aten.view.dtype and args[0].dim() and args[0].size(-1) == 1 != args[0].stride(-1):
            # of a last dim of one element a fake view may have any stride, a real one has 1
            args = torch.as_strided(args[0], args[0].shape, (*args[0].stride()[:-1], 1)), *args[1:]
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if value is None or not any(
                word in type(error).__name__ for word in ("DynamicOutputShape", "DataDependent")
            ):
                raise
            device = inputs[0].device

            def fake(t):
                return torch.empty(t.shape, dtype=t.dtype, device=device) if isinstance(t, torch.Tensor) else t

            with _disable_current_modes():
                shapes = tree_map(lambda t: t.to("meta") if isinstance(t, torch.Tensor) else t, value)
            return tree_map(fake, shapes)

    def _read(self, name, inputs, on_card, value):
        if on_card:
            self.wait(name.strip("_"))
        if value is not None:
            return value
        if name != "_local_scalar_dense":
            return False
        return inputs[0].dtype.is_floating_point and 0.0 or (False if inputs[0].dtype == torch.bool else 0)

    def _message(self, func, name, args, kwargs, inputs):
        group = checks.group_name(args, kwargs)
        for tensor in inputs:
            if not tensor.is_contiguous():
                self.fault("message", f"{name} of a tensor that is not contiguous")
            if not tensor.numel():
                self.fault("message", f"{name} without any bytes")
            if tensor.is_cuda:
                self._check_device(tensor)
        from rehearsal import card

        sizes = sum(t.nbytes for t in inputs)
        devices = sorted({str(t.device) for t in inputs})
        self.messages.append((self.phase, name, group, ",".join(devices), card.current_device(), sizes))
        if any(t.is_cuda for t in inputs):
            self.launches[self.phase, self._owner(), f"c10d.{name}"] += 1
        if name == "_allgather_base_" and all(values.value_of(t) is not None for t in args[:2]):
            whole, mine = map(values.value_of, args[:2])  # every rank holds the same
            with _disable_current_modes():
                whole.view(-1, *mine.shape).copy_(mine.expand(whole.numel() // mine.numel(), *mine.shape))
        return func(*args, **kwargs)

    def _account(self, func, name, args, kwargs, inputs, outs):
        if name in ("_to_copy", "copy_") and self._copies(name, args, kwargs, outs):
            pass
        elif any(t.is_cuda for t in (*outs, *inputs)) and name not in NO_LAUNCH and not _is_view(func, outs):
            self.launches[self.phase, self._owner(), name] += 1
        for tensor in outs:
            if tensor.is_cuda:
                self._check_device(tensor)
                if self.refuses_float16 and tensor.dtype == torch.float16:
                    self.fault("dtype", f"{name} makes a float16 tensor in a bf16 run")
                self._remember(tensor, name)
            elif self.layer is not None and tensor.dim() and tensor.numel() and not self.is_pinned(tensor):
                self.host_tensors[self.phase, place()] += not _is_view(func, outs)

    def _owner(self) -> int | str | None:
        """For whom something is launched: a layer, or the engine around it."""
        return "deepspeed" if place().startswith(ENGINE) else self.layer

    def _copies(self, name, args, kwargs, outs) -> bool:
        """Whether it copies between host and card; notes what waits."""
        source = args[0] if name == "_to_copy" else args[1]
        target = outs[0]
        if source.is_cuda == target.is_cuda:
            return False
        at_once = kwargs.get("non_blocking", len(args) > 2 and args[2])
        host, way = (target, "host") if source.is_cuda else (source, "card")
        if not at_once:
            self.wait(f"copy to {way}")
        elif source.is_cuda and not self.is_pinned(host):
            self.wait("copy to pageable host memory")
        elif not self.is_pinned(host) and host.nbytes > checks.STAGED:
            self.wait("copy from pageable host memory")
        self.launches[self.phase, self._owner(), f"copy to {way}"] += 1
        return True

    def _check_device(self, tensor: torch.Tensor) -> None:
        if tensor.device != self.device:
            self.fault("device", f"a tensor on {tensor.device}, this rank has {self.device}")

    # ---- memory

    def _remember(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._living and not self._living[storage._cdata][0].expired():
            return
        if storage._cdata in self._living:
            self._now -= self._living.pop(storage._cdata)[1]
        self._living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._now += storage.nbytes()
        for where in ("anywhere", "in layers") if self.layer is not None else ("anywhere",):
            if self._now > self.peak[where] and self.living() > self.peak[where]:
                self.peak[where], self.peak_at[where] = self._now, f"{self.phase}, {name} at {place()}"

    def living(self) -> int:
        """Bytes on the card now."""
        for key in [key for key, (reference, _) in self._living.items() if reference.expired()]:
            self._now -= self._living.pop(key)[1]
        return self._now


class Functions(TorchFunctionMode):
    """What fake tensors cannot do and real ones can: numpy, lists, pinned memory. Looks at private operations too, whose
    arguments the dispatcher has converted already."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape
        FakeTensor.tolist = lambda tensor: self._leave("tolist", tensor)  # its own would read element by element
        run_backward = torch.autograd._engine_run_backward

        def run_in_this_mode(*args, **kwargs):  # a mode is off while one of its functions runs, and backward() is one
            active = self in torch.overrides._get_current_function_mode_stack()
            with contextlib.nullcontext() if active else self:
                return run_backward(*args, **kwargs)

        torch.autograd._engine_run_backward = run_in_this_mode

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("numpy", "__array__") and args and isinstance(args[0], FakeTensor):
            return self._leave(name, *args)
        if name in ("pin_memory", "is_pinned") and args and isinstance(args[0], FakeTensor):
            return self.tape.is_pinned(args[0]) if name == "is_pinned" else self._pin(args[0].clone())
        if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            checks.private_call(self.tape, func, args, kwargs)
        return func(*args, **kwargs)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.tape.pin(tensor)
        return tensor

    def _leave(self, name: str, tensor: torch.Tensor, *args: Any) -> Any:
        if tensor.is_cuda:
            if name != "tolist":
                raise TypeError("can't convert cuda device type tensor to numpy")
            self.tape.wait("tolist")
        value = values.value_of(tensor)
        if value is None:
            self.tape.fault("value", f"{name} of a tensor whose values the rehearsal does not know")
            value = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return getattr(value.detach(), name)(*args)


def _is_view(func: Any, outs: list[torch.Tensor]) -> bool:
    returned = func._schema.returns
    return bool(outs) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


def _by_mask(name: str, args: Any) -> bool:
    """Whether a tensor is indexed by a mask."""
    return name in ("index", "index_put", "index_put_", "_unsafe_index") and any(
        isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1])
    )
