"""Tiles of the loss so small that a test has several."""

from contextlib import contextmanager

from ds_cp.chunked import cross_entropy as chunked
from harness.models import VOCAB

TOKENS_PER_TILE = 5  # so that no tile is alone, and the last one is shorter


@contextmanager
def small_tiles(tokens=TOKENS_PER_TILE, vocab=VOCAB, bytes_each=4):
    before, chunked.CHUNK_BYTES = chunked.CHUNK_BYTES, tokens * vocab * bytes_each
    try:
        yield
    finally:
        chunked.CHUNK_BYTES = before
