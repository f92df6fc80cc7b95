"""Mask rules and their combinations as segments and tiles, compared with a dense mask."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_cp.layout import Layout
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL, EVERYTHING, OPEN, Band, Blocks, ChunkedAttention, Intersection, Union
from harness.painting import repainted

LENGTH = 40


def painted(rule, name, origin, row):
    """Dense mask [S, S] of one batch row from the definition of the rule, within documents."""
    i, j = np.arange(len(name))[:, None], np.arange(len(name))[None, :]
    if isinstance(rule, Band):
        seen = (j >= i - rule.left) & (j <= i + rule.right)
    elif isinstance(rule, ChunkedAttention):
        chunk = (np.arange(len(name)) - origin) // rule.size
        seen = chunk[:, None] == chunk[None, :]
    elif isinstance(rule, Blocks):
        block = np.full(len(name), -1)
        for start, stop, number in rule.rows[row if rule.differs_by_row else 0]:
            block[start:stop] = number
        seen = (block[:, None] == block[None, :]) & (block >= 0)[:, None]
    else:
        one, other = (painted(part, name, origin, row) for part in (rule.one, rule.other))
        seen = one & other if isinstance(rule, Intersection) else one | other
    return seen & (name[:, None] == name[None, :])


bands = st.builds(Band, st.sampled_from([0, 3, 11, OPEN]), st.sampled_from([0, 0, 4, OPEN]))
blocks = st.lists(
    st.lists(st.tuples(st.integers(1, 9), st.integers(-1, 2)), min_size=1, max_size=12), min_size=2, max_size=2
).map(lambda rows: Blocks.of(np.stack([_ids(row) for row in rows])))
atoms = st.one_of(bands, st.builds(ChunkedAttention, st.integers(1, 15)), blocks)
rules = st.recursive(
    atoms, lambda part: st.one_of(st.builds(Intersection, part, part), st.builds(Union, part, part)), max_leaves=4
)


def _ids(runs):
    ids = np.concatenate([np.full(n, number) for n, number in runs] + [np.full(LENGTH, -1)])
    return ids[:LENGTH]


@settings(max_examples=250, deadline=None)
@given(
    rule=rules,
    lengths=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=2, max_size=2),
    ring=st.integers(1, 4),
    name=st.sampled_from(["zigzag", "contiguous"]),
    holes=st.integers(0, 2**20),
)
def test_each_visible_pair_is_in_exactly_one_tile(rule, lengths, ring, name, holes):
    rows = [(row + [LENGTH])[: len(row) + 1] for row in lengths]
    names = np.stack([np.repeat(np.arange(len(row)), row)[:LENGTH] for row in rows])
    starts = [np.concatenate([[0], np.flatnonzero(np.diff(row)) + 1]) for row in names]
    origins = np.stack([start[row] for start, row in zip(starts, names)])
    unmasked = np.random.default_rng(holes).random(names.shape) > 0.2 if holes % 3 == 0 else None
    documents = Documents.find(2, LENGTH, unmasked=unmasked, seq_idx=names)
    if unmasked is not None:  # a document whose first tokens are masked starts later
        origins = documents.origin(LENGTH)
        names = np.where(unmasked, names, -1 - names)
    want = np.stack([painted(rule, *facts, b) for b, facts in enumerate(zip(names, origins))])
    segments = documents.segments(rule)
    for lowered in (False, True):
        got = repainted(segments, Layout(LENGTH, ring, 1, name), 2, lowered)[:, :LENGTH, :LENGTH]
        assert got.max(initial=0) <= 1, "a query would count a key twice"
        if unmasked is None:
            assert (got == want).all()
        else:
            real = unmasked[:, :, None] & unmasked[:, None, :]
            assert ((got > 0)[real] == want[real]).all()


def test_bands_that_contain_each_other_stay_one_band():
    window = Band(4, OPEN)
    assert window & CAUSAL == Band(4, 0)
    assert CAUSAL | EVERYTHING == EVERYTHING
    assert isinstance(Band(4, 0) | Band(0, 4), Union)


def test_equal_rules_share_a_schedule():
    ids = np.array([[-1, 0, 0, 1]])
    assert hash(CAUSAL | Blocks.of(ids)) == hash(CAUSAL | Blocks.of(ids.copy()))
    assert (CAUSAL | Blocks.of(ids)) == (CAUSAL | Blocks.of(ids.copy()))


def test_batch_rows_with_different_blocks_have_separate_segments():
    ids = np.array([[-1, 0, 0, 1], [0, 0, -1, -1]])
    assert Documents.find(2, 4).segments(CAUSAL)[:, :2].tolist() == [[0, 2]]
    assert set(Documents.find(2, 4).segments(CAUSAL | Blocks.of(ids))[:, 0]) == {0, 1}


@pytest.mark.parametrize("images", [1, 100])
def test_the_number_of_segments_grows_with_the_blocks_not_with_the_tokens(images):
    length = 100_000
    ids = np.full((1, length), -1)
    for image in range(images):
        ids[0, image * 1000 + 300 : image * 1000 + 556] = image
    segments = Documents.find(1, length).segments(CAUSAL | Blocks.of(ids))
    assert len(segments) == 1 + images
