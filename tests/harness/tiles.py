"""Tiles of the loss so small that a test has several."""

from contextlib import contextmanager

from ds_cp.tiled import loss as tiled
from harness.models import VOCAB

TOKENS_PER_TILE = 5  # so that no tile is alone, and the last one is shorter


@contextmanager
def small_tiles(tokens=TOKENS_PER_TILE, vocab=VOCAB, bytes_each=4):
    before, tiled.TILE_BYTES = tiled.TILE_BYTES, tokens * vocab * bytes_each
    try:
        yield
    finally:
        tiled.TILE_BYTES = before
