"""Attention over a sequence that is sharded across ranks, in four steps:

1. exchange: receive the K and V rows that this rank's queries need, step by step;
2. kernel: run attention on the tiles of each step;
3. merge: combine the tiles' results by their log-sum-exp;
4. in the backward pass, return dK and dV to the ranks that own the rows.

Layouts and masks differ in the schedule only (:mod:`ds_cp.mask.schedule`), which lists the rows and the tiles of each step;
methods also differ in the :class:`~ds_cp.attention.exchange.Exchange`, which moves the rows. With Ulysses, an all-to-all
before the four steps exchanges tokens for heads, and one after them exchanges heads for tokens.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from torch.autograd.function import once_differentiable

from ds_cp.attention.accumulate import Accumulator, KernelCall, kernel_calls
from ds_cp.attention.exchange import Exchange, RotatingBuffers, select_runs, unpack_rows
from ds_cp.attention.kernels import Kernel
from ds_cp.attention.merge import merge_partial_attention, merge_sinks, sink_gradient
from ds_cp.attention.saved_attention import SavedAttention
from ds_cp.attention.score import Score, TileCoordinates
from ds_cp.attention.ulysses import AllHeads, HeadSharding
from ds_cp.layout import total_length
from ds_cp.mask.schedule import REPLICATED, Step
from ds_cp.profiling import named_range

MakeExchange = Callable[[str], Exchange]
"""Makes the exchange of one pass, from its phase ("forward" or "backward")."""

Positions = Callable[[int], torch.Tensor]
"""Global positions of the tokens that a ring rank holds, int64 [tokens], in its local order."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    make_exchange: MakeExchange,
    kernel: Kernel,
    score: Score,
    positions: Positions | None = None,
    heads: HeadSharding = AllHeads(),
    saved: SavedAttention | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries over the keys of its context-parallel group.

    Args:
        query: [B, H, L, d]. Channels after the first d are per-query biases and sinks; they do not meet the keys.
        key: [B, h, L, d], with h dividing H.
        value: [B, h, L, dv].
        make_exchange: Makes the exchanges of the forward and of the backward pass, which hold the schedule.
        kernel: Kernel that runs the tiles.
        score: What is applied to q k^T before the softmax, for the query heads that this rank computes.
        positions: Positions of each ring rank's tokens; needed if ``score.needs_positions``.
        heads: How the ulysses group shares heads.
        saved: Saved attention of the checkpointed layer that this call is part of.

    Returns:
        [B, H, L, dv] in the query's dtype. A query that sees no key gets 0.
    """
    arguments = _Arguments(make_exchange, kernel, score, positions, heads, saved)
    compressed_kv = None if score.compressed_kv is None else score.compressed_kv.keys
    inputs = query, key, value, compressed_kv, score.sinks, arguments, *score.tables
    out: torch.Tensor = _Attention.apply(*inputs)  # type: ignore[no-untyped-call]  # torch does not annotate apply
    return out


class _Arguments(NamedTuple):
    """The arguments of :func:`attend` that are not differentiable."""

    make_exchange: MakeExchange
    kernel: Kernel
    score: Score
    positions: Positions | None
    heads: HeadSharding
    saved: SavedAttention | None


class _Gradients(NamedTuple):
    """Gradients of the differentiable inputs of :class:`_Attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    compressed_kv: torch.Tensor | None
    sinks: torch.Tensor | None
    tables: list[torch.Tensor]


class _Attention(torch.autograd.Function):
    """The four steps, between the all-to-alls of Ulysses.

    A checkpointed layer (``arguments.saved``) saves q, k, v and out before the exchange of tokens for heads, because its
    recomputation has them in that form without communication; the backward pass exchanges them in the all-to-all that
    grad_out needs anyway. Any other layer saves them after the exchange.

    ``compressed_kv`` and ``tables`` are inputs so that autograd takes their gradients; the forward pass reads them from the
    exchange and from the score rule.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        compressed_kv: torch.Tensor | None,
        sinks: torch.Tensor | None,
        arguments: _Arguments,
        *tables: torch.Tensor,
    ) -> torch.Tensor:
        heads, saved = arguments.heads, arguments.saved
        ctx.arguments, ctx.dtypes = arguments, (query.dtype, key.dtype, value.dtype)
        known = None if saved is None else saved.take()
        if known is not None:
            out, lse = known
        else:
            q, k, v = heads.to_heads("forward", (query,), (key, value))
            out_per_head, lse = _forward(q, k, v, sinks, arguments)
            (out,) = heads.to_tokens("forward", (out_per_head,))
        if saved is not None:
            saved.put(out, lse)
            ctx.save_for_backward(query, key, value, out, lse, sinks)
        else:
            ctx.save_for_backward(q, k, v, out_per_head, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        heads = ctx.arguments.heads
        q, k, v, out, lse, sinks = ctx.saved_tensors
        if ctx.arguments.saved:
            q, out, grad_out, k, v = heads.to_heads("backward", (q, out, grad_out), (k, v))
        else:
            (grad_out,) = heads.to_heads("backward", (grad_out,))
        grads = _backward(grad_out, q, k, v, out, lse, sinks, ctx.arguments)
        dq, dk, dv = (grad.to(dtype) for grad, dtype in zip(grads[:3], ctx.dtypes))
        d_query, d_key, d_value = heads.to_tokens("backward", (dq,), (dk, dv))
        return d_query, d_key, d_value, grads.compressed_kv, grads.sinks, None, *grads.tables


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, arguments: _Arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange, kernel, merge: out [B, H, n, dv] in q's dtype and lse [B, H, n] in fp32 or fp64, over the keys of all steps."""
    kernel, exchange = arguments.kernel, arguments.make_exchange("forward")
    q, extra = _split_extra_channels(q, k)
    calls, coverage, _ = kernel_calls(exchange.steps, kernel, q.device, q.size(0))
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    out_dtype = q.dtype if coverage.single_call else sum_dtype
    out = Accumulator((*q.shape[:3], v.size(-1)), q, out_dtype, coverage.has_gaps)
    lse = Accumulator(q.shape[:3], q, sum_dtype, coverage.has_gaps, fill=float("-inf"))

    for (step, k_step, v_step), step_calls in zip(exchange.received(k, v), calls):
        for call, tile_score, coordinates in _with_coordinates(step_calls, step, exchange.steps[0], arguments, extra):
            queries, keys = call.q, call.k
            with named_range("kernel"):
                tile_out, tile_lse = kernel.forward(
                    queries.view(q), keys.view(k_step), keys.view(v_step), call.work, tile_score, coordinates
                )
            if queries.first:
                out.put(queries, tile_out)
                lse.put(queries, tile_lse)
            else:
                with named_range("merge"):
                    merge_partial_attention(queries.view(out.total), queries.view(lse.total), tile_out, tile_lse)

    sinks = _sink_scores(sinks, extra, arguments.score)
    if sinks is not None:
        merge_sinks(out.total, lse.total, sinks)
    return out.total.to(q.dtype), lse.total


def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    arguments: _Arguments,
) -> _Gradients:
    """Exchange, kernel, return of dK and dV.

    ``out`` and ``lse`` are over the keys of all steps, so each tile gives its exact share of the gradients.
    """
    kernel, score, exchange = arguments.kernel, arguments.score, arguments.make_exchange("backward")
    own_step, sum_dtype = exchange.steps[0], lse.dtype
    q, extra = _split_extra_channels(q, k)
    d_extra = None if extra is None else torch.zeros_like(extra, dtype=sum_dtype)
    d_tables = tuple(torch.zeros_like(table, dtype=sum_dtype) for table in score.tables)

    calls, q_coverage, k_coverages = kernel_calls(exchange.steps, kernel, q.device, q.size(0))
    dq, own_dk, own_dv = (
        Accumulator(x.shape, x, x.dtype if coverage.single_call else sum_dtype, coverage.has_gaps)
        for x, coverage in ((q, q_coverage), (k, k_coverages[0]), (v, k_coverages[0]))
    )
    buffers = RotatingBuffers(2)  # one step's gradients are computed while those of the step before are sent

    for (step, k_step, v_step), step_calls, coverage in zip(exchange.received(k, v), calls, k_coverages):
        dk, dv = own_dk, own_dv
        if step is not own_step:  # sum up in the rows that are sent to their owner
            batch, kv_heads, n, dim = k_step.shape
            grad_rows = buffers.take(q, (n, batch, kv_heads, dim + v_step.size(-1)), sum_dtype)
            dk, dv = (Accumulator(x.shape, x, sum_dtype, coverage.has_gaps, out=x) for x in unpack_rows(grad_rows, dim))
        for call, tile_score, coordinates in _with_coordinates(
            step_calls, step, own_step, arguments, extra, d_extra, d_tables
        ):
            queries, keys = call.q, call.k
            with named_range("kernel"):
                dq_tile, dk_tile, dv_tile = kernel.backward(
                    queries.view(grad_out),
                    queries.view(q),
                    keys.view(k_step),
                    keys.view(v_step),
                    queries.view(out),
                    queries.view(lse),
                    call.work,
                    tile_score,
                    coordinates,
                )
            dq.add(queries, dq_tile)
            dk.add(keys, dk_tile)
            dv.add(keys, dv_tile)
        if step is not own_step:
            exchange.return_gradients(step, grad_rows, (own_dk.total, own_dv.total))
    d_compressed_kv = exchange.finish((own_dk.total, own_dv.total))

    sinks = _sink_scores(sinks, extra, score)
    d_sinks = None if sinks is None else sink_gradient(grad_out, out, lse, sinks)
    if d_extra is not None and d_sinks is not None and score.sinks_in_query:
        d_extra[..., -1], d_sinks = d_sinks, None
    return _Gradients(
        dq.total if d_extra is None else torch.cat([dq.total, d_extra], dim=-1),
        own_dk.total,
        own_dv.total,
        d_compressed_kv,
        d_sinks,
        [grad.to(table.dtype) for grad, table in zip(d_tables, score.tables)],
    )


def _split_extra_channels(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The channels of q that meet the keys, and those after them; None if there are none."""
    dim = k.size(-1)
    return (q, None) if q.size(-1) == dim else (q[..., :dim], q[..., dim:])


def _sink_scores(sinks: torch.Tensor | None, extra: torch.Tensor | None, score: Score) -> torch.Tensor | None:
    """Scores of the attention sinks: per head [H], or per query [B, H, n], the last extra channel; None without sinks."""
    if not score.sinks_in_query:
        return sinks
    assert extra is not None
    return extra[..., -1]


def _with_coordinates(
    calls: Sequence[KernelCall],
    step: Step,
    own_step: Step,
    arguments: _Arguments,
    extra: torch.Tensor | None,
    d_extra: torch.Tensor | None = None,
    d_tables: tuple[torch.Tensor, ...] = (),
) -> Iterator[tuple[KernelCall, Score, TileCoordinates | None]]:
    """Yields each kernel call of a step with its score rule and, if the rule needs positions, its tile's coordinates."""
    score = arguments.score
    if not score.needs_positions:
        for call in calls:
            yield call, score, None
    elif calls:
        assert arguments.positions is not None
        # step 0's rows are the queries, also of a chunk of a layer, which are some of the rank's own rows
        q_positions = select_runs(arguments.positions(own_step.source), own_step.rows)
        if step.source == REPLICATED:
            score = score.for_compressed_kv()
            k_positions = torch.arange(total_length(step.rows), device=q_positions.device)
        else:
            k_positions = select_runs(arguments.positions(step.source), step.rows)
        for call in calls:
            batch, _, query_rows = call.q.slices
            yield (
                call,
                score,
                TileCoordinates(
                    batch,
                    q_positions[query_rows],
                    k_positions[call.k.slices[2]],
                    None if extra is None else call.q.view(extra),
                    None if d_extra is None else call.q.view(d_extra),
                    d_tables,
                ),
            )
