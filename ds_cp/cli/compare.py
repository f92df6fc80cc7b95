"""Loss and gradients of a shared model beside those of one process: what ``ds_cp verify`` and the family sweep measure.

The one-process side is transformers alone: eager attention, fp64, each document of a packed row by itself. Gradients are
compared parameter by parameter, so that no rank holds more than the model's own.
"""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator

import torch

DOCUMENTS = (9, 1, 14, 13)
"""Lengths of a packed row's documents: odd, one of a single token."""

TOLERANCE = 1e-5
"""Relative to ``max(|g*|, 1e-3 |all g*|)`` per parameter, fp32. Where one process in fp32 is itself further off than
two thirds of this (fp64 being the truth), 1.5 times its own error."""

Inputs = dict[str, torch.Tensor]
Gradients = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Batch:
    """One batch, and what it holds as forwards of their own.

    Attributes:
        inputs: what the model is called with when it is shared.
        alone: the inputs of each document by itself, with the number of terms in its mean loss.
    """

    name: str
    inputs: Inputs
    alone: tuple[tuple[Inputs, int], ...]


def causal_lm_batches(model: torch.nn.Module, vocab: int) -> tuple[Batch, ...]:
    """A dense batch of two rows whose length divides nothing, and a packed row, with labels.

    Args:
        model: one process; it is asked whether its loss shifts the labels, and where its positions start.
        vocab: ids are drawn from [5, vocab - 10), clear of special tokens.
    """
    generator = torch.Generator().manual_seed(1)
    dense = torch.randint(5, vocab - 10, (2, 37), generator=generator)
    packed = torch.randint(5, vocab - 10, (1, sum(DOCUMENTS)), generator=generator)
    index = torch.cat([torch.arange(n) for n in DOCUMENTS]).unsqueeze(0)
    shifted = shifts_labels(model, dense[:1])
    labels = packed.masked_fill(index == 0, -100) if shifted else packed

    def alone(documents: Iterable[torch.Tensor]) -> tuple[tuple[Inputs, int], ...]:
        return tuple(({"input_ids": ids, "labels": ids}, ids.size(1) - shifted) for ids in documents)

    return (
        Batch("dense", {"input_ids": dense, "labels": dense}, alone(dense.split(1))),
        Batch(
            "packed",
            {"input_ids": packed, "labels": labels, "position_ids": index + first_position(model)},
            alone(packed.split(DOCUMENTS, dim=1)),
        ),
    )


def shifts_labels(model: torch.nn.Module, ids: torch.Tensor) -> bool:
    """Whether the model's loss predicts the next token: then a label on the first token alone counts for nothing."""
    first = torch.full_like(ids, -100)
    first[:, 0] = ids[:, 0]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=first).loss.item()
    return math.isnan(loss) or loss == 0


def first_position(model: torch.nn.Module) -> int:
    """Where a document's positions start by the model's own convention: behind its padding index in RoBERTa's kind."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return module.padding_idx + 1
    return 0


@dataclass(frozen=True)
class Truth:
    """What one process says of a model and a batch in fp64, and how far fp32 is from it.

    Attributes:
        loss, gradients: fp64; a parameter that got no gradient is missing.
        own_error: of one process in fp32.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    own_error: float = 0.0

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE, 1.5 * self.own_error) if math.isfinite(self.own_error) else TOLERANCE


@dataclass
class Errors:
    """Relative errors of the loss and of each parameter's gradient."""

    loss: float
    by_parameter: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        return max(self.loss, *self.by_parameter.values())


def one_process(model: torch.nn.Module, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean over all terms of all documents' losses, and its gradients, in the model's dtype."""
    model.zero_grad(set_to_none=True)
    total, terms = 0.0, 0
    for inputs, count in batch.alone:
        if count:
            total = total + model(**inputs).loss * count
            terms += count
    loss = total / terms
    loss.backward()
    return loss.item(), {n: p.grad.detach().double() for n, p in model.named_parameters() if p.grad is not None}


def truth(model: torch.nn.Module, batch: Batch, exactly: Callable[[], Any] | None = None) -> Truth:
    """One process on a batch.

    Args:
        model: fp32, eager attention; not changed.
        batch: what is compared.
        exactly: makes a context in which fp64 stays fp64 where the model's code would force fp32.
    """
    with (exactly or contextlib.nullcontext)():
        want = Truth(*one_process(copy.deepcopy(model).double(), batch))
    loss, gradients = one_process(copy.deepcopy(model), batch)
    return Truth(want.loss, want.gradients, errors(loss, gradients.items(), want).worst)


def shared(model: torch.nn.Module, batch: Batch) -> tuple[float, Iterator[tuple[str, torch.Tensor]]]:
    """The same on an attached model, on every rank of its group: the mean of the ranks' gradients, fp64, one by one.

    Every rank must go through the gradients; a rank on which a parameter got none counts as zeros.
    """
    model.zero_grad(set_to_none=True)
    loss = model(**batch.inputs).loss
    loss.backward()

    def mean() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            gradient = gradient.detach().double()
            torch.distributed.all_reduce(gradient)
            yield name, gradient / torch.distributed.get_world_size()

    return loss.item(), mean()


def errors(loss: float, gradients: Gradients, want: Truth) -> Errors:
    """What was found beside the truth; inf where a gradient of the truth was not found, or a number is NaN."""
    everything = torch.stack([g.norm() for g in want.gradients.values()]).norm().item()
    found = Errors(_or_inf(abs(loss - want.loss) / abs(want.loss)), dict.fromkeys(want.gradients, math.inf))
    for name, gradient in gradients:
        true = want.gradients.get(name)
        size = 0.0 if true is None else true.norm().item()
        difference = gradient if true is None else gradient - true
        found.by_parameter[name] = _or_inf(difference.norm().item() / max(size, 1e-3 * everything))
    return found


def _or_inf(error: float) -> float:
    """NaN is larger than nothing, so the largest of some errors would not show it."""
    return math.inf if math.isnan(error) else error
