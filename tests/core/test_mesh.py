"""A rank chooses its device before its first message, and connects to every peer before the first batch."""

from types import SimpleNamespace

import pytest
import torch

from ds_cp import mesh, process_group
from harness import engine, models
from harness.cases import config_of
from harness.models import ModelSpec


def order_of_device_and_messages(config):
    from deepspeed.accelerator import get_accelerator

    happened, accelerator, send = [], get_accelerator(), mesh.Group.all_reduce

    def all_reduce(group, tensor, what):
        happened.append(what)
        return send(group, tensor, what)

    type(accelerator).set_device = lambda self, index: happened.append(index)
    mesh.Group.all_reduce = all_reduce
    engine.initialize(config, models.build(ModelSpec("llama"), torch.float32))
    return happened


def test_deepspeed_ranks_choose_their_device_before_the_first_message(workers):
    config = engine.json_config(config_of("ring", 2), 2)
    for rank, happened in enumerate(workers(2).run(order_of_device_and_messages, config)):
        assert happened[0] == rank
        assert "first contact" in happened


class Cards:
    """An accelerator with four cards, as far as :func:`ds_cp.mesh.choose_device` uses it."""

    def __init__(self, current):
        self.chosen, self.current = None, current

    device_name = staticmethod(lambda: "cuda")
    device_count = staticmethod(lambda: 4)

    def current_device(self):
        return self.current

    def set_device(self, index):
        self.chosen = index


ON_CPU, ON_CARD_2 = torch.device("cpu"), torch.device("cuda", 2)


@pytest.mark.parametrize(
    ("weights", "current", "local_rank", "chosen"),
    [
        (ON_CARD_2, 0, "3", 2),  # the device of the model
        (ON_CPU, 0, "3", 3),  # the local rank, as in DeepSpeed
        (ON_CPU, 1, "3", None),  # the script has set a device already
        (ON_CPU, 0, "7", None),  # more local ranks than visible cards
        (ON_CPU, 0, None, None),
    ],
)
def test_without_an_engine_a_rank_chooses_its_device(monkeypatch, weights, current, local_rank, chosen):
    cards = Cards(current)
    monkeypatch.setattr(mesh, "get_accelerator", lambda: cards)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    mesh.choose_device(SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=weights)])))
    assert cards.chosen == chosen


def messages_at_the_start(ring, ulysses):
    pairs, send = [], process_group.Group.isend_irecv

    def isend_irecv(group, sends, receives, what):
        pairs.append(
            (group.name, [group.ranks[peer] for peer, _ in sends], [group.ranks[peer] for peer, _ in receives])
        )
        return send(group, sends, receives, what)

    process_group.Group.isend_irecv = isend_irecv
    mesh.build(ring, ulysses, 30.0)
    return pairs


def test_every_pair_of_an_axis_is_connected_before_the_first_batch(workers):
    for rank, pairs in enumerate(workers(4).run(messages_at_the_start, 2, 2)):
        row, column = divmod(rank, 2)
        peers = {name: sent for name, sent, _ in pairs}
        assert sorted(peers["context-parallel"]) == [other for other in range(4) if other != rank]
        assert peers["ring"] == [2 * (1 - row) + column]
        assert peers["ulysses"] == [2 * row + 1 - column]
        assert all(sent == received for _, sent, received in pairs)


def test_an_error_of_the_own_device_is_not_taken_for_a_lost_rank():
    group = process_group.Group("ring", (4, 5), 1, None, 60.0)

    class Work:
        def wait(self):
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    pending = process_group.Pending(group, [Work()], "forward rows from rank 0 of the ring", ())
    with pytest.raises(process_group.DeviceError, match="device of rank 5 failed.*CUDA_LAUNCH_BLOCKING"):
        pending.wait()
