"""Keys that a model chooses by itself for each query (DeepSeek's sparse attention), as a term: all others are hidden."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_cp.attention.score import Where
from ds_cp.layout import Layout
from ds_cp.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Selected:
    """The keys of each query of this rank's ring shard.

    Attributes:
        keys: [B, R, n] int, global positions of the chosen keys for the R queries of the ring shard, in its order.
        row: [S'] int64, the ring shard's row of each global position that it holds.
        length: S', the padded sequence.
    """

    keys: torch.Tensor
    row: torch.Tensor
    length: int

    @staticmethod
    def by_this_rank(mesh: Mesh, layout: Layout, keys: torch.Tensor) -> "Selected":
        """From the chosen keys [B, L, n] of this rank's queries; every rank of the ulysses group must call it."""
        ulysses = mesh.ulysses
        if ulysses.size > 1:  # attention runs on the tokens of the whole ring shard there
            keys = torch.cat([*ulysses.all_gather(keys, "keys that each query chose")], dim=1)
        runs = layout.ring_runs[mesh.ring.rank]
        positions = torch.cat([torch.arange(*run, device=keys.device) for run in runs])
        row = torch.zeros(layout.padded_len, dtype=torch.int64, device=keys.device)
        row[positions] = torch.arange(len(positions), device=keys.device)
        return Selected(keys, row, layout.padded_len)

    def of_heads(self, heads: slice) -> "Selected":
        return self

    def of(self, where: Where, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query of a tile chose the key, -inf elsewhere, [B, 1, m, n]."""
        chosen = hidden_but(self.keys[where.batch][:, self.row[where.q]], self.length)[..., where.k]
        return torch.zeros_like(chosen, dtype=dtype).masked_fill(chosen, float("-inf")).unsqueeze(1)


def hidden_but(keys: torch.Tensor, length: int) -> torch.Tensor:
    """Which of ``length`` keys are not among the chosen ones [B, m, n]: bool [B, m, length]."""
    hidden = keys.new_ones((*keys.shape[:-1], length), dtype=torch.bool)
    return hidden.scatter(-1, keys.long(), False)
