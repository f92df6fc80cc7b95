"""The tables of what is allowed name places that exist, and say why."""

import re

import pytest
from rehearsal import tables

from harness import paths

ROOT = paths.DATA.parents[1]


@pytest.mark.parametrize("place", tables.HOST_WAITS)
def test_a_place_exists(place):
    file, function = place.split(":")
    assert re.search(rf"def {function}\b", (ROOT / file).read_text())


@pytest.mark.parametrize("file", tables.HOST_TENSORS)
def test_a_file_exists(file):
    assert (ROOT / file).exists()


def test_each_entry_has_a_reason():
    counted = (reason for _, reason in tables.HOST_WAITS.values())
    reasons = [*counted, *tables.OF_TRANSFORMERS.values(), *tables.HOST_TENSORS.values()]
    assert all(len(reason.split()) > 3 for reason in reasons)
