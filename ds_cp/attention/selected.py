"""Keys that a model chooses by itself for each query (sparse attention with an indexer), as a term: all others are hidden."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ds_cp.attention.score import TileCoordinates
from ds_cp.attention.terms import as_bias
from ds_cp.layout import Layout
from ds_cp.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Selected:
    """The keys of each query of this rank's ring shard, chosen by blocks of neighbouring keys of its document.

    Attributes:
        chosen: [B, G, R, n] int, for each of G groups of heads the blocks that the R queries of the ring shard chose, in
            its order; counted from the document's start, -1 for none.
        group: [H] int64, the group of each query head.
        block: [B, keys] int64, in which block each key is, by global position.
        count: as many blocks as a document may have.
        row: [S'] int64, the ring shard's row of each global position that it holds.
    """

    chosen: torch.Tensor
    group: torch.Tensor
    block: torch.Tensor
    count: int
    row: torch.Tensor

    @staticmethod
    def by_this_rank(
        mesh: Mesh, layout: Layout, chosen: torch.Tensor, block: torch.Tensor, count: int, heads: int
    ) -> "Selected":
        """From what this rank's queries chose; every rank of the ulysses group must call it.

        Args:
            chosen: [B, G, L, n].
            block: [B, keys], in which block each key is.
            count: as many blocks as a document may have.
            heads: H, query heads; each group serves equally many.
        """
        ulysses = mesh.ulysses_group
        if ulysses.size > 1:  # attention runs on the tokens of the whole ring shard there
            chosen = torch.cat([*ulysses.all_gather(chosen, "keys that each query chose")], dim=2)
        held = layout.positions(mesh.ring_group.rank, chosen.device)
        row = torch.zeros(layout.padded_len, dtype=torch.int64, device=chosen.device)
        row[held] = torch.arange(len(held), device=chosen.device)
        group = torch.arange(chosen.size(1), device=chosen.device).repeat_interleave(heads // chosen.size(1))
        return Selected(chosen, group, block, count, row)

    def of_heads(self, heads: slice) -> "Selected":
        return replace(self, group=self.group[heads])

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query of a tile chose the key, -inf elsewhere, [B, 1 or H, m, n]; a tile of tokens is of one document."""
        chosen, blocks = (
            self.chosen[coordinates.batch][:, :, self.row[coordinates.q]],
            self.block[coordinates.batch][:, coordinates.k],
        )
        # one key of the tile stands for its block, so that nothing is as wide as the document
        one_of = blocks.new_full((len(blocks), self.count + 1), -1)
        one_of.scatter_(1, blocks, torch.arange(blocks.size(1), device=blocks.device).expand_as(blocks))
        keys = one_of.gather(1, _or(chosen, self.count).flatten(1)).view_as(chosen)
        by_key = hidden_but(keys, blocks.size(1))
        hidden = torch.stack([row[..., of_blocks] for row, of_blocks in zip(by_key, one_of.gather(1, blocks))])
        if hidden.size(1) > 1:
            hidden = hidden[:, self.group]
        return as_bias(~hidden, dtype)


def hidden_but(chosen: torch.Tensor, count: int) -> torch.Tensor:
    """Which of ``count`` keys or blocks are not among the chosen ones [..., n], -1 for none: bool [..., count]."""
    hidden = chosen.new_ones((*chosen.shape[:-1], count + 1), dtype=torch.bool)
    return hidden.scatter(-1, _or(chosen, count), False)[..., :count]


def _or(chosen: torch.Tensor, none: int) -> torch.Tensor:
    """Indices, int64, with another number than -1 for none."""
    return torch.where(chosen < 0, none, chosen).long()
