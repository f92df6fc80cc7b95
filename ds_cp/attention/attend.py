"""Attention over a shared sequence, in four steps: exchange rows, kernel on tiles, merge by lse, dK and dV home.

Every method, layout and mask runs through here; they differ in the schedule and in the exchange, which are data.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterator

import torch
from torch.autograd.function import once_differentiable

from ds_cp.attention.exchange import Exchange
from ds_cp.attention.kernels import Kernel, Work, work
from ds_cp.attention.merge import fold_in, merge, sink_gradient
from ds_cp.attention.score import Score, Where
from ds_cp.mask import Step

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
) -> torch.Tensor:
    """Attention of this rank's queries over the group's keys.

    Args:
        query: [B, H, L, d].
        key: [B, h, L, d], h divides H.
        value: [B, h, L, dv].
        make_exchange: how rows travel; its schedule holds the tiles.
        kernel: runs the tiles.
        score: what happens to q k^T before the softmax.
        locate: needed where the score rule asks for positions.

    Returns:
        [B, H, L, dv] in the query's dtype; rows that see no key are 0.
    """
    return _Attention.apply(query, key, value, score.sinks, make_exchange, kernel, score, locate, *score.tables)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, make_exchange, kernel, score, locate, *tables):
        batch, heads, length, _ = query.shape
        precise = torch.promote_types(query.dtype, torch.float32)
        # [B, L, H, dv] underneath, so that the model's transpose back is free
        out = query.new_zeros((batch, length, heads, value.size(-1)), dtype=precise).transpose(1, 2)
        lse = query.new_full((batch, heads, length), float("-inf"), dtype=precise)
        own = _as_rows(key, value)
        for step, rows in make_exchange("forward").pieces(own):
            k, v = _as_heads(rows, key.size(-1))
            for tile, rule in _work(step, kernel, score, locate, query.device):
                q_index, k_index = _indices(tile)
                part, part_lse = kernel.forward(query[q_index], k[k_index], v[k_index], tile, rule)
                merge(out[q_index], lse[q_index[:3]], part, part_lse)
        if sinks is not None:
            fold_in(out, lse, sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, own, sinks, out, lse)
        ctx.key_dim, ctx.dtypes = key.size(-1), (query.dtype, key.dtype, value.dtype)
        ctx.make_exchange, ctx.kernel, ctx.score, ctx.locate = make_exchange, kernel, score, locate
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        query, own, sinks, out, lse = ctx.saved_tensors
        kernel, exchange = ctx.kernel, ctx.make_exchange("backward")
        d_tables = tuple(torch.zeros_like(table, dtype=lse.dtype) for table in ctx.score.tables)
        score = replace(ctx.score, gradients=d_tables)
        dq = torch.zeros_like(query, dtype=lse.dtype)
        home = torch.zeros_like(own, dtype=lse.dtype)
        for step, rows in exchange.pieces(own):
            k, v = _as_heads(rows, ctx.key_dim)
            grad_rows = home if rows is own else torch.zeros_like(rows, dtype=lse.dtype)
            dk, dv = _as_heads(grad_rows, ctx.key_dim)
            for tile, rule in _work(step, kernel, score, ctx.locate, query.device):
                q_index, k_index = _indices(tile)
                parts = kernel.backward(
                    grad_out[q_index], query[q_index], k[k_index], v[k_index], out[q_index], lse[q_index[:3]],
                    tile, rule,
                )  # fmt: skip
                for total, index, part in zip((dq, dk, dv), (q_index, k_index, k_index), parts):
                    total[index] += part
            if rows is not own:
                exchange.send_home(step, grad_rows, home)
        exchange.finish(home)
        d_sinks = None if sinks is None else sink_gradient(grad_out, out, lse, sinks)
        grads = [grad.to(dtype) for grad, dtype in zip((dq, *_as_heads(home, ctx.key_dim)), ctx.dtypes)]
        d_tables = (grad.to(table.dtype) for grad, table in zip(d_tables, score.tables))
        return *grads, d_sinks, None, None, None, None, *d_tables


def _work(
    step: Step, kernel: Kernel, score: Score, locate: Locate | None, device: torch.device
) -> Iterator[tuple[Work, Score]]:
    """The tiles of a step as the kernel wants them, each with its score rule."""
    if score.needs_positions:
        assert locate is not None, "a score rule by position needs positions"
        q_positions, k_positions = locate(step)
    for piece in work(step, kernel, device):
        if not score.needs_positions:
            yield piece, score
            continue
        batch = slice(piece.batch_start, piece.batch_stop)
        q, k = q_positions[piece.q_start : piece.q_stop], k_positions[piece.k_start : piece.k_stop]
        yield piece, score.at(Where(batch, q, k))


def _as_rows(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[B, h, L, d] and [B, h, L, dv] as one [L, B, h, d + dv]: any run of rows is contiguous and travels as it is."""
    return torch.cat((key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)), dim=-1)


def _as_heads(rows: torch.Tensor, key_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The views [B, h, n, d] and [B, h, n, dv] of rows [n, B, h, d + dv]."""
    heads = rows.permute(1, 2, 0, 3)
    return heads[..., :key_dim], heads[..., key_dim:]


def _indices(tile: Work) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    batch = slice(tile.batch_start, tile.batch_stop)
    return (
        (batch, slice(None), slice(tile.q_start, tile.q_stop)),
        (batch, slice(None), slice(tile.k_start, tile.k_stop)),
    )
