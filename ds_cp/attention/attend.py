"""Attention over a shared sequence, in four steps: exchange rows, kernel on tiles, merge by lse, dK and dV home.

Every method, layout and mask runs through here; they differ in the schedule and in the exchange, which are data. Where
heads are shared as well (ulysses), tokens are traded for heads before the four steps and back behind them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterator, NamedTuple, Sequence

import torch
from torch.autograd.function import once_differentiable

from ds_cp.attention.exchange import Exchange, InTurn, Pair, as_heads
from ds_cp.attention.kept import Kept
from ds_cp.attention.kernels import Kernel
from ds_cp.attention.merge import fold_in, merge, sink_gradient
from ds_cp.attention.score import Score, Where
from ds_cp.attention.sums import Piece, Sum, plan
from ds_cp.attention.ulysses import AllHeads, Heads
from ds_cp.mask.schedule import EVERYONE, Step, count

MakeExchange = Callable[[str], Exchange]
"""Makes an exchange for one pass, given the pass's name ("forward" or "backward")."""

Locate = Callable[[Step], tuple[torch.Tensor, torch.Tensor]]
"""Global positions of this rank's queries [L] and of the key rows [n] that arrive in a step."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    make_exchange: MakeExchange,
    kernel: Kernel,
    score: Score,
    locate: Locate | None = None,
    heads: Heads = AllHeads(),
    kept: Kept | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries over the group's keys.

    Args:
        query: [B, H, L, d], or with more channels than keys have, for terms and sinks that read them.
        key: [B, h, L, d], h divides H.
        value: [B, h, L, dv].
        make_exchange: how rows travel; its schedule holds the tiles.
        kernel: runs the tiles.
        score: what happens to q k^T before the softmax, for the heads that this rank computes.
        locate: needed where the score rule asks for positions.
        heads: how the ranks of the ulysses axis share heads.
        kept: of the checkpointed layer that this call is part of.

    Returns:
        [B, H, L, dv] in the query's dtype; rows that see no key are 0.
    """
    call = _Call(make_exchange, kernel, score, locate, heads, kept)
    entries = None if score.entries is None else score.entries.keys
    return _Attention.apply(query, key, value, entries, score.sinks, call, *score.tables)


class _Call(NamedTuple):
    """What has no gradient."""

    make_exchange: MakeExchange
    kernel: Kernel
    score: Score
    locate: Locate | None
    heads: Heads
    kept: Kept | None


class _Attention(torch.autograd.Function):
    """Trades tokens for heads and back, around the four steps.

    In a checkpointed layer (``call.kept``) everything is saved by tokens, for that is what the recomputation has without
    a message; the backward pass then trades all of it at once. Otherwise it is saved by heads. Entries and tables are
    arguments for their gradients only: the call holds them.
    """

    @staticmethod
    def forward(ctx, query, key, value, entries, sinks, call, *tables):
        ctx.call, ctx.dtypes, ctx.by_tokens = call, (query.dtype, key.dtype, value.dtype), call.kept is not None
        known = call.kept.take() if call.kept else None
        if known:
            out, lse = known
        else:
            q, k, v = call.heads.to_heads("forward", (query,), (key, value))
            out_of_heads, lse = _forward(q, k, v, sinks, call)
            (out,) = call.heads.to_tokens("forward", (out_of_heads,))
        if call.kept:
            call.kept.put(out, lse)
            ctx.save_for_backward(query, key, value, out, lse, sinks)
        else:
            ctx.save_for_backward(q, k, v, out_of_heads, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        heads = ctx.call.heads
        q, k, v, out, lse, sinks = ctx.saved_tensors
        if ctx.by_tokens:
            q, out, grad_out, k, v = heads.to_heads("backward", (q, out, grad_out), (k, v))
        else:
            (grad_out,) = heads.to_heads("backward", (grad_out,))
        grads, d_entries, d_tables = _backward(grad_out, q, k, v, out, lse, ctx.call)
        d_sinks = None if sinks is None else sink_gradient(grad_out, out, lse, sinks)
        dq, dk, dv = (grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes))
        return *heads.to_tokens("backward", (dq,), (dk, dv)), d_entries, d_sinks, None, *d_tables


def _forward(q, k, v, sinks, call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange, kernel, merge: (out in q's dtype, lse) over all keys."""
    exchange, precise = call.make_exchange("forward"), torch.promote_types(q.dtype, torch.float32)
    q, beside = _apart(q, k)
    pieces, queries, _ = plan(exchange.steps, call.kernel, q.device, q.size(0))
    out = Sum((*q.shape[:3], v.size(-1)), q, q.dtype if queries.alone else precise, queries.gaps)
    lse = Sum(q.shape[:3], q, precise, queries.gaps, fill=float("-inf"))
    for (step, k_rows, v_rows), of_step in zip(exchange.pieces(k, v), pieces):  # rows arrive
        for (work, q_at, k_at), score in _scored(of_step, step, call, beside):  # tiles of these rows
            part, part_lse = call.kernel.forward(q_at.of(q), k_at.of(k_rows), k_at.of(v_rows), work, score)
            if q_at.first:
                out.put(q_at, part)
                lse.put(q_at, part_lse)
            else:
                merge(q_at.of(out.total), q_at.of(lse.total), part, part_lse)
    sinks = beside[..., -1] if call.score.sinks_beside else sinks
    if sinks is not None:
        fold_in(out.total, lse.total, sinks)
    return out.total.to(q.dtype), lse.total


def _backward(
    grad_out, q, k, v, out, lse, call: _Call
) -> tuple[list[torch.Tensor], torch.Tensor | None, list[torch.Tensor]]:
    """Exchange, kernel, dK and dV home: (dq, dk, dv) in the accumulator's precision, and the gradients of entries and tables."""
    exchange, precise = call.make_exchange("backward"), lse.dtype
    q, beside = _apart(q, k)
    d_beside = None if beside is None else torch.zeros_like(beside, dtype=precise)
    pieces, queries, keys = plan(exchange.steps, call.kernel, q.device, q.size(0))
    d_tables = tuple(torch.zeros_like(table, dtype=precise) for table in call.score.tables)
    call = call._replace(score=replace(call.score, gradients=d_tables))
    dq = Sum(q.shape, q, q.dtype if queries.alone else precise, queries.gaps)
    own = tuple(Sum(x.shape, x, x.dtype if keys[0].alone else precise, keys[0].gaps) for x in (k, v))
    parcels = InTurn(2)  # one is filled while the one before is on its way
    for (step, k_rows, v_rows), of_step, covered in zip(exchange.pieces(k, v), pieces, keys):
        leaves = step is not exchange.steps[0]
        dk, dv = own
        if leaves:
            parcel = parcels.rows(q, (count(step.rows), *k.shape[:2], k.size(-1) + v.size(-1)), precise)
            dk, dv = (Sum(x.shape, x, precise, covered.gaps, total=x) for x in as_heads(parcel, k.size(-1)))
        for (work, q_at, k_at), score in _scored(of_step, step, call, beside, d_beside):
            parts = call.kernel.backward(
                q_at.of(grad_out), q_at.of(q), k_at.of(k_rows), k_at.of(v_rows), q_at.of(out), q_at.of(lse), work, score
            )
            for total, rows, part in zip((dq, dk, dv), (q_at, k_at, k_at), parts):
                total.add(rows, part)
        if leaves:
            exchange.send_home(step, parcel, _totals(own))
    d_entries = exchange.finish(_totals(own))
    if call.score.sinks_beside:
        d_beside[..., -1] = sink_gradient(grad_out, out, lse, beside[..., -1])
    d_query = dq.total if beside is None else torch.cat([dq.total, d_beside], dim=-1)
    d_tables = [grad.to(table.dtype) for grad, table in zip(d_tables, call.score.tables)]
    return [d_query, *_totals(own)], d_entries, d_tables


def _totals(sums: Sequence[Sum]) -> Pair:
    dk, dv = sums
    return dk.total, dv.total


def _apart(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The channels of queries that meet the keys, and those behind them, if there are any."""
    dim = k.size(-1)
    return (q, None) if q.size(-1) == dim else (q[..., :dim], q[..., dim:])


def _scored(
    pieces: Sequence[Piece],
    step: Step,
    call: _Call,
    beside: torch.Tensor | None,
    d_beside: torch.Tensor | None = None,
) -> Iterator[tuple[Piece, Score]]:
    """The calls of the kernel in a step, each with its score rule."""
    if not call.score.needs_positions:
        yield from ((piece, call.score) for piece in pieces)
    elif pieces:
        assert call.locate is not None, "a score rule by position needs positions"
        q_positions, k_positions = call.locate(step)
        score = call.score.of_entries() if step.source == EVERYONE else call.score
        for piece in pieces:
            batch, _, q_rows = piece.q.index
            channels = (None if x is None else piece.q.of(x) for x in (beside, d_beside))
            where = Where(batch, q_positions[q_rows], k_positions[piece.k.index[2]], *channels)
            yield piece, score.at(where)
