"""Real values behind fake tensors, where a program looks at them: documents, positions, sizes, indices.

An operation whose inputs all have values is computed on the CPU beside the fake one. Weights and activations have none, and
what is computed from them has none either, except for indices and masks (``topk``, ``>``): these are invented, in range.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

LIMIT = 1 << 22
"""Elements up to which values of integers are kept."""

FLOAT_LIMIT = 1 << 16
"""Of floats, which are looked at in small tensors only."""

NEVER = ("_flash", "_scaled", "_efficient", "mm", "addmm", "bmm", "baddbmm", "convolution")
RANDOM_FLOATS = frozenset({"rand", "randn", "rand_like", "randn_like", "normal_", "uniform_", "bernoulli_", "normal"})
FACTORIES = frozenset(
    "empty empty_strided empty_like zeros zeros_like ones ones_like full full_like new_empty new_empty_strided new_zeros "
    "new_ones new_full".split()
)
RANKED = frozenset({"topk", "sort", "argsort", "argmax", "argmin"})


class _Storage:
    """Whether the values of some memory are still known; shared by all views of it."""

    __slots__ = ("known",)

    def __init__(self):
        self.known = True


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor, if they are known."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    pair = getattr(tensor, "_rehearsal_value", None)
    return pair[0] if pair and pair[1].known else None


def give(tensor: torch.Tensor, value: torch.Tensor, storage: _Storage | None = None) -> None:
    if isinstance(tensor, FakeTensor):
        tensor._rehearsal_value = value, storage or _Storage()


def forget(tensor: torch.Tensor) -> None:
    """Something unknown was written into the tensor's memory."""
    pair = getattr(tensor, "_rehearsal_value", None)
    if pair:
        pair[1].known = False


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes to."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            found += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return found


def compute(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], inputs: Sequence[torch.Tensor]) -> Any:
    """The operation's results by value, or None. In-place operations change the values of their arguments."""
    if name.startswith(NEVER) or name in RANDOM_FLOATS:
        return None
    for tensor in inputs:
        limit = FLOAT_LIMIT if tensor.is_floating_point() else LIMIT
        if tensor.numel() > limit or value_of(tensor) is None:
            return None
    if name in FACTORIES:
        is_float = (kwargs.get("dtype") or (inputs[0].dtype if inputs else torch.get_default_dtype())).is_floating_point
        if (is_float and "empty" in name) or _elements(name, args, inputs) > (FLOAT_LIMIT if is_float else LIMIT):
            return None
    real_kwargs = {key: value for key, value in tree_map(_real, kwargs).items() if key != "pin_memory"}
    with _disable_current_modes(), torch.no_grad():
        try:
            value = func(*tree_map(_real, args), **real_kwargs)
            if name.startswith("empty") or name.startswith("new_empty"):
                tree_map(lambda t: t.zero_() if isinstance(t, torch.Tensor) else t, value)
        except Exception:  # not on the CPU, or not in this dtype
            return None
    return value


def attach(func: Any, name: str, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor], out: Any, value: Any) -> None:
    """Give the results their values, or invent those of integers; forget what was overwritten."""
    if value is None:
        for tensor in written(func, args, kwargs):
            forget(tensor)
        if any(t.is_floating_point() for t in inputs) and name not in FACTORIES:
            _invent(name, out)
        return
    pairs = [getattr(t, "_rehearsal_value", None) for t in inputs]
    memory = {pair[0].untyped_storage()._cdata: pair[1] for pair in pairs if pair}
    for fake, real in zip(tree_leaves(out), tree_leaves(value)):
        if isinstance(fake, torch.Tensor) and isinstance(real, torch.Tensor):
            give(fake, real, memory.get(real.untyped_storage()._cdata))


def _invent(name: str, out: Any) -> None:
    for tensor in tree_leaves(out):
        if not isinstance(tensor, FakeTensor) or tensor.is_floating_point() or tensor.is_complex():
            continue
        if tensor.numel() > LIMIT or getattr(tensor, "_rehearsal_value", None):
            continue
        with _disable_current_modes():
            value = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
            if name in RANKED and tensor.dim() and tensor.dtype == torch.int64:
                value += torch.arange(tensor.shape[-1])
            if name == "isfinite":
                value.fill_(1)
        give(tensor, value)


def _real(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return value_of(x)
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _elements(name: str, args: Sequence[Any], inputs: Sequence[torch.Tensor]) -> int:
    if inputs and name.endswith("_like"):
        return inputs[0].numel()
    sizes = args[1 if inputs else 0] if len(args) > bool(inputs) else ()
    total = 1
    for size in sizes if isinstance(sizes, (list, tuple)) else (sizes,):
        total *= int(size)
    return total
