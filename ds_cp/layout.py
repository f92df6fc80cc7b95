"""Which rank holds which tokens. No other file knows how a sequence is sharded.

A sequence of ``S`` tokens is padded to ``S'`` tokens and sharded twice. The *ring axis* shards it in the layout zigzag,
contiguous or balanced (computed for each batch by :mod:`ds_cp.balance`). The *ulysses axis* shards each ring shard into
contiguous pieces, so that an all-to-all over ulysses restores the order of the ring shard.

A rank's tokens are a few *runs*, half-open ranges of global positions, in increasing order. The map from local index to
global position is therefore monotone, and masks rely on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Sequence

import torch

Run = tuple[int, int]
"""Half-open range ``[start, stop)``."""


@dataclass(frozen=True)
class Layout:
    """Distribution of ``seq_len`` tokens over ``ring x ulysses`` ranks.

    Attributes:
        seq_len: S, number of tokens in the user's sequence.
        ring: R, number of ranks on the ring axis.
        ulysses: Number of ranks on the ulysses axis.
        name: ``"contiguous"``; ``"zigzag"``, in which ring rank r holds the chunks r and 2R-1-r of 2R, so that causal
            attention is equal work on every rank and in every step; or ``"balanced"``.
        balanced_runs: Value of :attr:`ring_runs` for the layout ``"balanced"``, None for the others.
    """

    seq_len: int
    ring: int
    ulysses: int
    name: str = "zigzag"
    balanced_runs: tuple[tuple[Run, ...], ...] | None = None

    def __post_init__(self) -> None:
        if (self.name == "balanced") != (self.balanced_runs is not None):
            raise ValueError(
                f'balanced_runs belongs to the layout "balanced" and to no other, got "{self.name}" and {self.balanced_runs}'
            )

    @cached_property
    def chunks(self) -> int:
        """Number of equal chunks into which the layouts zigzag and contiguous divide the padded sequence."""
        return 2 * self.ring if self.name == "zigzag" and self.ring > 1 else self.ring

    @cached_property
    def padded_len(self) -> int:
        """S', the least positive multiple of the number of chunks and of ranks that is at least S."""
        unit = lcm(self.chunks, self.ring * self.ulysses)
        return max(1, -(-self.seq_len // unit)) * unit

    @cached_property
    def local_len(self) -> int:
        """L, number of tokens per rank."""
        return self.padded_len // (self.ring * self.ulysses)

    @cached_property
    def ring_runs(self) -> tuple[tuple[Run, ...], ...]:
        """Runs of global positions in the ring shard of each ring rank."""
        if self.balanced_runs is not None:
            return self.balanced_runs
        chunk = self.padded_len // self.chunks

        def run(i: int) -> Run:
            return (i * chunk, (i + 1) * chunk)

        if self.chunks == self.ring:
            return tuple((run(r),) for r in range(self.ring))
        pairs = ((r, self.chunks - 1 - r) for r in range(self.ring))
        return tuple(_merge_adjacent([run(first), run(second)]) for first, second in pairs)

    def runs(self, cp_rank: int) -> tuple[Run, ...]:
        """Runs of global positions of one rank, ``cp_rank = ring_rank * ulysses + ulysses_rank``."""
        ring_rank, ulysses_rank = divmod(cp_rank, self.ulysses)
        return slice_runs(self.ring_runs[ring_rank], ulysses_rank * self.local_len, (ulysses_rank + 1) * self.local_len)

    def positions(self, ring_rank: int, device: torch.device) -> torch.Tensor:
        """Global positions of a ring shard's tokens, in local order, int64."""
        return torch.cat([torch.arange(*run, device=device) for run in self.ring_runs[ring_rank]])

    def shard(self, full: torch.Tensor, dim: int, cp_rank: int, pad_value: float | None = 0) -> torch.Tensor:
        """Tokens of one rank, ``[..., S, ...] -> [..., L, ...]``. Differentiable.

        Args:
            full: [..., S, ...].
            dim: Dim of the tokens.
            cp_rank: Index of the rank in the context-parallel group.
            pad_value: Value of tokens past S. None copies the last token, without a gradient.
        """
        dim = dim % full.dim()
        if full.size(dim) != self.seq_len:
            raise ValueError(f"expected {self.seq_len} tokens in dim {dim}, got shape {tuple(full.shape)}")
        pieces = []
        for start, stop in self.runs(cp_rank):
            unpadded = max(0, min(stop, self.seq_len) - start)
            # Empty slices are kept: also on a rank whose tokens are all past S, the result must be connected to ``full`` in the
            # autograd graph, because the backward pass of ``full`` may be a collective.
            pieces.append(full.narrow(dim, min(start, self.seq_len), unpadded))
            if unpadded < stop - start:
                shape = list(full.shape)
                shape[dim] = stop - start - unpadded
                last = full.narrow(dim, self.seq_len - 1, 1).detach()
                pieces.append(last.expand(shape) if pad_value is None else full.new_full(shape, pad_value))
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim)

    def pad(self, per_token: torch.Tensor) -> torch.Tensor:
        """Append zeros for the tokens past S: ``[..., S] -> [..., S']``."""
        return torch.nn.functional.pad(per_token, (0, self.padded_len - self.seq_len))

    @cached_property
    def unshard_index(self) -> torch.Tensor:
        """Index of each token of the sequence in the concatenation of all ranks' shards, [S], int64, CPU."""
        index = torch.empty(self.padded_len, dtype=torch.int64)
        offset = 0
        for ring_runs in self.ring_runs:  # the concatenated shards of a ring rank's ulysses ranks are its ring shard
            for start, stop in ring_runs:
                torch.arange(offset, offset + stop - start, out=index[start:stop])
                offset += stop - start
        return index[: self.seq_len]

    @cached_property
    def _unshard_indices(self) -> dict[torch.device, torch.Tensor]:
        return {}

    def unshard_index_on(self, device: torch.device) -> torch.Tensor:
        """:attr:`unshard_index` on a device, copied there once."""
        if device not in self._unshard_indices:
            self._unshard_indices[device] = self.unshard_index.to(device)
        return self._unshard_indices[device]


def _merge_adjacent(runs: list[Run]) -> tuple[Run, ...]:
    (a, b), (c, d) = runs
    return ((a, d),) if b == c else ((a, b), (c, d))


def total_length(runs: Sequence[Run]) -> int:
    """Number of positions or rows in some runs."""
    return sum(stop - start for start, stop in runs)


def slice_runs(runs: tuple[Run, ...], start: int, stop: int) -> tuple[Run, ...]:
    """Part of a sequence of runs between two local indices."""
    slices, offset = [], 0
    for run_start, run_stop in runs:
        lo, hi = max(start, offset), min(stop, offset + run_stop - run_start)
        if lo < hi:
            slices.append((run_start + lo - offset, run_start + hi - offset))
        offset += run_stop - run_start
    return tuple(slices)
