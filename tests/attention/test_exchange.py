"""Receive buffers of an exchange: how many are allocated in a pass, and when they are reused."""

import pytest
import torch

from ds_cp.attention.exchange import PeerExchange, RotatingBuffers
from ds_cp.cli.bench import in_process
from ds_cp.layout import Layout
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import OPEN, Band
from ds_cp.mask.schedule import schedule

RANKS = 5


@pytest.mark.parametrize("ahead, memories", [(1, 2), (2, 3), (RANKS - 1, RANKS - 1)])
def test_a_pass_allocates_as_many_receive_buffers_as_are_in_use(ahead, memories):
    layout = Layout(8 * RANKS, RANKS, 1, "contiguous")
    segments = Documents.find(1, 8 * RANKS).segments(Band(OPEN, OPEN))

    def rank(group):
        exchange = PeerExchange(group, schedule(segments, layout, group.rank), ahead, "forward")
        key = torch.full((1, 2, 8, 4), float(group.rank))
        held, home = [], (torch.zeros_like(key), torch.zeros_like(key))
        for step, k, v in exchange.received(key, key + 0.5):
            assert (k == step.source).all() and (v == step.source + 0.5).all()
            held += [k] if step.source != group.rank else []  # held, so that the allocator cannot reuse it
            if step.source != group.rank:
                exchange.return_gradients(step, torch.full((8, 1, 2, 8), float(group.rank)), home)
        exchange.finish(home)
        assert all((x == sum(range(RANKS)) - group.rank).all() for x in home)
        return len({k.untyped_storage().data_ptr() for k in held})

    assert in_process.run(RANKS, rank) == [memories] * RANKS


def test_a_buffer_grows_to_the_largest_request_and_is_reused():
    like, memory = torch.zeros(1), RotatingBuffers(2)
    pieces = [memory.take(like, (n, 3), torch.float64) for n in (2, 4, 6, 1, 5, 0)]
    assert [tuple(piece.shape) for piece in pieces] == [(n, 3) for n in (2, 4, 6, 1, 5, 0)]
    places = [piece.untyped_storage().data_ptr() for piece in pieces]
    assert places[4] == places[2] != places[0]  # the third request is larger than the buffer of the first
    assert places[1] == places[3] == places[5]


def test_rows_of_another_width_get_a_separate_buffer():
    memory = RotatingBuffers(1)
    assert [tuple(memory.take(torch.zeros(1), shape, torch.float64).shape) for shape in ((4, 3), (2, 5), (4, 3))] == [
        (4, 3), (2, 5), (4, 3)
    ]  # fmt: skip
