"""Deferred logits: the hidden states of this rank's tokens and how to project them, in place of a tensor [B, L, V].

Between step 2 and step 3 of the list in :mod:`~ds_cp.patches.transformers.losses`: the projection creates them, the model applies
its pointwise operations to them, and the loss calls :meth:`DeferredLogits.cross_entropy`, which computes the logits chunk by
chunk and keeps none. Any other use computes the logits of all local tokens.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from ds_cp.chunked.cross_entropy import linear_cross_entropy
from ds_cp.chunked.weight_versions import WeightVersions
from ds_cp.loss import cross_entropy_sum

POINTWISE = frozenset("add sub mul div true_divide neg tanh float to contiguous".split())
"""Operations that a model may apply to its logits before they are computed: scales, softcaps, casts."""

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Computes something from hidden states [B, L, H], the projection's weight [V, H] and its bias [V]."""

Operation = Callable[[torch.Tensor], torch.Tensor]
"""Acts on each logit by itself: on logits [B, L, V], or on those of some tokens [n, V]."""


class DeferredLogits:
    """The logits [B, L, V] of this rank's tokens, before they are computed. Duck-typed: not a subclass of tensor.

    Pointwise operations are recorded. Any other operation computes the logits once and applies to these.

    Args:
        projection: Module whose ``forward(hidden, compute)`` returns ``compute(hidden, weight, bias)``. The weights are used
            inside one such call only, so that ZeRO-3 gathers them once, whatever the number of chunks.
        hidden: [B, L, H].
        meta: Tensor on the meta device with the shape and dtype of the logits.
        previous: The logits before the last operation, and that operation; None for the projection's own.

    Attributes:
        returned: Whether the caller of the model gets the logits, so that the loss computes and keeps them.
    """

    # DeepSpeed's ZeRO-3 hooks warn of every module output whose class is neither a tensor nor of the module "builtins"
    __module__ = "builtins"

    def __init__(
        self,
        projection: nn.Module,
        hidden: torch.Tensor,
        meta: torch.Tensor,
        previous: "tuple[DeferredLogits, Operation] | None" = None,
        returned: bool = False,
    ):
        self._projection, self._hidden, self._meta = projection, hidden, meta
        self._previous, self.returned = previous, returned
        self._computed: torch.Tensor | None = None
        self._weight_versions = WeightVersions(projection) if previous is None else None

    @classmethod
    def of(
        cls, projection: nn.Linear, hidden: torch.Tensor, returned: Callable[[torch.Tensor], bool] | None = None
    ) -> "DeferredLogits":
        """The logits of hidden states [B, L, H], without operations.

        Args:
            returned: Whether the caller of the model will get logits of this shape and dtype, [B, L, V] on the meta device. If
                so, the loss computes and keeps them, in its one call of the projection: a second call, which only some
                groups of the world would make, would hang under ZeRO-3.
        """
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        meta = torch.empty((*hidden.shape[:-1], projection.out_features), dtype=dtype, device="meta")
        return cls(projection, hidden, meta, returned=returned is not None and returned(meta))

    def computed(self) -> torch.Tensor:
        """This rank's logits, [B, L, V], with gradients. Under ZeRO-3 all ranks of the world must call this.

        Raises:
            RuntimeError: The projection's weights have changed since the forward pass.
        """
        if self._computed is None:
            if self._previous is not None:
                before, operation = self._previous
                self._computed = operation(before.computed())
            else:
                assert self._weight_versions is not None
                self._weight_versions.check(self._projection, "logits that are computed only now")
                self._computed = self._projection(self._hidden, F.linear)
        return self._computed

    def cross_entropy(self, targets: torch.Tensor, ignore_index: int, label_smoothing: float = 0.0) -> torch.Tensor:
        """The sum of the cross entropy over this rank's tokens, fp32 or fp64.

        Computed chunk by chunk, unless the logits have been computed already or are returned.

        Args:
            targets: [B, L].
        """
        chain = [*self._chain()]
        if self.returned or self._meta.dim() != 3 or any(each._computed is not None for each in chain):
            return cross_entropy_sum(self.computed(), targets, ignore_index, label_smoothing)
        operations = [each._previous[1] for each in reversed(chain) if each._previous is not None]

        def finish(logits: torch.Tensor) -> torch.Tensor:
            for operation in operations:
                logits = operation(logits)
            return logits

        def compute(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            flat = hidden.flatten(0, -2)
            return linear_cross_entropy(flat, weight, bias, targets.flatten(), finish, ignore_index, label_smoothing)

        total: torch.Tensor = self._projection(self._hidden, compute)
        return total

    def _chain(self) -> "Iterator[DeferredLogits]":
        """These logits, and those before each operation, back to the projection's own."""
        logits: DeferredLogits | None = self
        while logits is not None:
            yield logits
            logits = None if logits._previous is None else logits._previous[0]

    def _then(self, operation: Operation) -> "DeferredLogits":
        return DeferredLogits(
            self._projection, self._hidden, operation(self._meta), (self, operation), returned=self.returned
        )

    # ---- what a model and its loss use of a tensor ------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        return self._meta.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._meta.dtype

    @property
    def ndim(self) -> int:
        return self._meta.ndim

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def requires_grad(self) -> bool:
        return self._hidden.requires_grad

    def size(self, *dim: int) -> Any:
        return self._meta.size(*dim)

    def dim(self) -> int:
        return self._meta.dim()

    def __len__(self) -> int:
        return len(self._meta)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        attribute = getattr(torch.Tensor, name)
        if not callable(attribute):
            return getattr(self.computed(), name)
        return lambda *args, **kwargs: _apply(attribute, (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _apply(function, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        """A slice of the vocabulary is a pointwise operation: ``logits[..., :n]``, ``logits[:, :, :n]``."""
        token_index = index[:-1] if isinstance(index, tuple) else ()
        all_tokens = bool(token_index) and all(each in (..., slice(None)) for each in token_index)
        reaches_vocab = Ellipsis in token_index or len(token_index) == self.ndim - 1
        if all_tokens and reaches_vocab and isinstance(index[-1], slice):
            return self._then(lambda logits: logits[..., index[-1]])
        return self.computed()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.computed()[index] = value


def _apply(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function or method of torch: record it if it is pointwise, else call it on the computed logits."""
    name = getattr(function, "__name__", "")
    others = [*args[1:], *kwargs.values()]
    if name in POINTWISE and isinstance(args[0], DeferredLogits):
        if name == "float":
            return args[0]._then(lambda logits: logits.to(torch.promote_types(logits.dtype, torch.float32)))
        if name == "to":
            others = [each for each in others if not _is_device(each, args[0].device)]
            if len(others) == 1 and isinstance(others[0], torch.dtype) or not others:
                return args[0]._then(lambda logits: logits.to(*others) if others else logits)
        elif all(map(_is_constant, others)):
            return args[0]._then(lambda logits: function(logits, *args[1:], **kwargs))
    return function(*map(_to_tensors, args), **{key: _to_tensors(value) for key, value in kwargs.items()})


def _is_constant(value: Any) -> bool:
    """Whether an operand is the same for each logit and has no gradient."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad
    return not isinstance(value, DeferredLogits)


def _is_device(value: Any, device: torch.device) -> bool:
    return isinstance(value, (str, torch.device)) and torch.device(value) == device


def _to_tensors(value: Any) -> Any:
    """A value with computed logits in place of deferred ones."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_to_tensors, value))
    return value.computed() if isinstance(value, DeferredLogits) else value


# ---- operators: Python looks them up on the class, not through __getattr__ -------------------------------------


def _calls_method(name: str) -> Callable[..., Any]:
    def operator(self: DeferredLogits, *others: Any) -> Any:
        return getattr(self, name)(*others)

    return operator


def _computes(name: str) -> Callable[..., Any]:
    def operator(self: DeferredLogits, *others: Any) -> Any:
        return getattr(self.computed(), name)(*others)

    return operator


_RECORDED = {"add": "add", "radd": "add", "sub": "sub", "mul": "mul", "rmul": "mul", "truediv": "div", "neg": "neg"}
_COMPUTED = "rsub rtruediv pow rpow matmul eq ne lt le gt ge iter bool float".split()
for _name, _method in _RECORDED.items():
    setattr(DeferredLogits, f"__{_name}__", _calls_method(_method))
for _name in _COMPUTED:
    setattr(DeferredLogits, f"__{_name}__", _computes(f"__{_name}__"))
