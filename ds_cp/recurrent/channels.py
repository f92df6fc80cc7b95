"""Ulysses' trade for what is not attention: all tokens of some channels instead of some tokens of all channels.

A recurrence or a short convolution mixes tokens inside a head or a channel only. So each rank runs the model's own
function on the whole sequence of its share of them, and the results go back to the ranks that hold the tokens. One
all-to-all each way over all ranks that share a sequence, exact for every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Callable, Mapping, Sequence

import torch
from torch.autograd.function import once_differentiable

from ds_cp.agreement import BatchError
from ds_cp.layout import Layout
from ds_cp.process_group import Group
from ds_cp.recurrent.per_document import PerDocument

Range = tuple[int, int]
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class ChannelSplit:
    """Which heads each rank computes, and which groups these need; a channel is a head of one number.

    Attributes:
        heads: half-open ranges per rank, disjoint; a rank may have none.
        groups: those that serve the rank's heads, evenly; ranks may share some.
        repeat: how often each group is repeated before.
    """

    heads: tuple[Range, ...]
    groups: tuple[Range, ...]
    repeat: int

    @staticmethod
    @cache
    def plan(heads: int, groups: int, ranks: int) -> "ChannelSplit":
        """Heads as evenly as possible where each rank's then lie inside one group or fill some; else whole groups, if
        there is one per rank; else the same with groups repeated by the least factor."""
        if heads % groups:
            raise ValueError(f"{heads} heads are no multiple of {groups} groups")
        for repeat in (n for n in range(1, heads // groups + 1) if heads // groups % n == 0):
            width = heads // groups // repeat
            for unit in (1, width):
                units = heads // unit
                split = tuple(pairwise(unit * (units * u // ranks) for u in range(ranks + 1)))
                if all(_evenly(run, width) for run in split) and (unit == 1 or units >= ranks):
                    return ChannelSplit(split, tuple(_groups_of(run, width) for run in split), repeat)
        raise AssertionError("with a group per head every split is even")


def _evenly(heads: Range, width: int) -> bool:
    start, stop = heads
    return not (start % width or stop % width) or start // width == (stop - 1) // width


def _groups_of(heads: Range, width: int) -> Range:
    start, stop = heads
    return (start // width, -(-stop // width)) if start < stop else (0, 0)


@dataclass(frozen=True)
class HeadExchange:
    """Tokens for heads and back: two linear maps of several tensors at once, each other's adjoint.

    Attributes:
        layout, group: how, and with whom, the sequence is shared.
        ranges: per tensor, what each rank gets of its heads.
        sizes: per tensor, all heads.
    """

    layout: Layout
    group: Group
    ranges: tuple[tuple[Range, ...], ...]
    sizes: tuple[int, ...]

    def to_heads(self, tensors: Tensors, phase: str) -> list[torch.Tensor]:
        """[B, L, heads, d] each to [B, S, heads of this rank, d]."""
        batch, length = tensors[0].shape[:2]
        parcels, counts = [], []
        for rank in range(self.group.size):
            mine = [x[:, :, slice(*ranges[rank])] for x, ranges in zip(tensors, self.ranges)]
            parcels.append(_bytes(mine).flatten())
            counts.append(parcels[-1].numel())
        received = self.group.all_to_all(
            torch.cat(parcels), counts, [counts[self.group.rank]] * self.group.size, f"{phase} states"
        )
        index = self.layout.unshard_index_on(received.device)
        rows = received.view(self.group.size * length, batch, -1).index_select(0, index)
        return _tensors(rows, tensors, [ranges[self.group.rank] for ranges in self.ranges])

    def to_tokens(self, tensors: Tensors, phase: str) -> list[torch.Tensor]:
        """Back; what several ranks have of a head is summed, and padding is zero."""
        rows, length = _bytes(tensors), self.layout.local_len
        batch = rows.size(1)
        shards = rows.new_zeros((self.group.size * length, *rows.shape[1:]))
        shards.index_copy_(0, self.layout.unshard_index_on(rows.device), rows)
        widths = [
            sum((stop - start) * x.size(-1) * x.element_size() for x, (start, stop) in zip(tensors, ranges))
            for ranges in zip(*self.ranges)
        ]
        counts = [length * batch * width for width in widths]
        received = self.group.all_to_all(
            shards.flatten(), [counts[self.group.rank]] * self.group.size, counts, f"{phase} states"
        )
        totals = []
        for x, ranges, size in zip(tensors, self.ranges, self.sizes):
            disjoint = sum(stop - start for start, stop in ranges) == size
            dtype = x.dtype if disjoint else torch.promote_types(x.dtype, torch.float32)  # sums are rounded once
            totals.append(x.new_zeros((batch, length, size, x.size(-1)), dtype=dtype))
        for rank, parcel in enumerate(received.split(counts)):
            ranges = [each[rank] for each in self.ranges]
            for total, run, part in zip(
                totals, ranges, _tensors(parcel.view(length, batch, -1), tensors, ranges), strict=True
            ):
                total[:, :, slice(*run)] += part
        return [total.to(x.dtype) for total, x in zip(totals, tensors)]


def _bytes(tensors: Tensors) -> torch.Tensor:
    """[B, n, heads, d] of any dtypes to one row of bytes per token, uint8 [n, B, width]: fp32 decays beside bf16 values."""
    return torch.cat([x.transpose(0, 1).flatten(2).contiguous().view(torch.uint8) for x in tensors], dim=-1)


def _tensors(rows: torch.Tensor, like: Tensors, ranges: Sequence[Range]) -> list[torch.Tensor]:
    """The opposite, for some heads of tensors like the given ones."""
    shapes = [(stop - start, x.size(-1)) for x, (start, stop) in zip(like, ranges)]
    parts = rows.split([heads * dim * x.element_size() for x, (heads, dim) in zip(like, shapes)], dim=-1)
    return [
        _numbers(part, x.dtype).view(*part.shape[:2], *shape).transpose(0, 1)
        for x, part, shape in zip(like, parts, shapes)
    ]


def _numbers(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Some bytes of each row as numbers, flat. Those of a single row are no copy yet, and may start where no number can."""
    flat = part.reshape(-1)
    return (flat.clone() if flat.storage_offset() % dtype.itemsize else flat).view(dtype)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: HeadExchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.to_heads(tensors, "forward"))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: torch.Tensor):
        return None, *ctx.exchange.to_tokens(gradients, "backward")


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: HeadExchange, out: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.to_tokens([out], "forward")[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
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
    """Run a function that mixes tokens inside of heads on the whole sequence, each document by itself.

    Args:
        function: takes ``arguments`` by name; looks back only.
        arguments: its arguments, with tensors of this rank's tokens.
        dims: by argument, the dims of a tensor, a letter each: b batch, l tokens, h heads, g groups of heads; anything
            else goes along. Without l it is a weight; with l but neither h nor g, all heads share it.
        out_dims: of what comes back.
        layout, group: how, and with whom, the sequence is shared.
        per_document: how each document runs by itself.

    Returns:
        As the function, for this rank's tokens.

    Raises:
        BatchError: a tensor that is not in ``dims``.
    """
    present = {name: letters for name, letters in dims.items() if isinstance(arguments.get(name), torch.Tensor)}
    strange = [name for name, x in arguments.items() if isinstance(x, torch.Tensor) and name not in present]
    if strange:
        raise BatchError(
            f"{function.__name__} gets {', '.join(strange)}, of which ds_cp does not know what belongs to which token: each rank "
            "would start from it at its own shard. Leave it out."
        )
    per_token = {name: letters for name, letters in present.items() if "l" in letters}
    weights = {name: letters for name, letters in present.items() if "l" not in letters}

    heads, groups = (_size(arguments, present, letter) for letter in "hg")
    shared_by_all = any(not {"h", "g"} & {*letters} for letters in per_token.values())
    split = ChannelSplit.plan(heads, groups or (1 if shared_by_all else heads), group.size)
    mine = split.heads[group.rank]

    tensors = [_canonical(arguments[name], letters) for name, letters in per_token.items()]
    by_head = ["h" in letters for letters in per_token.values()]
    if split.repeat > 1:
        tensors = [x if h else x.repeat_interleave(split.repeat, 2) for x, h in zip(tensors, by_head)]
    ranges = tuple(split.heads if h else split.groups for h in by_head)
    whole = _ToHeads.apply(HeadExchange(layout, group, ranges, tuple(x.size(2) for x in tensors)), *tensors)

    def run(heads: Range, parts: Tensors) -> torch.Tensor:
        """The function on [n, m, some heads, d] each."""
        of_heads = {name: _of_heads(arguments[name], letters, heads) for name, letters in weights.items()}
        native = {name: _native(x, letters).contiguous() for (name, letters), x in zip(per_token.items(), parts)}
        return _canonical(function(**{**arguments, **of_heads, **native}), out_dims)

    if mine[0] < mine[1]:
        (out,) = per_document.run(lambda *parts: [run(mine, parts)], *whole)
    else:
        out = _no_heads(run, whole, [_of_heads(arguments[name], letters, mine) for name, letters in weights.items()])
    return _native(_ToTokens.apply(HeadExchange(layout, group, (split.heads,), (heads,)), out), out_dims)


def _no_heads(run: Callable, whole: Tensors, weights: Tensors) -> torch.Tensor:
    """What a rank without heads has computed: [B, S, 0, d]. Its backward pass must come to every collective all the same,
    and to every weight."""
    with torch.no_grad():
        like = run((0, 1), [x.new_zeros((1, 1, 1, x.size(-1))) for x in whole])  # tells d and dtype
    nothing = sum(x.sum() for x in (*whole, *weights))
    return nothing.to(like.dtype) + like.new_zeros((*whole[0].shape[:2], 0, like.size(-1)))


def _of_heads(weight: torch.Tensor, dims: str, heads: Range) -> torch.Tensor:
    return weight.narrow(dims.index("h"), heads[0], heads[1] - heads[0])


def _size(arguments: Mapping[str, Any], dims: Mapping[str, str], letter: str) -> int | None:
    return next((arguments[name].size(at) for name, letters in dims.items() if (at := letters.find(letter)) >= 0), None)


def _canonical(x: torch.Tensor, dims: str) -> torch.Tensor:
    """To [B, L, heads, d]."""
    order = [dims.index("b"), dims.index("l")]
    order += [at for at, letter in enumerate(dims) if letter in "hg"]
    x = x.permute(*order, *(at for at in range(x.dim()) if at not in order))
    x = x if len(order) == 3 else x.unsqueeze(2)
    return x if x.dim() == 4 else x.unsqueeze(-1)


def _native(x: torch.Tensor, dims: str) -> torch.Tensor:
    """Back from [B, L, heads, d]."""
    x = x if {"h", "g"} & {*dims} else x.squeeze(2)
    x = x if len([letter for letter in dims if letter not in "blhg"]) else x.squeeze(-1)
    letters = ["b", "l", *(letter for letter in dims if letter in "hg")]
    letters += [letter for letter in dims if letter not in letters]
    return x.permute([letters.index(letter) for letter in dims])
