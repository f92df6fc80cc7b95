"""Documents, segments, tiles and rows, compared with a dense mask."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.cases.documents import DOCUMENTS
from ds_cp.layout import Layout, total_length
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL, OPEN, Band, Rule
from ds_cp.mask.schedule import schedule
from harness.painting import repainted

rules = st.builds(Band, st.sampled_from([0, 2, 6, OPEN]), st.sampled_from([0, 0, 3, OPEN]))


def painted(documents: Documents, rule: Rule, length: int) -> np.ndarray:
    """Dense mask [B, S, S] from the definition: how often each query sees each key."""
    seen = np.zeros((len(documents.ranges), length, length), dtype=int)
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    for b, lines in enumerate(documents.ranges):
        for start, stop, k_start, k_stop in lines:
            first = (
                0 if start == lines[0][0] else start
            )  # masked tokens before the first document of a row attend to it
            inside = (i >= first) & (i < stop) & (j >= k_start) & (j < k_stop)
            seen[b] += inside & (j >= i - rule.left) & (j <= i + rule.right)
    return seen


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=3),
    ring=st.integers(1, 4),
    ulysses=st.integers(1, 2),
    name=st.sampled_from(["zigzag", "contiguous"]),
    rule=rules,
    holes=st.integers(0, 2**20),
)
def test_tiles_cover_each_visible_pair_exactly_once(lengths, ring, ulysses, name, rule, holes):
    total = max(sum(row) for row in lengths)
    rows = [row + [total - sum(row)] * (sum(row) < total) for row in lengths]
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in rows])
    unmasked = np.random.default_rng(holes).random(positions.shape) > 0.2 if holes % 3 == 0 else None
    documents = Documents.find(len(rows), total, positions, unmasked)
    layout = Layout(total, ring, ulysses, name)
    want = painted(documents, rule, total)
    assert want.max() <= 1, "a query would count a key twice"
    for lowered in (False, True):
        got = repainted(documents.segments(rule), layout, len(rows), lowered)
        assert (got[:, :total, :total] == want).all()
        assert got.sum() == want.sum(), "padding is seen"


def ranges(*args, **kwargs):
    return [[tuple(line) for line in row.tolist()] for row in Documents.find(*args, **kwargs).ranges]


@pytest.mark.parametrize("what, given_, want", DOCUMENTS, ids=[case[0] for case in DOCUMENTS])
def test_documents_are_recognised(what, given_, want):
    arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in given_.items()}
    if "unmasked" in arrays:
        arrays["unmasked"] = arrays["unmasked"] != 0
    assert ranges(1, **arrays) == [want]


@pytest.mark.parametrize("boundaries", [[0, 2], [1, 5], [0, 3, 2, 5]])
def test_boundaries_that_do_not_cover_the_row_are_refused(boundaries):
    with pytest.raises(ValueError, match="cu_seqlens"):
        Documents.find(1, 5, boundaries=np.array(boundaries))


def test_equal_batch_rows_share_their_tiles():
    segments = Documents.find(6, 8).segments(CAUSAL)
    assert len(segments) == 1 and segments[0, :2].tolist() == [0, 6]


def test_a_dense_zigzag_rank_has_one_tile_per_step():
    layout = Layout(64, 4, 1)
    for rank in range(4):
        steps = schedule(Documents.find(1, 64).segments(CAUSAL), layout, rank)
        assert [len(step.tiles) for step in steps] == [1, 1, 1, 1]
        assert len({sum(tile.area for tile in step.tiles) for step in steps[1:]}) == 1
        assert [total_length(step.rows) for step in steps[1:]] == [
            8 if step.source < rank else 16 for step in steps[1:]
        ]


def test_both_sides_of_a_message_agree_on_its_rows():
    layout = Layout(61, 4, 1)
    positions = np.concatenate([np.arange(n) for n in (20, 1, 33, 7)])[None]
    segments = Documents.find(1, 61, positions).segments(Band(9, 0))
    steps = [schedule(segments, layout, rank) for rank in range(4)]
    for rank in range(4):
        for t in range(1, 4):
            mine = steps[rank][t]
            assert steps[mine.source][t].target == rank
            assert steps[mine.source][t].target_rows == mine.rows
