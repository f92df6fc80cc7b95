"""Sparse attention with an indexer: a term that hides all keys that the model has not selected for a query."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ds_cp.attention.score import TileCoordinates
from ds_cp.attention.terms import as_bias
from ds_cp.layout import Layout
from ds_cp.mesh import Mesh


@dataclass(frozen=True, eq=False)
class SelectedKeys:
    """The keys that each query of this rank's ring shard has selected, in blocks of adjacent keys of its document.

    Attributes:
        selected: [B, G, R, n] int, for each of G head groups the blocks that the ring shard's R queries have selected, in
            local order. Blocks are counted from the document's start; -1 is none.
        head_group: [H] int64, head group of each query head.
        block_of_key: [B, keys] int64, block of each key, by global position.
        max_blocks: Largest number of blocks that a document may have.
        row_of_position: [S'] int64, for each global position in this ring shard its row in ``selected``.
    """

    selected: torch.Tensor
    head_group: torch.Tensor
    block_of_key: torch.Tensor
    max_blocks: int
    row_of_position: torch.Tensor

    @staticmethod
    def from_local_queries(
        mesh: Mesh, layout: Layout, selected: torch.Tensor, block_of_key: torch.Tensor, max_blocks: int, heads: int
    ) -> SelectedKeys:
        """Makes the term from what this rank's queries have selected. All ranks of a ulysses group must call it.

        Args:
            selected: [B, G, L, n], blocks that this rank's queries have selected; -1 is none.
            block_of_key: [B, keys], block of each key.
            max_blocks: Largest number of blocks that a document may have.
            heads: H, number of query heads. All head groups have equally many.
        """
        ulysses = mesh.ulysses_group
        if ulysses.size > 1:  # attention runs on all tokens of the ring shard
            selected = torch.cat([*ulysses.all_gather(selected, "keys that each query chose")], dim=2)
        positions = layout.positions(mesh.ring_group.rank, selected.device)
        row_of_position = torch.zeros(layout.padded_len, dtype=torch.int64, device=selected.device)
        row_of_position[positions] = torch.arange(len(positions), device=selected.device)
        groups = selected.size(1)
        head_group = torch.arange(groups, device=selected.device).repeat_interleave(heads // groups)
        return SelectedKeys(selected, head_group, block_of_key, max_blocks, row_of_position)

    def of_heads(self, heads: slice) -> SelectedKeys:
        return replace(self, head_group=self.head_group[heads])

    def bias(self, coordinates: TileCoordinates, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query has selected the key, -inf elsewhere, [B, 1 or H, m, n]. All keys of a tile are of one document."""
        selected = self.selected[coordinates.batch][:, :, self.row_of_position[coordinates.q]]
        blocks = self.block_of_key[coordinates.batch][:, coordinates.k]
        # One key of the tile represents its block, so that no tensor per query is as wide as the document.
        representative = blocks.new_full((len(blocks), self.max_blocks + 1), -1)
        representative.scatter_(1, blocks, torch.arange(blocks.size(1), device=blocks.device).expand_as(blocks))
        keys = representative.gather(1, _replace_none(selected, self.max_blocks).flatten(1)).view_as(selected)
        unselected = not_selected(keys, blocks.size(1))
        hidden = torch.stack([row[..., index] for row, index in zip(unselected, representative.gather(1, blocks))])
        if hidden.size(1) > 1:
            hidden = hidden[:, self.head_group]
        return as_bias(~hidden, dtype)


def not_selected(selected: torch.Tensor, count: int) -> torch.Tensor:
    """Which of ``count`` keys are not among the selected ones [..., n], in which -1 is none: bool [..., count]."""
    hidden = selected.new_ones((*selected.shape[:-1], count + 1), dtype=torch.bool)
    return hidden.scatter(-1, _replace_none(selected, count), False)[..., :count]


def _replace_none(indices: torch.Tensor, none: int) -> torch.Tensor:
    """Indices as int64, with ``none`` instead of -1."""
    return torch.where(indices < 0, none, indices).long()
