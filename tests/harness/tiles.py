"""Small chunks of the loss, so that a test has several."""

from contextlib import contextmanager

from ds_cp.chunked import cross_entropy as chunked
from harness.models import VOCAB

TOKENS_PER_TILE = 5  # several chunks, the last of which is shorter


@contextmanager
def small_tiles(tokens=TOKENS_PER_TILE, vocab=VOCAB, bytes_each=4):
    before, chunked.CHUNK_BYTES = chunked.CHUNK_BYTES, tokens * vocab * bytes_each
    try:
        yield
    finally:
        chunked.CHUNK_BYTES = before
