"""The all-to-all of Ulysses for functions other than attention: exchanges some tokens of all channels for all tokens of some.

A recurrence or a short convolution mixes the tokens of one head or one channel. So each rank runs the model's own function on
the whole sequence for its part of the heads, and the result is sent back to the ranks that hold the tokens. It takes one
all-to-all each way over the context-parallel group, and is exact for every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Callable, Mapping, Sequence

import torch
from torch.autograd.function import once_differentiable

from ds_cp.agreement import BatchError
from ds_cp.layout import Layout, Run
from ds_cp.process_group import Group
from ds_cp.recurrent.per_document import PerDocument

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class ChannelSplit:
    """Which heads each rank computes, and which groups it needs for them. A channel is a head of size 1.

    A *group* serves several heads: Mamba-2's B and C, for example, have fewer groups than the states have heads.

    Attributes:
        heads: Range of heads of each rank. Ranges are disjoint; some may be empty.
        groups: Range of repeated groups of each rank. Each group serves equally many of the rank's heads. Ranges may overlap.
        repeat: How often each group is repeated before it is split.
    """

    heads: tuple[Run, ...]
    groups: tuple[Run, ...]
    repeat: int

    @staticmethod
    @cache
    def plan(heads: int, groups: int, ranks: int) -> "ChannelSplit":
        """Plan a split that is as even as possible.

        Heads are split as evenly as possible if each rank's heads then lie in one group or fill whole groups. Otherwise whole
        groups are split, if there are at least as many as ranks. Otherwise groups are repeated by the least factor with which
        one of the two is possible.
        """
        if heads % groups:
            raise ValueError(f"{heads} heads are no multiple of {groups} groups")
        for repeat in (factor for factor in range(1, heads // groups + 1) if heads // groups % factor == 0):
            group_size = heads // groups // repeat
            for unit in (1, group_size):
                units = heads // unit
                split = tuple(pairwise(unit * (units * rank // ranks) for rank in range(ranks + 1)))
                if all(_is_even(part, group_size) for part in split) and (unit == 1 or units >= ranks):
                    return ChannelSplit(split, tuple(_groups_of(part, group_size) for part in split), repeat)
        raise AssertionError("with one head per group every split is even")


def _is_even(heads: Run, group_size: int) -> bool:
    """Whether a range of heads fills whole groups, or lies in one group."""
    start, stop = heads
    return not (start % group_size or stop % group_size) or start // group_size == (stop - 1) // group_size


def _groups_of(heads: Run, group_size: int) -> Run:
    start, stop = heads
    return (start // group_size, -(-stop // group_size)) if start < stop else (0, 0)


@dataclass(frozen=True)
class HeadExchange:
    """Exchanges tokens for heads, and back, for several tensors in one all-to-all. The two directions are adjoint.

    Attributes:
        layout: Layout of the sequence.
        group: Context-parallel group.
        ranges: For each tensor the range of heads of each rank.
        sizes: For each tensor the total number of heads.
    """

    layout: Layout
    group: Group
    ranges: tuple[tuple[Run, ...], ...]
    sizes: tuple[int, ...]

    def to_heads(self, tensors: Tensors, phase: str) -> list[torch.Tensor]:
        """[B, L, heads, d] each to [B, S, heads of this rank, d]."""
        batch, length = tensors[0].shape[:2]
        messages, counts = [], []
        for rank in range(self.group.size):
            of_rank = [x[:, :, slice(*ranges[rank])] for x, ranges in zip(tensors, self.ranges)]
            messages.append(_pack_bytes(of_rank).flatten())
            counts.append(messages[-1].numel())
        received = self.group.all_to_all(
            torch.cat(messages), counts, [counts[self.group.rank]] * self.group.size, f"{phase} states"
        )
        index = self.layout.unshard_index_on(received.device)
        rows = received.view(self.group.size * length, batch, -1).index_select(0, index)
        return _unpack_bytes(rows, tensors, [ranges[self.group.rank] for ranges in self.ranges])

    def to_tokens(self, tensors: Tensors, phase: str) -> list[torch.Tensor]:
        """[B, S, heads of this rank, d] each to [B, L, heads, d].

        Values of a head that several ranks have are summed. Values of padding are 0.
        """
        rows, length = _pack_bytes(tensors), self.layout.local_len
        batch = rows.size(1)
        shards = rows.new_zeros((self.group.size * length, *rows.shape[1:]))
        shards.index_copy_(0, self.layout.unshard_index_on(rows.device), rows)
        bytes_per_token = [
            sum((stop - start) * x.size(-1) * x.element_size() for x, (start, stop) in zip(tensors, ranges))
            for ranges in zip(*self.ranges)
        ]
        counts = [length * batch * width for width in bytes_per_token]
        received = self.group.all_to_all(
            shards.flatten(), [counts[self.group.rank]] * self.group.size, counts, f"{phase} states"
        )
        totals = []
        for x, ranges, size in zip(tensors, self.ranges, self.sizes):
            disjoint = sum(stop - start for start, stop in ranges) == size
            dtype = x.dtype if disjoint else torch.promote_types(x.dtype, torch.float32)  # sums are rounded once
            totals.append(x.new_zeros((batch, length, size, x.size(-1)), dtype=dtype))
        for rank, message in enumerate(received.split(counts)):
            of_rank = [ranges[rank] for ranges in self.ranges]
            parts = _unpack_bytes(message.view(length, batch, -1), tensors, of_rank)
            for total, heads, part in zip(totals, of_rank, parts, strict=True):
                total[:, :, slice(*heads)] += part
        return [total.to(x.dtype) for total, x in zip(totals, tensors)]


def _pack_bytes(tensors: Tensors) -> torch.Tensor:
    """[B, n, heads, d] of any dtypes as one row of bytes per token, uint8 [n, B, width].

    The dtypes may differ: decays are in fp32, values in bf16.
    """
    return torch.cat([x.transpose(0, 1).flatten(2).contiguous().view(torch.uint8) for x in tensors], dim=-1)


def _unpack_bytes(rows: torch.Tensor, like: Tensors, ranges: Sequence[Run]) -> list[torch.Tensor]:
    """The inverse of :func:`_pack_bytes`.

    Args:
        rows: uint8 [n, B, width].
        like: Tensors with the dtypes and the last dims of the result.
        ranges: Ranges of heads in the rows, one per tensor.
    """
    shapes = [(stop - start, x.size(-1)) for x, (start, stop) in zip(like, ranges)]
    parts = rows.split([heads * dim * x.element_size() for x, (heads, dim) in zip(like, shapes)], dim=-1)
    return [
        _view_as(part, x.dtype).view(*part.shape[:2], *shape).transpose(0, 1)
        for x, part, shape in zip(like, parts, shapes)
    ]


def _view_as(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Some bytes of each row as numbers, flat. Copies them if they do not start where a number of the dtype can start."""
    flat = part.reshape(-1)
    return (flat.clone() if flat.storage_offset() % dtype.itemsize else flat).view(dtype)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.to_heads(tensors, "forward"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.exchange.to_tokens(gradients, "backward")


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, out: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.to_tokens([out], "forward")[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.exchange.to_heads([gradient], "backward")


def mix(
    function: Callable[..., torch.Tensor],
    arguments: Mapping[str, Any],
    dims: Mapping[str, str],
    out_dims: str,
    layout: Layout,
    group: Group,
    per_document: PerDocument,
) -> torch.Tensor:
    """Run a function that mixes the tokens of each head over the whole sequence, each document separately.

    Args:
        function: A causal function that takes ``arguments`` as keyword arguments.
        arguments: Its arguments, with tensors of this rank's tokens.
        dims: For each tensor argument its dims, one letter each: b batch, l tokens, h heads, g groups of heads. Other letters
            are dims that are not split. A tensor without l is a weight. A tensor with l, but without h and g, is shared by all
            heads.
        out_dims: Dims of the result.
        layout: Layout of the sequence.
        group: Context-parallel group.
        per_document: How the function runs on each document.

    Returns:
        The function's result for this rank's tokens.

    Raises:
        BatchError: An argument is a tensor, but not in ``dims``.
    """
    present = {name: letters for name, letters in dims.items() if isinstance(arguments.get(name), torch.Tensor)}
    unknown = [name for name, x in arguments.items() if isinstance(x, torch.Tensor) and name not in present]
    if unknown:
        raise BatchError(
            f"{function.__name__} gets {', '.join(unknown)}, of which ds_cp does not know what belongs to which token: each rank "
            "would start from it at its own shard. Leave it out."
        )
    per_token = {name: letters for name, letters in present.items() if "l" in letters}
    weights = {name: letters for name, letters in present.items() if "l" not in letters}

    heads, groups = _size(arguments, present, "h"), _size(arguments, present, "g")
    assert heads is not None, "some argument has a dim of heads"
    shared_by_all_heads = any(not {"h", "g"} & {*letters} for letters in per_token.values())
    split = ChannelSplit.plan(heads, groups or (1 if shared_by_all_heads else heads), group.size)
    own_heads = split.heads[group.rank]

    tensors = [_to_canonical(arguments[name], letters) for name, letters in per_token.items()]
    has_heads = ["h" in letters for letters in per_token.values()]
    if split.repeat > 1:
        tensors = [x if h else x.repeat_interleave(split.repeat, 2) for x, h in zip(tensors, has_heads)]
    ranges = tuple(split.heads if h else split.groups for h in has_heads)
    to_heads = HeadExchange(layout, group, ranges, tuple(x.size(2) for x in tensors))
    sequences: tuple[torch.Tensor, ...] = _ToHeads.apply(to_heads, *tensors)  # type: ignore[no-untyped-call]  # torch does not annotate apply

    def run(heads: Run, tensors: Tensors) -> torch.Tensor:
        """The function on tensors [n, m, heads or groups of this rank, d]."""
        weight_parts = {name: _heads_of(arguments[name], letters, heads) for name, letters in weights.items()}
        inputs = {
            name: _from_canonical(x, letters).contiguous() for (name, letters), x in zip(per_token.items(), tensors)
        }
        return _to_canonical(function(**{**arguments, **weight_parts, **inputs}), out_dims)

    if own_heads[0] < own_heads[1]:
        (out,) = per_document.run(lambda *parts: [run(own_heads, parts)], *sequences)
    else:
        no_weights = [_heads_of(arguments[name], letters, own_heads) for name, letters in weights.items()]
        out = _without_heads(run, sequences, no_weights)
    to_tokens = HeadExchange(layout, group, (split.heads,), (heads,))
    local_out: torch.Tensor = _ToTokens.apply(to_tokens, out)  # type: ignore[no-untyped-call]  # torch does not annotate apply
    return _from_canonical(local_out, out_dims)


def _without_heads(run: Callable[[Run, Tensors], torch.Tensor], sequences: Tensors, weights: Tensors) -> torch.Tensor:
    """The result of a rank that has no heads: [B, S, 0, d].

    It is connected to all inputs in the autograd graph, so that the rank takes part in each collective of the backward pass and
    its weights get gradients.
    """
    with torch.no_grad():
        like = run((0, 1), [x.new_zeros((1, 1, 1, x.size(-1))) for x in sequences])  # for d and dtype
    zero = torch.stack([x.sum().to(like.dtype) for x in (*sequences, *weights)]).sum()
    return zero + like.new_zeros((*sequences[0].shape[:2], 0, like.size(-1)))


def _heads_of(weight: torch.Tensor, dims: str, heads: Run) -> torch.Tensor:
    return weight.narrow(dims.index("h"), heads[0], heads[1] - heads[0])


def _size(arguments: Mapping[str, Any], dims: Mapping[str, str], letter: str) -> int | None:
    """Size of the dim with a letter, None if no argument has it."""
    return next((arguments[name].size(at) for name, letters in dims.items() if (at := letters.find(letter)) >= 0), None)


def _to_canonical(x: torch.Tensor, dims: str) -> torch.Tensor:
    """Permute a tensor to [B, L, heads, d]. Dims of heads and channels that it does not have get size 1."""
    order = [dims.index("b"), dims.index("l")]
    order += [at for at, letter in enumerate(dims) if letter in "hg"]
    x = x.permute(*order, *(at for at in range(x.dim()) if at not in order))
    x = x if len(order) == 3 else x.unsqueeze(2)
    return x if x.dim() == 4 else x.unsqueeze(-1)


def _from_canonical(x: torch.Tensor, dims: str) -> torch.Tensor:
    """The inverse of :func:`_to_canonical`."""
    x = x if {"h", "g"} & {*dims} else x.squeeze(2)
    x = x if len([letter for letter in dims if letter not in "blhg"]) else x.squeeze(-1)
    letters = ["b", "l", *(letter for letter in dims if letter in "hg")]
    letters += [letter for letter in dims if letter not in letters]
    return x.permute([letters.index(letter) for letter in dims])
