"""Attention over a shared sequence, in four steps: exchange rows, kernel on tiles, merge by lse, dK and dV home.

Every method, layout and mask runs through here; they differ in the schedule, which is data, and in the exchange that
carries its rows. Where heads are shared as well (ulysses), tokens are traded for heads before the four steps and back
behind them.
"""

from __future__ import annotations

from typing import Callable, Iterator, NamedTuple, Sequence

import torch
from torch.autograd.function import once_differentiable

from ds_cp.attention.accumulate import Accumulator, KernelCall, kernel_calls
from ds_cp.attention.exchange import Exchange, Pair, RotatingBuffers, as_heads, select
from ds_cp.attention.kernels import Kernel
from ds_cp.attention.merge import merge_partial_attention, merge_sinks, sink_gradient
from ds_cp.attention.saved_attention import SavedAttention
from ds_cp.attention.score import Score, TileCoordinates
from ds_cp.attention.ulysses import AllHeads, HeadSharding
from ds_cp.mask.schedule import REPLICATED, Step, count
from ds_cp.profiling import named_range

MakeExchange = Callable[[str], Exchange]
"""Makes an exchange for one pass, given the pass's name ("forward" or "backward")."""

Positions = Callable[[int], torch.Tensor]
"""Global positions of the tokens that a rank of the ring holds, in its order."""


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
    """Attention of this rank's queries over the group's keys.

    Args:
        query: [B, H, L, d], or with more channels than keys have, for terms and sinks that read them.
        key: [B, h, L, d], h divides H.
        value: [B, h, L, dv].
        make_exchange: how rows travel; its schedule holds the tiles.
        kernel: runs the tiles.
        score: what happens to q k^T before the softmax, for the heads that this rank computes.
        positions: needed where the score rule asks for them.
        heads: how the ranks of the ulysses axis share heads.
        saved: of the checkpointed layer that this attention is part of.

    Returns:
        [B, H, L, dv] in the query's dtype; rows that see no key are 0.
    """
    args = _AttendArgs(make_exchange, kernel, score, positions, heads, saved)
    compressed_kv = None if score.compressed_kv is None else score.compressed_kv.keys
    return _Attention.apply(query, key, value, compressed_kv, score.sinks, args, *score.tables)


class _AttendArgs(NamedTuple):
    """What has no gradient: the arguments of :func:`attend`."""

    make_exchange: MakeExchange
    kernel: Kernel
    score: Score
    positions: Positions | None
    heads: HeadSharding
    saved: SavedAttention | None


class _Attention(torch.autograd.Function):
    """Trades tokens for heads and back, around the four steps.

    In a checkpointed layer (``args.saved``) everything is saved by tokens, for that is what the recomputation has without
    a message; the backward pass then trades all of it at once. Otherwise it is saved by heads. Entries and tables are
    arguments for their gradients only: the score rule holds them.
    """

    @staticmethod
    def forward(ctx, query, key, value, compressed_kv, sinks, args, *tables):
        ctx.args, ctx.dtypes, ctx.by_tokens = (
            args,
            (query.dtype, key.dtype, value.dtype),
            args.saved is not None,
        )
        known = args.saved.take() if args.saved else None
        if known:
            out, lse = known
        else:
            q, k, v = args.heads.to_heads("forward", (query,), (key, value))
            out_of_heads, lse = _forward(q, k, v, sinks, args)
            (out,) = args.heads.to_tokens("forward", (out_of_heads,))
        if args.saved:
            args.saved.put(out, lse)
            ctx.save_for_backward(query, key, value, out, lse, sinks)
        else:
            ctx.save_for_backward(q, k, v, out_of_heads, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        heads = ctx.args.heads
        q, k, v, out, lse, sinks = ctx.saved_tensors
        if ctx.by_tokens:
            q, out, grad_out, k, v = heads.to_heads("backward", (q, out, grad_out), (k, v))
        else:
            (grad_out,) = heads.to_heads("backward", (grad_out,))
        grads, d_compressed_kv, d_sinks, d_tables = _backward(grad_out, q, k, v, out, lse, sinks, ctx.args)
        dq, dk, dv = (grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes))
        return *heads.to_tokens("backward", (dq,), (dk, dv)), d_compressed_kv, d_sinks, None, *d_tables


def _forward(q, k, v, sinks, args: _AttendArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange, kernel, merge: (out in q's dtype, lse) over all keys."""
    exchange, precise = args.make_exchange("forward"), torch.promote_types(q.dtype, torch.float32)
    q, extra = _apart(q, k)
    calls, queries, _ = kernel_calls(exchange.steps, args.kernel, q.device, q.size(0))
    out = Accumulator((*q.shape[:3], v.size(-1)), q, q.dtype if queries.single_call else precise, queries.gaps)
    lse = Accumulator(q.shape[:3], q, precise, queries.gaps, fill=float("-inf"))
    for (step, k_rows, v_rows), of_step in zip(exchange.received(k, v), calls):  # rows arrive
        for (work, q_at, k_at), *rule in _scored(of_step, step, exchange.steps[0], args, extra):  # its tiles
            with named_range("kernel"):
                part, part_lse = args.kernel.forward(q_at.view(q), k_at.view(k_rows), k_at.view(v_rows), work, *rule)
            if q_at.first:
                out.put(q_at, part)
                lse.put(q_at, part_lse)
            else:
                with named_range("merge"):
                    merge_partial_attention(q_at.view(out.total), q_at.view(lse.total), part, part_lse)
    sinks = extra[..., -1] if args.score.sinks_in_query else sinks
    if sinks is not None:
        merge_sinks(out.total, lse.total, sinks)
    return out.total.to(q.dtype), lse.total


def _backward(
    grad_out, q, k, v, out, lse, sinks, args: _AttendArgs
) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
    """Exchange, kernel, dK and dV home: (dq, dk, dv) in the accumulator's precision, and the gradients of entries, sinks and
    tables."""
    exchange, precise = args.make_exchange("backward"), lse.dtype
    own_step = exchange.steps[0]
    q, extra = _apart(q, k)
    d_extra = None if extra is None else torch.zeros_like(extra, dtype=precise)
    calls, queries, keys = kernel_calls(exchange.steps, args.kernel, q.device, q.size(0))
    d_tables = tuple(torch.zeros_like(table, dtype=precise) for table in args.score.tables)
    dq = Accumulator(q.shape, q, q.dtype if queries.single_call else precise, queries.gaps)
    own = tuple(Accumulator(x.shape, x, x.dtype if keys[0].single_call else precise, keys[0].gaps) for x in (k, v))
    parcels = RotatingBuffers(2)  # one is filled while the one before is on its way
    for (step, k_rows, v_rows), of_step, covered in zip(exchange.received(k, v), calls, keys):
        dk, dv = own
        if step is not own_step:
            batch, heads, n, dim = k_rows.shape
            parcel = parcels.rows(q, (n, batch, heads, dim + v_rows.size(-1)), precise)
            dk, dv = (Accumulator(x.shape, x, precise, covered.gaps, total=x) for x in as_heads(parcel, dim))
        for (work, q_at, k_at), *rule in _scored(of_step, step, own_step, args, extra, d_extra, d_tables):
            rows = *(q_at.view(x) for x in (grad_out, q)), *(k_at.view(x) for x in (k_rows, v_rows))
            with named_range("kernel"):
                parts = args.kernel.backward(*rows, q_at.view(out), q_at.view(lse), work, *rule)
            for total, at, part in zip((dq, dk, dv), (q_at, k_at, k_at), parts):
                total.add(at, part)
        if step is not own_step:
            exchange.return_gradients(step, parcel, _totals(own))
    d_compressed_kv = exchange.finish(_totals(own))
    sinks = extra[..., -1] if args.score.sinks_in_query else sinks
    d_sinks = None if sinks is None else sink_gradient(grad_out, out, lse, sinks)
    if args.score.sinks_in_query:
        d_extra[..., -1], d_sinks = d_sinks, None
    d_query = dq.total if extra is None else torch.cat([dq.total, d_extra], dim=-1)
    d_tables = [grad.to(table.dtype) for grad, table in zip(d_tables, args.score.tables)]
    return [d_query, *_totals(own)], d_compressed_kv, d_sinks, d_tables


def _totals(sums: Sequence[Accumulator]) -> Pair:
    dk, dv = sums
    return dk.total, dv.total


def _apart(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The channels of queries that meet the keys, and those behind them, if there are any."""
    dim = k.size(-1)
    return (q, None) if q.size(-1) == dim else (q[..., :dim], q[..., dim:])


def _scored(
    calls: Sequence[KernelCall],
    step: Step,
    own: Step,
    args: _AttendArgs,
    extra: torch.Tensor | None,
    d_extra: torch.Tensor | None = None,
    d_tables: tuple[torch.Tensor, ...] = (),
) -> Iterator[tuple[KernelCall, Score, TileCoordinates | None]]:
    """The calls of the kernel in a step, each with its score rule and, if that asks for it, where its tiles are."""
    if not args.score.needs_positions:
        yield from ((call, args.score, None) for call in calls)
    elif calls:
        score, q_positions = args.score, select(args.positions(own.source), own.rows)
        if step.source == REPLICATED:
            score, k_positions = score.for_compressed_kv(), torch.arange(count(step.rows), device=q_positions.device)
        else:
            k_positions = select(args.positions(step.source), step.rows)
        for call in calls:
            batch, _, q_rows = call.q.index
            channels = (None if x is None else call.q.view(x) for x in (extra, d_extra))
            yield (
                call,
                score,
                TileCoordinates(batch, q_positions[q_rows], k_positions[call.k.index[2]], *channels, d_tables),
            )
