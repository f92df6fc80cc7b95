"""A layer with attention, run in chunks of tokens. For the backward pass it saves its input and its attention output only.

Apart from attention, a layer acts on each token alone; context parallelism already relies on that. So the layer can run on a
chunk of tokens at a time if it runs twice on each chunk. The first run ends where attention is called, and stores K and V
(:mod:`ds_cp.attention.host_kv`). Once K and V of all tokens are stored, the second run computes the attention of the chunk's
queries and continues to the end of the layer. The backward pass does the same, with gradients in the second run. When it has
all gradients of K and V, it runs the first half once more to pass them on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
from torch.autograd.function import once_differentiable

from ds_cp import rng
from ds_cp.agreement import BatchError
from ds_cp.attention.attend import Positions, attend
from ds_cp.attention.host_kv import HostKV, QueryHeadsOnly
from ds_cp.attention.kernels import Kernel
from ds_cp.attention.saved_attention import SavedAttention
from ds_cp.attention.score import Score
from ds_cp.chunked.module import Autocast, Gradients, current_autocast
from ds_cp.chunked.weight_versions import WeightVersions
from ds_cp.layout import Run

MakeHostKV = Callable[[int], HostKV]
"""Creates the store of a layer's K and V, given the number of rows per block."""

RunLayer = Callable[[torch.Tensor, "LayerChunk", SavedAttention | None], torch.Tensor]
"""Runs a layer on the hidden states [B, n, H] of a chunk of tokens; returns [B, n, H']."""


class _AttentionReached(Exception):
    """Ends the first run of a layer on a chunk.

    Attributes:
        key: [B, h, n, d].
        value: [B, h, n, dv].
        make_host_kv: Creates the store for them.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, make_host_kv: MakeHostKV) -> None:
        super().__init__()
        self.key, self.value, self.make_host_kv = key, value, make_host_kv


@dataclass(eq=False)
class LayerChunk:
    """A chunk of this rank's tokens, while a layer runs on it.

    Attributes:
        tokens: Local indices of the tokens.
        host_kv: Store of K and V of all tokens; None in the first run.
        empty_kv: K and V without rows, which are inputs of the attention in the second run.
    """

    tokens: Run
    host_kv: HostKV | None = None
    empty_kv: Sequence[torch.Tensor] = ()

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        make_host_kv: MakeHostKV,
        kernel: Kernel,
        score: Score,
        positions: Positions,
        saved: SavedAttention | None,
    ) -> torch.Tensor:
        """Attention of the chunk's queries, [B, H, n, d]. The arguments are those of :func:`~ds_cp.attention.attend.attend`.

        Raises:
            _AttentionReached: In the first run.
            BatchError: The layer attends twice.
        """
        if self.host_kv is None:
            raise _AttentionReached(key, value, make_host_kv)
        if self.empty_kv:
            raise BatchError(
                'a layer attends twice, which "context_parallel.offload_kv" cannot run in chunks: the second attention would '
                "see the keys of the first. Take the key out."
            )
        exchange = self.host_kv.exchange(self.tokens)
        key, value = self.empty_kv = self.host_kv.empty_kv()
        heads = QueryHeadsOnly(self.host_kv.heads)
        return attend(query, key, value, lambda phase: exchange, kernel, score, positions, heads, saved)


def run_layer_in_chunks(
    module: torch.nn.Module,
    run: RunLayer,
    x: torch.Tensor,
    chunk_tokens: int,
    saved: SavedAttention | None,
) -> torch.Tensor:
    """Run a layer in chunks of tokens, with K and V in host memory.

    Args:
        module: The module whose parameters ``run`` uses.
        run: Runs the layer on a chunk. It must attend once.
        x: [B, L, H].
        chunk_tokens: Number of tokens per chunk, and of rows per block of K and V.
        saved: Where the layer's attention outputs are saved for the backward pass; None to recompute them.

    Returns:
        [B, L, H'].

    Raises:
        BatchError: The layer draws random numbers, attends twice or does not attend.
        RuntimeError: In the backward pass, if the layer's weights are no longer those of the forward pass.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not torch.is_grad_enabled():
        saved = None
    runner = _LayerRunner(module, run, x.size(1), chunk_tokens, saved, current_autocast(x.device.type))
    out: torch.Tensor = _ChunkedLayer.apply(x, runner, *parameters)  # type: ignore[no-untyped-call]  # torch does not annotate apply
    return out


@dataclass(eq=False)
class _LayerRunner:
    """Runs a layer, or the part of it before attention, on chunks of tokens.

    Attributes:
        module: The module whose parameters ``run`` uses.
        run: Runs the layer on a chunk.
        local_len: L, number of tokens.
        chunk_tokens: Number of tokens per chunk.
        saved: Where the layer's attention outputs are saved, if they are.
        autocast: The autocast state of the forward pass.
    """

    module: torch.nn.Module
    run: RunLayer
    local_len: int
    chunk_tokens: int
    saved: SavedAttention | None
    autocast: Autocast

    @property
    def chunks(self) -> list[Run]:
        starts = range(0, self.local_len, self.chunk_tokens)
        return [(start, min(start + self.chunk_tokens, self.local_len)) for start in starts]

    def store_kv(self, x: torch.Tensor, phase: str) -> HostKV:
        """Compute and store K and V of all tokens, and receive those of other ranks."""
        host_kv: HostKV | None = None
        for tokens in self.chunks:
            key, value, make_host_kv = self.run_until_attention(x[:, slice(*tokens)], tokens)
            host_kv = host_kv or make_host_kv(self.chunk_tokens)
            host_kv.put(tokens, key, value, phase)
        assert host_kv is not None, "a rank has at least one token"
        host_kv.receive(phase)
        return host_kv

    def run_until_attention(self, x: torch.Tensor, tokens: Run) -> tuple[torch.Tensor, torch.Tensor, MakeHostKV]:
        """The first run of the layer on a chunk: K, V, and what creates the store for them.

        Raises:
            BatchError: The layer does not attend.
        """
        try:
            with self.autocast():
                self.run(x, LayerChunk(tokens), self.saved)
        except _AttentionReached as reached:
            return reached.key, reached.value, reached.make_host_kv
        raise BatchError(
            'a layer does not attend to the shared sequence, and "context_parallel.offload_kv" runs layers by their '
            "attention. Take the key out."
        )

    def run_with_attention(self, x: torch.Tensor, tokens: Run, host_kv: HostKV) -> tuple[torch.Tensor, LayerChunk]:
        """The second run of the layer on a chunk: its output, and the chunk."""
        chunk = LayerChunk(tokens, host_kv)
        with self.autocast():
            return self.run(x, chunk, self.saved), chunk

    def saving(self) -> AbstractContextManager[None]:
        """Context of the second runs of a pass: the first pass saves attention outputs, the next one takes them."""
        return nullcontext() if self.saved is None else self.saved.run()


class _ChunkedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, runner: _LayerRunner, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.runner, ctx.parameters, ctx.weight_versions = runner, parameters, WeightVersions(runner.module)
        ctx.save_for_backward(x)
        rng_state = rng.state()
        host_kv = runner.store_kv(x, "forward")
        out: torch.Tensor | None = None
        with runner.saving():
            for tokens in runner.chunks:
                part, _ = runner.run_with_attention(x[:, slice(*tokens)], tokens, host_kv)
                if out is None:
                    out = x.new_empty((*x.shape[:2], *part.shape[2:]), dtype=part.dtype)
                out[:, slice(*tokens)] = part
        if rng.drawn_since(rng_state):
            raise BatchError(
                "a layer draws random numbers (dropout), and the backward pass, which runs it again, would draw others. Set "
                'its dropout to 0, or take "context_parallel.offload_kv" out; dropout of attention probabilities is fine.'
            )
        assert out is not None, "a rank has at least one token"
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        runner: _LayerRunner = ctx.runner
        ctx.weight_versions.check(runner.module, "its gradients")
        (x,) = ctx.saved_tensors
        gradients = Gradients(ctx.parameters)
        grad_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        host_kv = runner.store_kv(x, "backward")
        with runner.saving():
            for tokens in runner.chunks:
                chunk_x = _slice(x, tokens, requires_grad=grad_x is not None)
                with torch.enable_grad():
                    out, chunk = runner.run_with_attention(chunk_x, tokens, host_kv)
                # With empty_kv as an input the backward pass of attention, which computes dK and dV of all tokens, runs even if
                # the queries do not require grad.
                grad_chunk, _ = gradients.add([out], [grad[:, slice(*tokens)]], chunk_x, chunk.empty_kv[0])
                _add(grad_x, tokens, grad_chunk)
        host_kv.return_gradients()
        for tokens in runner.chunks:
            chunk_x = _slice(x, tokens, requires_grad=grad_x is not None)
            with torch.enable_grad():
                key, value, _ = runner.run_until_attention(chunk_x, tokens)
            (grad_chunk,) = gradients.add([key, value], host_kv.gradient(tokens), chunk_x)
            _add(grad_x, tokens, grad_chunk)
        return grad_x, None, *gradients.total()


def _slice(x: torch.Tensor, tokens: Run, requires_grad: bool) -> torch.Tensor:
    """The hidden states of a chunk, as a leaf of its graph."""
    return x[:, slice(*tokens)].detach().requires_grad_(requires_grad)


def _add(total: torch.Tensor | None, tokens: Run, part: torch.Tensor | None) -> None:
    if total is not None and part is not None:
        total[:, slice(*tokens)] += part
