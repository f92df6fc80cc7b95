"""Collectives with their adjoints, as autograd functions.

All ranks of a context-parallel group return the same loss, and the backward pass differentiates the *sum* of these equal
losses: the adjoint of an all-gather is a reduce-scatter, that of an all-reduce is an all-reduce. DeepSpeed then averages
gradients over the world, which divides by the number of summed losses, so no scale factor is needed, neither for sharded nor
for replicated parts of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ds_cp.layout import Layout
from ds_cp.process_group import Group


def gather_sequence(local: torch.Tensor, layout: Layout, group: Group, dim: int = 1) -> torch.Tensor:
    """All ranks' tokens in global order, without padding: ``[..., L, ...] -> [..., S, ...]``. Adjoint: reduce-scatter."""
    full: torch.Tensor = _GatherSequence.apply(local, layout, group, dim % local.dim())  # type: ignore[no-untyped-call]  # torch does not annotate apply
    return full


def all_reduce(value: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group, on every rank. Adjoint: all-reduce."""
    total: torch.Tensor = _AllReduce.apply(value, group)  # type: ignore[no-untyped-call]  # torch does not annotate apply
    return total


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, layout: Layout, group: Group, dim: int) -> torch.Tensor:
        ctx.layout, ctx.group, ctx.dim = layout, group, dim
        gathered = group.all_gather(local.movedim(dim, 0), "gather hidden states")
        index = layout.unshard_index_on(local.device)
        return gathered.flatten(0, 1).index_select(0, index).movedim(0, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        layout, group = ctx.layout, ctx.group
        grad = grad.movedim(ctx.dim, 0)
        shards = grad.new_zeros((group.size * layout.local_len, *grad.shape[1:]))
        shards.index_copy_(0, layout.unshard_index_on(grad.device), grad)
        shard = group.reduce_scatter(shards.unflatten(0, (group.size, layout.local_len)), "scatter hidden states")
        return shard.movedim(0, ctx.dim), None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return group.all_reduce(value, "reduce a sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.all_reduce(grad, "reduce a gradient"), None
