"""Collectives with their true adjoints, as autograd functions.

The model returns the group's loss on every rank, and the backward pass differentiates the *sum* of these equal losses:
an all-gather's adjoint is a reduce-scatter, an all-reduce's an all-reduce. DeepSpeed then
takes the mean over the world, which undoes the sum: no factor stands anywhere, for sharded and replicated parts alike.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from ds_cp.layout import Layout
from ds_cp.mesh import Group


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: torch.Tensor, layout: Layout, group: Group, dim: int) -> torch.Tensor:
        ctx.layout, ctx.group, ctx.dim = layout, group, dim
        gathered = group.all_gather(local.movedim(dim, 0), "gather hidden states")
        index = layout.unshard_index_on(local.device)
        return gathered.flatten(0, 1).index_select(0, index).movedim(0, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        layout, group = ctx.layout, ctx.group
        grad = grad.movedim(ctx.dim, 0)
        shards = grad.new_zeros((group.size * layout.local_len, *grad.shape[1:]))
        shards.index_copy_(0, layout.unshard_index_on(grad.device), grad)
        part = group.reduce_scatter(shards.unflatten(0, (group.size, layout.local_len)), "scatter hidden states")
        return part.movedim(0, ctx.dim), None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return group.all_reduce(value, "reduce a sum")

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        return ctx.group.all_reduce(grad, "reduce a gradient"), None


def gather_sequence(local: torch.Tensor, layout: Layout, group: Group, dim: int = 1) -> torch.Tensor:
    """All ranks' tokens in global order, padding removed: ``[..., L, ...] -> [..., S, ...]``. Adjoint: reduce-scatter."""
    return _GatherSequence.apply(local, layout, group, dim % local.dim())


def all_reduce(value: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the group, on every rank. Adjoint: all-reduce."""
    return _AllReduce.apply(value, group)
