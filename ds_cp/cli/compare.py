"""Loss and gradients of a shared model beside those of one process: what ``ds_cp verify`` and the family sweep measure.

The one-process side is transformers alone: eager attention, fp64, each document of a packed row by itself.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any, Callable

import torch

DOCUMENTS = (9, 1, 14, 13)
"""Lengths of a packed row's documents: odd, one of a single token."""

TOLERANCE = 1e-5
"""Relative to ``max(|g*|, 1e-3 |all g*|)`` per parameter, fp32. Where one process in fp32 is itself further off than
two thirds of this (fp64 being the truth), 1.5 times its own error."""

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """One batch, and the documents that it holds, each as its own forward's ids."""

    name: str
    inputs: dict[str, torch.Tensor]
    alone: tuple[torch.Tensor, ...]


def batches(vocab: int) -> tuple[Batch, ...]:
    """A dense batch of two rows whose length divides nothing, and a packed row."""
    generator = torch.Generator().manual_seed(1)
    dense = torch.randint(5, vocab - 10, (2, 37), generator=generator)
    packed = torch.randint(5, vocab - 10, (1, sum(DOCUMENTS)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS]).unsqueeze(0)
    labels = packed.masked_fill(positions == 0, -100)
    return (
        Batch("dense", {"input_ids": dense, "labels": dense}, tuple(dense.split(1))),
        Batch(
            "packed",
            {"input_ids": packed, "labels": labels, "position_ids": positions},
            packed.split(DOCUMENTS, dim=1),
        ),
    )


def one_process(model: torch.nn.Module, batch: Batch) -> tuple[float, Gradients]:
    """The sum of all documents' token losses over their number, and its gradients, in the model's dtype."""
    total, tokens = 0.0, 0
    model.zero_grad(set_to_none=True)
    for ids in batch.alone:
        if ids.size(1) > 1:
            total = total + model(input_ids=ids, labels=ids).loss * (ids.size(1) - 1)
            tokens += ids.size(1) - 1
    return backward(model, total / tokens)


def backward(model: torch.nn.Module, loss: torch.Tensor) -> tuple[float, Gradients]:
    """Backward, and the gradients by name, fp64."""
    loss.backward()
    return loss.item(), {n: p.grad.detach().double() for n, p in model.named_parameters() if p.grad is not None}


def shared(model: torch.nn.Module, batch: Batch) -> tuple[float, Gradients]:
    """The same on an attached model, on every rank of its group: the mean of the ranks' gradients."""
    model.zero_grad(set_to_none=True)
    loss, gradients = backward(model, model(**batch.inputs).loss)
    for gradient in gradients.values():
        torch.distributed.all_reduce(gradient)
        gradient /= torch.distributed.get_world_size()
    return loss, gradients


def error(got: tuple[float, Gradients], want: tuple[float, Gradients]) -> float:
    """The largest relative error of the loss and of each parameter's gradient; inf when a gradient is missing."""
    if got[1].keys() != want[1].keys():
        return float("inf")
    everything = torch.stack([g.norm() for g in want[1].values()]).norm()
    errors = [abs(got[0] - want[0]) / abs(want[0])]
    errors += [((got[1][n] - g).norm() / max(g.norm(), 1e-3 * everything)).item() for n, g in want[1].items()]
    return max(errors)


@dataclass(frozen=True)
class Truth:
    """What one process says of a model and a batch in fp64, and how far fp32 is from it."""

    want: tuple[float, Gradients]
    own_error: float

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE, 1.5 * self.own_error)


def truth(model: torch.nn.Module, batch: Batch, exactly: Callable[[], Any] | None = None) -> Truth:
    """One process on a batch.

    Args:
        model: fp32, eager attention; not changed.
        batch: what is compared.
        exactly: makes a context in which fp64 stays fp64 where the model's code would force fp32.
    """
    with (exactly or contextlib.nullcontext)():
        want = one_process(copy.deepcopy(model).double(), batch)
    return Truth(want, error(one_process(copy.deepcopy(model), batch), want))
