"""The dense mask of the tiles of all ranks."""

import numpy as np

from ds_cp.layout import Layout
from ds_cp.mask.rules import OPEN
from ds_cp.mask.schedule import schedule
from ds_cp.mask.tile import lower


def repainted(segments, layout: Layout, batch: int, lowered: bool) -> np.ndarray:
    """[B, S', S']: how often each query sees each key in the tiles of all ranks on their received rows."""
    seen = np.zeros((batch, layout.padded_len, layout.padded_len), dtype=int)
    owned = [np.concatenate([np.arange(*run) for run in runs]) for runs in layout.ring_runs]
    for rank in range(layout.ring):
        for step in schedule(segments, layout, rank):
            arrived = np.concatenate([owned[step.source][slice(*run)] for run in step.rows] or [owned[0][:0]])
            for tile in step.tiles:
                for piece in lower(tile) if lowered else [tile]:
                    n_q, n_k = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
                    distance = np.arange(n_k)[None, :] - np.arange(n_q)[:, None]
                    may_see = (distance >= piece.lo) & (distance <= piece.hi)
                    assert may_see.any(1).all(), "a query of a tile sees nothing"
                    assert piece.area == may_see.sum() * (piece.batch_stop - piece.batch_start)
                    if lowered and piece.lo > -OPEN or lowered and piece.hi < OPEN:
                        assert n_q == n_k and (piece.lo, piece.hi) in ((0, OPEN), (-OPEN, 0))
                    q = owned[rank][piece.q_start : piece.q_stop]
                    k = arrived[piece.k_start : piece.k_stop]
                    seen[piece.batch_start : piece.batch_stop, q[:, None], k[None, :]] += may_see
    return seen
