"""Logits that are not computed before somebody needs them, and never all at once if that is the known loss."""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.nn.functional as F

from ds_cp.chunked.cross_entropy import linear_cross_entropy
from ds_cp.chunked.weight_versions import WeightVersions
from ds_cp.loss import cross_entropy_sum

POINTWISE = frozenset("add sub mul div true_divide neg tanh float to contiguous".split())
"""What a model may do to its logits without having them computed: scales, softcaps, casts."""


class DeferredLogits:
    """``projection(hidden)`` and what the model then did to it, [B, L, V]; duck-typed, no tensor.

    Operations that act on each logit by itself are noted; any other use computes this rank's logits, once, and goes on
    with them. The projection is a module whose ``forward(hidden, work)`` returns ``work(hidden, weight, bias)``, so that
    whatever gathers its weights around a call (ZeRO-3) does so once, whatever the number of tiles.
    """

    __module__ = "builtins"  # DeepSpeed's hooks warn of outputs whose type comes from elsewhere

    def __init__(
        self,
        projection: torch.nn.Module,
        hidden: torch.Tensor,
        like: torch.Tensor,
        before: "DeferredLogits | None" = None,
        step: Callable[[torch.Tensor], torch.Tensor] | None = None,
        returned: bool = False,
    ):
        self._projection, self._hidden, self._like = projection, hidden, like
        self._before, self._step, self.returned = before, step, returned
        self._computed: torch.Tensor | None = None
        self._weight_versions = WeightVersions(projection) if before is None else None

    @classmethod
    def of(
        cls, projection: torch.nn.Linear, hidden: torch.Tensor, returned: Callable[[torch.Tensor], bool] | None = None
    ) -> "DeferredLogits":
        """The start: nothing was done to them yet.

        Args:
            returned: asked of logits [B, L, V] on no device: will the caller get them? The loss then computes and keeps
                them. One call of the projection serves both: a second, which only some groups of the world need, would
                hang under ZeRO-3.
        """
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        shape = (*hidden.shape[:-1], projection.out_features)
        like = torch.empty(shape, dtype=dtype, device="meta")
        return cls(projection, hidden, like, returned=returned is not None and returned(like))

    def computed(self) -> torch.Tensor:
        """This rank's logits, [B, L, V], differentiable. Under ZeRO-3 all ranks of the world must come here.

        Raises:
            RuntimeError: the projection's weights are no longer those of the forward pass.
        """
        if self._computed is None:
            if self._before is None:
                self._weight_versions.check(self._projection, "logits that are computed only now")
                self._computed = self._projection(self._hidden, F.linear)
            else:
                self._computed = self._step(self._before.computed())
        return self._computed

    def cross_entropy(self, targets: torch.Tensor, ignore_index: int, label_smoothing: float = 0.0) -> torch.Tensor:
        """The sum over this rank's tokens, fp32 or fp64; tile by tile, unless the logits exist already or are returned.

        Args:
            targets: [B, L].
        """
        steps, earlier, exists = [], self, self.returned
        while earlier is not None:
            exists = exists or earlier._computed is not None
            steps.append(earlier._step)
            earlier = earlier._before
        if exists or self._like.dim() != 3:
            return cross_entropy_sum(self.computed(), targets, ignore_index, label_smoothing)

        def finish(logits: torch.Tensor) -> torch.Tensor:
            for step in reversed(steps[:-1]):
                logits = step(logits)
            return logits

        def work(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            flat = hidden.flatten(0, -2)
            return linear_cross_entropy(flat, weight, bias, targets.flatten(), finish, ignore_index, label_smoothing)

        return self._projection(self._hidden, work)

    # ---- looking like a tensor -------------------------------------------------------------------------------

    shape = property(lambda self: self._like.shape)
    dtype = property(lambda self: self._like.dtype)
    ndim = property(lambda self: self._like.ndim)
    device = property(lambda self: self._hidden.device)
    requires_grad = property(lambda self: self._hidden.requires_grad)

    def size(self, *dim: int) -> Any:
        return self._like.size(*dim)

    def dim(self) -> int:
        return self._like.dim()

    def __len__(self) -> int:
        return len(self._like)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(torch.Tensor, name)
        if not callable(method):
            return getattr(self.computed(), name)
        return lambda *args, **kwargs: _apply(method, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _apply(function, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        whole = index[:-1] if isinstance(index, tuple) else ()
        per_logit = bool(whole) and isinstance(index[-1], slice) and all(x in (..., slice(None)) for x in whole)
        if per_logit and (Ellipsis in whole or len(whole) == self.ndim - 1):
            kept = index[-1]  # tiles have fewer dims
            return self._then(lambda logits: logits[..., kept])
        return self.computed()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.computed()[index] = value

    def _then(self, step: Callable[[torch.Tensor], torch.Tensor]) -> "DeferredLogits":
        return DeferredLogits(self._projection, self._hidden, step(self._like), self, step, self.returned)


def _apply(function: Callable, args: tuple, kwargs: dict) -> Any:
    """A torch function of deferred logits: noted where it is pointwise, else on the computed ones."""
    name = getattr(function, "__name__", "")
    others = [*args[1:], *kwargs.values()]
    if name in POINTWISE and isinstance(args[0], DeferredLogits):
        if name == "float":
            return args[0]._then(lambda logits: logits.to(torch.promote_types(logits.dtype, torch.float32)))
        if name == "to":
            others = [x for x in others if not _is_device(x, args[0].device)]
            if len(others) == 1 and isinstance(others[0], torch.dtype) or not others:
                return args[0]._then(lambda logits: logits.to(*others) if others else logits)
        elif all(map(_is_constant, others)):
            return args[0]._then(lambda logits: function(logits, *args[1:], **kwargs))
    return function(*map(_real, args), **{key: _real(value) for key, value in kwargs.items()})


def _is_constant(value: Any) -> bool:
    """The same for each logit, and learns nothing."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad
    return not isinstance(value, DeferredLogits)


def _is_device(value: Any, device: torch.device) -> bool:
    return isinstance(value, (str, torch.device)) and torch.device(value) == device


def _real(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_real, value))
    return value.computed() if isinstance(value, DeferredLogits) else value


def _operator(name: str) -> Callable:
    def operate(self: DeferredLogits, *others: Any) -> Any:
        return getattr(self, name)(*others)

    return operate


def _reflected(name: str) -> Callable:
    def operate(self: DeferredLogits, *others: Any) -> Any:
        return getattr(self.computed(), name)(*others)

    return operate


for _name, _method in {"add": "add", "radd": "add", "sub": "sub", "mul": "mul", "rmul": "mul", "truediv": "div",
                       "neg": "neg"}.items():  # fmt: skip
    setattr(DeferredLogits, f"__{_name}__", _operator(_method))
for _name in ("rsub", "rtruediv", "pow", "rpow", "matmul", "eq", "ne", "lt", "le", "gt", "ge", "iter", "bool", "float"):
    setattr(DeferredLogits, f"__{_name}__", _reflected(f"__{_name}__"))
DeferredLogits.__hash__ = object.__hash__
