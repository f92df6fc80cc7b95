"""Loss and gradients of a context-parallel model, compared with those of one process: for ``ds_cp verify`` and for tests.

The one process runs transformers alone: eager attention, fp64, each document of a packed row in a forward of its own.
Gradients are compared parameter by parameter, so that no rank holds more than the gradients of the model.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator

import torch

DOCUMENTS = (9, 1, 14, 13)
"""Lengths of the documents of a packed row: most of them odd, one of a single token."""

TOLERANCE = 1e-5
"""Largest relative error in fp32. The error of a parameter's gradient g is relative to ``max(|g|, 1e-3 |all gradients|)``,
both of the reference."""

OUTSIDE_LAYERS = "embeddings, head"
"""Kind of the parameters that belong to no decoder layer."""

Inputs = dict[str, torch.Tensor]
Gradients = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Batch:
    """A batch for the context-parallel model, and the same documents one by one for the reference.

    Attributes:
        name: Name of the batch in tables.
        inputs: Keyword arguments of the context-parallel model.
        per_document: For each document, the keyword arguments of the reference and the number of terms in its mean loss.
    """

    name: str
    inputs: Inputs
    per_document: tuple[tuple[Inputs, int], ...]


def causal_lm_batches(model: torch.nn.Module, vocab: int) -> tuple[Batch, ...]:
    """A dense batch of two rows whose length no number of ranks divides, and a packed row, both with labels.

    Args:
        model: The model in one process. It determines whether the loss shifts the labels, and the first position.
        vocab: Size of the vocabulary. Ids are in [5, vocab - 10), which leaves out special tokens.
    """
    generator = torch.Generator().manual_seed(1)
    dense = torch.randint(5, vocab - 10, (2, 37), generator=generator)
    packed = torch.randint(5, vocab - 10, (1, sum(DOCUMENTS)), generator=generator)
    index = torch.cat([torch.arange(n) for n in DOCUMENTS]).unsqueeze(0)
    shifted = shifts_labels(model, dense[:1])
    labels = packed.masked_fill(index == 0, -100) if shifted else packed

    def per_document(documents: Iterable[torch.Tensor]) -> tuple[tuple[Inputs, int], ...]:
        return tuple(({"input_ids": ids, "labels": ids}, ids.size(1) - shifted) for ids in documents)

    return (
        Batch("dense", {"input_ids": dense, "labels": dense}, per_document(dense.split(1))),
        Batch(
            "packed",
            {"input_ids": packed, "labels": labels, "position_ids": index + first_position(model)},
            per_document(packed.split(DOCUMENTS, dim=1)),
        ),
    )


def shifts_labels(model: torch.nn.Module, ids: torch.Tensor) -> bool:
    """Whether the model's loss predicts the next token: a label on the first token only then has no effect."""
    first = torch.full_like(ids, -100)
    first[:, 0] = ids[:, 0]
    with torch.no_grad():
        loss: float = model(input_ids=ids, labels=first).loss.item()
    return math.isnan(loss) or loss == 0


def first_position(model: torch.nn.Module) -> int:
    """The first position id of a document: 0, or the one after the padding index in models derived from RoBERTa."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            padding_idx = module.padding_idx
            assert isinstance(padding_idx, int)
            return padding_idx + 1
    return 0


@dataclass(frozen=True)
class Reference:
    """Loss and gradients of one process on a batch.

    Attributes:
        loss: Loss in fp64.
        gradients: Gradients in fp64 by parameter name, without the parameters that got none.
        fp32_error: Error of one process in fp32.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    fp32_error: float = 0.0

    @property
    def tolerance(self) -> float:
        """:data:`TOLERANCE`, or 1.5 times the error of one process in fp32 where that is larger."""
        return max(TOLERANCE, 1.5 * self.fp32_error) if math.isfinite(self.fp32_error) else TOLERANCE


@dataclass
class Errors:
    """Relative errors of the loss and of each parameter's gradient; :data:`TOLERANCE` defines the latter."""

    loss: float
    by_parameter: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        return max(self.loss, *self.by_parameter.values())


def one_process(model: torch.nn.Module, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean of the losses of all documents, weighted by their numbers of terms, and its gradients in fp64.

    The model runs in its own dtype.
    """
    model.zero_grad(set_to_none=True)
    total, terms = torch.zeros(()), 0
    for inputs, count in batch.per_document:
        if count:
            total = total + model(**inputs).loss * count
            terms += count
    loss = total / terms
    loss.backward()
    return loss.item(), {n: p.grad.detach().double() for n, p in model.named_parameters() if p.grad is not None}


def reference(
    model: torch.nn.Module, batch: Batch, keep_fp64: Callable[[], AbstractContextManager[object]] | None = None
) -> Reference:
    """Loss and gradients of one process on a batch.

    Args:
        model: Model in fp32 with eager attention. It is not changed.
        batch: The batch.
        keep_fp64: Returns a context in which the model's code does not cast fp64 to fp32.
    """
    with (keep_fp64 or contextlib.nullcontext)():
        exact = Reference(*one_process(copy.deepcopy(model).double(), batch))
    loss, gradients = one_process(copy.deepcopy(model), batch)
    return Reference(exact.loss, exact.gradients, errors(loss, gradients.items(), exact).worst)


def context_parallel(model: torch.nn.Module, batch: Batch) -> tuple[float, Iterator[tuple[str, torch.Tensor]]]:
    """Loss and gradients of an attached model on a batch, on every rank.

    Returns:
        (loss, iterator over the gradients by parameter name, in fp64, averaged over all ranks). The iterator communicates,
        so every rank must exhaust it. On a rank where a parameter got no gradient, zeros are averaged.
    """
    model.zero_grad(set_to_none=True)
    loss = model(**batch.inputs).loss
    loss.backward()

    def averaged() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            gradient = gradient.detach().double()
            torch.distributed.all_reduce(gradient)
            yield name, gradient / torch.distributed.get_world_size()

    return loss.item(), averaged()


def errors(loss: float, gradients: Gradients, expected: Reference) -> Errors:
    """Relative errors of a loss and gradients.

    An error is inf where a gradient of the reference is missing in ``gradients``, and where a value is NaN.
    """
    norm_of_all = torch.stack([g.norm() for g in expected.gradients.values()]).norm().item()
    loss_error = _nan_to_inf(abs(loss - expected.loss) / abs(expected.loss))
    result = Errors(loss_error, dict.fromkeys(expected.gradients, math.inf))
    for name, gradient in gradients:
        true_gradient = expected.gradients.get(name)
        norm = 0.0 if true_gradient is None else true_gradient.norm().item()
        difference = gradient if true_gradient is None else gradient - true_gradient
        result.by_parameter[name] = _nan_to_inf(difference.norm().item() / max(norm, 1e-3 * norm_of_all))
    return result


def _nan_to_inf(error: float) -> float:
    """Replace NaN, which ``max`` may skip, by inf."""
    return math.inf if math.isnan(error) else error


def layer_kinds(model: torch.nn.Module) -> dict[str, str]:
    """By parameter name, the kind of its layer: the entry in ``config.layer_types``, and whether the layer has experts."""
    model_config: Any = model.config
    layer_types = getattr(model_config.get_text_config(decoder=True), "layer_types", None) or ()
    kind_of_prefix: dict[str, str] = {}
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        layer = re.match(r".*?\.(\d+)\.", name)
        if layer:
            index = int(layer[1])
            kind = layer_types[index] if index < len(layer_types) else "layers"
            has_experts = any("expert" in other for other in names if other.startswith(layer[0]))
            kind_of_prefix[layer[0]] = kind + (", experts" if has_experts else "")
    return {
        name: next((kind for prefix, kind in kind_of_prefix.items() if name.startswith(prefix)), OUTSIDE_LAYERS)
        for name in names
    }
