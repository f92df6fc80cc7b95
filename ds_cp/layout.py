"""Which token is where: the only file that knows how a sequence is cut.

A sequence of ``S`` tokens is padded to ``S'`` and shared twice: by the *ring axis* (zigzag, contiguous or cut for one
batch by :mod:`ds_cp.balance`), and each ring shard again by the *ulysses axis*, in contiguous pieces, so that the
all-to-all over ulysses restores the ring shard's own order. A rank's tokens are a few *runs*, half-open ranges of global
positions, in increasing order: the map from local index to global position is monotone, and masks rely on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm

import torch

Run = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """Where each of ``seq_len`` tokens lives on ``ring x ulysses`` ranks.

    Attributes:
        seq_len: S, tokens of the user's sequence.
        ring: ranks on the ring axis.
        ulysses: ranks on the ulysses axis.
        name: ``"zigzag"`` (ring rank r holds chunks r and 2R-1-r of 2R, equal causal work on every rank and at every
            step), ``"contiguous"`` or ``"balanced"``.
        cut: for ``"balanced"``, what ``ring_runs`` shall be.
    """

    seq_len: int
    ring: int
    ulysses: int
    name: str = "zigzag"
    cut: tuple[tuple[Run, ...], ...] | None = None

    def __post_init__(self) -> None:
        if (self.name == "balanced") != (self.cut is not None):
            raise ValueError(
                f'a cut belongs to the layout "balanced" and to no other, got "{self.name}" and {self.cut}'
            )

    @cached_property
    def chunks(self) -> int:
        """Equal chunks that the padded sequence is cut into on the ring axis."""
        return 2 * self.ring if self.name == "zigzag" and self.ring > 1 else self.ring

    @cached_property
    def padded_len(self) -> int:
        """S', the least multiple of the chunks and of the ranks that holds the sequence (at least one token each)."""
        unit = lcm(self.chunks, self.ring * self.ulysses)
        return max(1, -(-self.seq_len // unit)) * unit

    @cached_property
    def local_len(self) -> int:
        """L, tokens per rank."""
        return self.padded_len // (self.ring * self.ulysses)

    @cached_property
    def ring_runs(self) -> tuple[tuple[Run, ...], ...]:
        """For each ring rank the runs of global positions that its ring shard holds."""
        if self.cut is not None:
            return self.cut
        chunk = self.padded_len // self.chunks

        def run(i: int) -> Run:
            return (i * chunk, (i + 1) * chunk)

        if self.chunks == self.ring:
            return tuple((run(r),) for r in range(self.ring))
        pairs = ((r, self.chunks - 1 - r) for r in range(self.ring))
        return tuple(_merge_adjacent([run(first), run(second)]) for first, second in pairs)

    def runs(self, cp_rank: int) -> tuple[Run, ...]:
        """Runs of global positions that one rank holds; ``cp_rank = ring_rank * ulysses + ulysses_rank``."""
        ring_rank, ulysses_rank = divmod(cp_rank, self.ulysses)
        return slice_runs(self.ring_runs[ring_rank], ulysses_rank * self.local_len, (ulysses_rank + 1) * self.local_len)

    def positions(self, ring_rank: int, device: torch.device) -> torch.Tensor:
        """Global positions of the tokens of a ring shard, in its order, int64."""
        return torch.cat([torch.arange(*run, device=device) for run in self.ring_runs[ring_rank]])

    def shard(self, full: torch.Tensor, dim: int, cp_rank: int, pad_value: float | None = 0) -> torch.Tensor:
        """A rank's tokens: ``[..., S, ...] -> [..., L, ...]``; tokens past S are ``pad_value``, or copies of the last token.

        Differentiable: the adjoint is a scatter into zeros. Tokens past S come with a piece of ``full``, be it empty: the
        backward pass of a rank without tokens must reach the collective that made ``full``.
        """
        dim = dim % full.dim()
        if full.size(dim) != self.seq_len:
            raise ValueError(f"expected {self.seq_len} tokens in dim {dim}, got shape {tuple(full.shape)}")
        pieces = []
        for start, stop in self.runs(cp_rank):
            real = max(0, min(stop, self.seq_len) - start)
            pieces.append(full.narrow(dim, min(start, self.seq_len), real))
            if real < stop - start:
                shape = list(full.shape)
                shape[dim] = stop - start - real
                last = full.narrow(dim, self.seq_len - 1, 1).detach()
                pieces.append(last.expand(shape) if pad_value is None else full.new_full(shape, pad_value))
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim)

    def pad(self, per_token: torch.Tensor) -> torch.Tensor:
        """A fact of each token, with zeros for those past S: ``[..., S] -> [..., S']``."""
        return torch.nn.functional.pad(per_token, (0, self.padded_len - self.seq_len))

    @cached_property
    def unshard_index(self) -> torch.Tensor:
        """For each global position below S its index in the concatenation of all ranks' shards, [S], int64, CPU."""
        index = torch.empty(self.padded_len, dtype=torch.int64)
        offset = 0
        for ring_runs in self.ring_runs:  # the shards of its ulysses ranks, side by side, are the ring rank's
            for start, stop in ring_runs:
                torch.arange(offset, offset + stop - start, out=index[start:stop])
                offset += stop - start
        return index[: self.seq_len]

    @cached_property
    def _on_devices(self) -> dict[torch.device, torch.Tensor]:
        return {}

    def unshard_index_on(self, device: torch.device) -> torch.Tensor:
        """:attr:`unshard_index` on a device, copied there once."""
        if device not in self._on_devices:
            self._on_devices[device] = self.unshard_index.to(device)
        return self._on_devices[device]


def _merge_adjacent(runs: list[Run]) -> tuple[Run, ...]:
    (a, b), (c, d) = runs
    return ((a, d),) if b == c else ((a, b), (c, d))


def slice_runs(runs: tuple[Run, ...], start: int, stop: int) -> tuple[Run, ...]:
    """The part of a sequence of runs between two local indices."""
    out, offset = [], 0
    for first, last in runs:
        lo, hi = max(start, offset), min(stop, offset + last - first)
        if lo < hi:
            out.append((first + lo - offset, first + hi - offset))
        offset += last - first
    return tuple(out)
