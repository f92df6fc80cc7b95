"""A module that acts on each token alone, run in chunks of tokens. It saves only its input for the backward pass.

The backward pass runs each chunk again, so that the intermediate activations of one chunk exist at a time. Gradients of
weights are summed over chunks in fp32 (fp64 for fp64) and returned to autograd once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Callable, Iterator, Sequence

import torch
from torch.autograd.function import once_differentiable

from ds_cp.chunked.weight_versions import WeightVersions

Autocast = Callable[[], AbstractContextManager[Any]]
"""Creates a context manager that applies an autocast state."""


def run_in_chunks(
    module: torch.nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, chunk_tokens: int
) -> torch.Tensor:
    """``run(x)``, computed in chunks of tokens.

    Args:
        module: The module whose parameters ``run`` uses.
        run: Maps [n, H] to [n, H'], each token independently of the others and without random numbers.
        x: [..., H].
        chunk_tokens: Number of tokens per chunk.

    Returns:
        [..., H'].

    Raises:
        RuntimeError: In the backward pass, if the module's weights are no longer those of the forward pass.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    tokens, autocast = x.reshape(-1, x.size(-1)), current_autocast(x.device.type)
    out: torch.Tensor = _ChunkedModule.apply(tokens, module, run, chunk_tokens, autocast, *parameters)  # type: ignore[no-untyped-call]  # torch does not annotate apply
    return out.view(*x.shape[:-1], out.size(-1))


def current_autocast(device: str) -> Autocast:
    """The current autocast state, for the backward pass, which autograd runs without it."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype, enabled, cache_enabled=False)


class Gradients:
    """Sums of the gradients of some parameters over chunks, in fp32 or fp64."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[torch.Tensor | None] = [None] * len(parameters)

    def add(
        self, outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], *inputs: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """Run the backward pass of a chunk and add the gradients of the parameters.

        Args:
            outputs: Outputs of the chunk.
            grads: Their gradients.
            inputs: Inputs of the chunk.

        Returns:
            Gradients of ``inputs``, None for each that does not require grad.
        """
        with_graph = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        if not with_graph:
            return [None] * len(inputs)
        outputs, grads = zip(*with_graph)
        targets = [*(x for x in inputs if x.requires_grad), *self._parameters]
        computed = iter(torch.autograd.grad(outputs, targets, grads, allow_unused=True))
        input_grads = [next(computed) if x.requires_grad else None for x in inputs]
        for index, grad in enumerate(computed):
            total = self._sums[index]
            if grad is None:
                continue
            if total is None:
                # A copy, because autograd returns one tensor as the gradient of several parameters that are added up.
                self._sums[index] = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
            else:
                total.add_(grad)
        return input_grads

    def total(self) -> Iterator[torch.Tensor | None]:
        """Gradient of each parameter in the parameter's dtype, None for one that no chunk used."""
        for parameter, total in zip(self._parameters, self._sums):
            yield None if total is None else total.to(parameter.dtype)


class _ChunkedModule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        module: torch.nn.Module,
        run: Callable[[torch.Tensor], torch.Tensor],
        chunk_tokens: int,
        autocast: Autocast,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.module, ctx.weight_versions = module, WeightVersions(module)
        ctx.run, ctx.chunk_tokens, ctx.autocast, ctx.parameters = run, chunk_tokens, autocast, parameters
        ctx.save_for_backward(x)
        return torch.cat([run(chunk) for chunk in x.split(chunk_tokens)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.weight_versions.check(ctx.module, "its gradients")
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        gradients = Gradients(ctx.parameters)
        for start in range(0, x.size(0), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            chunk_x = x[chunk].detach().requires_grad_(grad_x is not None)
            with torch.enable_grad(), ctx.autocast():
                out = ctx.run(chunk_x)
            (grad_chunk,) = gradients.add([out], [grad[chunk]], chunk_x)
            if grad_x is not None:
                assert grad_chunk is not None, "the input of a chunk requires grad"
                grad_x[chunk] = grad_chunk
        return (grad_x, None, None, None, None, *gradients.total())
