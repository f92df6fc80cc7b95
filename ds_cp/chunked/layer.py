"""A layer that attends, run on a few tokens at a time: it keeps its input and its attention's output for the backward pass.

Whatever may be shared by tokens between ranks may be shared by tokens between tiles of one rank: all but attention looks
at one token. So a layer runs twice on each span of tokens. The first run stops where attention is called, and leaves K
and V (:mod:`ds_cp.attention.host_kv`); once all of them are there, the second run gets its attention and goes on to the
end. The backward pass does the same and then, when the gradients of K and V are home, takes them through the first half.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator, Sequence

import torch
from torch.autograd.function import once_differentiable

from ds_cp import rng
from ds_cp.agreement import BatchError
from ds_cp.attention.attend import Positions, attend
from ds_cp.attention.host_kv import HostKV, QueryHeadsOnly
from ds_cp.attention.kernels import Kernel
from ds_cp.attention.saved_attention import SavedAttention
from ds_cp.attention.score import Score
from ds_cp.chunked.module import Gradients, autocast_of
from ds_cp.chunked.weight_versions import WeightVersions
from ds_cp.layout import Run

MakeHostKV = Callable[[int], HostKV]
"""Makes the store of a layer's K and V, given the rows of a block."""

RunLayer = Callable[[torch.Tensor, "LayerChunk", SavedAttention | None], torch.Tensor]
"""Runs a layer on the hidden states [B, n, H] of a chunk of tokens, to [B, n, H']."""


class _AttentionReached(Exception):
    """The first run of a layer on a span ends here: (key, value, hold)."""


@dataclass(eq=False)
class LayerChunk:
    """Some tokens of this rank, while a layer runs on them.

    Attributes:
        tokens: which.
        host_kv: K and V of all tokens; None in the first run.
        nothing: what stands for K and V in the graph of the second run.
    """

    tokens: Run
    host_kv: HostKV | None = None
    nothing: Sequence[torch.Tensor] = ()

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
        """What :meth:`ds_cp.region.Region.attend` answers while a layer runs on a span; [B, H, n, d] as there."""
        if self.host_kv is None:
            raise _AttentionReached(key, value, make_host_kv)
        if self.nothing:
            raise BatchError(
                'a layer attends twice, which "context_parallel.offload_kv" cannot run in tiles: the second attention would '
                "see the keys of the first. Take the key out."
            )
        self.nothing, exchange = self.host_kv.empty_kv(), self.host_kv.exchange(self.tokens)
        heads = QueryHeadsOnly(self.host_kv.heads)
        return attend(query, *self.nothing, lambda phase: exchange, kernel, score, positions, heads, saved)


def run_layer_in_chunks(
    module: torch.nn.Module,
    run: RunLayer,
    x: torch.Tensor,
    block: int,
    saved: SavedAttention | None,
) -> torch.Tensor:
    """``run(x, all tokens)``, a few tokens at a time, with K and V in host memory.

    Args:
        module: whose parameters ``run`` uses.
        run: hidden states [B, n, H] of some tokens, and which they are, to [B, n, H']. It attends once.
        x: [B, L, H].
        block: tokens of a tile, and rows of a block of K and V.
        saved: where the attention's outputs wait for the backward pass; None to compute them again.

    Returns:
        [B, L, H'].

    Raises:
        BatchError: the layer draws random numbers, attends twice or not at all.
        RuntimeError: in the backward pass, if the layer's weights are no longer those of the forward pass.
    """
    parameters = [each for each in module.parameters() if each.requires_grad]
    if not torch.is_grad_enabled():
        saved = None
    return _ChunkedLayer.apply(x, _Layer(module, run, x.size(1), block, saved, autocast_of(x.device.type)), *parameters)


@dataclass(eq=False)
class _Layer:
    """What has no gradient."""

    module: torch.nn.Module
    run: RunLayer
    length: int
    block: int
    saved: SavedAttention | None
    autocast: Callable[[], AbstractContextManager]

    @property
    def spans(self) -> list[Run]:
        return [(start, min(start + self.block, self.length)) for start in range(0, self.length, self.block)]

    def make_host_kv(self, x: torch.Tensor, phase: str) -> HostKV:
        """K and V of all tokens."""
        host_kv = None
        for tokens in self.spans:
            key, value, make = self.until_attention(x[:, slice(*tokens)], tokens)
            host_kv = host_kv or make(self.block)
            host_kv.put(tokens, key, value, phase)
        host_kv.receive(phase)
        return host_kv

    def until_attention(self, x: torch.Tensor, tokens: Run) -> tuple[torch.Tensor, torch.Tensor, MakeHostKV]:
        """The first half of the layer on a chunk: K and V by tokens, and what makes their store."""
        try:
            with self.autocast():
                self.run(x, LayerChunk(tokens), self.saved)
        except _AttentionReached as reached:
            return reached.args
        raise BatchError(
            'a layer does not attend to the shared sequence, and "context_parallel.offload_kv" runs layers by their '
            "attention. Take the key out."
        )

    def through(self, x: torch.Tensor, tokens: Run, host_kv: HostKV) -> tuple[torch.Tensor, LayerChunk]:
        """The whole layer on a chunk."""
        chunk = LayerChunk(tokens, host_kv)
        with self.autocast():
            return self.run(x, chunk, self.saved), chunk

    @contextmanager
    def keeping(self) -> Iterator[None]:
        if self.saved is None:
            yield
        else:
            with self.saved.run():
                yield


class _ChunkedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer, *parameters):
        ctx.layer, ctx.parameters, ctx.weight_versions = layer, parameters, WeightVersions(layer.module)
        ctx.save_for_backward(x)
        before, out = rng.state(), None
        host_kv = layer.make_host_kv(x, "forward")
        with layer.keeping():
            for tokens in layer.spans:
                part, _ = layer.through(x[:, slice(*tokens)], tokens, host_kv)
                out = x.new_empty((*x.shape[:2], *part.shape[2:]), dtype=part.dtype) if out is None else out
                out[:, slice(*tokens)] = part
        if rng.drawn_since(before):
            raise BatchError(
                "a layer draws random numbers (dropout), and the backward pass, which runs it again, would draw others. Set "
                'its dropout to 0, or take "context_parallel.offload_kv" out; dropout of attention probabilities is fine.'
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.weight_versions.check(ctx.layer.module, "its gradients")
        (x,) = ctx.saved_tensors
        layer, gradients = ctx.layer, Gradients(ctx.parameters)
        of_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        host_kv = layer.make_host_kv(x, "backward")
        with layer.keeping():
            for tokens in layer.spans:
                leaf = _leaf(x, tokens, of_x)
                with torch.enable_grad():
                    out, span = layer.through(leaf, tokens, host_kv)
                of_leaf, _ = gradients.add([out], [grad[:, slice(*tokens)]], leaf, span.nothing[0])
                _add(of_x, tokens, of_leaf)
        host_kv.return_gradients()
        for tokens in layer.spans:
            leaf = _leaf(x, tokens, of_x)
            with torch.enable_grad():
                key, value, _ = layer.until_attention(leaf, tokens)
            _add(of_x, tokens, *gradients.add([key, value], host_kv.gradient(tokens), leaf))
        return of_x, None, *gradients.total()


def _leaf(x: torch.Tensor, tokens: Run, of_x: torch.Tensor | None) -> torch.Tensor:
    return x[:, slice(*tokens)].detach().requires_grad_(of_x is not None)


def _add(total: torch.Tensor | None, tokens: Run, part: torch.Tensor | None) -> None:
    if total is not None and part is not None:
        total[:, slice(*tokens)] += part
