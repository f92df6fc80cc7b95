"""A rank that dies or hangs: the other ranks raise within the timeout and name the operation."""

import os
import time

import pytest
import torch

from harness import batches, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec

CP2 = {"size": 2, "method": "ring", "timeout": 5}
LLAMA = ModelSpec("llama")


def rank_1_stops(how, when):
    model = subject.changed_model(LLAMA, CP2 | {"timeout": 3})
    inputs = batches.make(BatchSpec("dense", 1, 37)).inputs
    model(**inputs)
    if torch.distributed.get_rank() == 1 and when == "before the next forward":
        os._exit(3) if how == "dies" else time.sleep(30)
    if torch.distributed.get_rank() == 1:

        def stop(*args):
            os._exit(3) if how == "dies" else time.sleep(30)

        model.model.layers[0].self_attn.o_proj.register_full_backward_hook(stop)
    model(**inputs).loss.backward()


STOPS = [
    ("dies", "before the next forward", "agreement on the batch of forward 1"),
    ("dies", "in backward", "'backward "),
]


@pytest.mark.parametrize("how, when, where", STOPS)
def test_a_rank_whose_neighbor_died_names_it_and_the_operation(workers, how, when, where):
    message = rf"rank 0 lost its (context-parallel|ring) group \[0, 1\] in .?{where}.*timeout 3 s"
    workers(2).run_expecting_error(rank_1_stops, message, how, when, dying=[1])


def test_a_rank_whose_neighbor_hangs_raises_after_the_timeout(workers):
    def rank_1_hangs():
        model = subject.changed_model(LLAMA, CP2 | {"timeout": 2})
        inputs = batches.make(BatchSpec("dense", 1, 37)).inputs
        model(**inputs)
        if torch.distributed.get_rank() == 1:
            time.sleep(6)
            raise RuntimeError("rank 0 lost its context-parallel group [0, 1] (woke up)")
        start = time.monotonic()
        try:
            model(**inputs)
        finally:
            assert time.monotonic() - start < 5

    workers(2).run_expecting_error(rank_1_hangs, r"rank 0 lost its context-parallel group \[0, 1\]")


def rank_1_raises(in_backward):
    model = subject.changed_model(LLAMA, CP2 | {"timeout": 2})
    inputs = batches.make(BatchSpec("dense", 1, 37)).inputs
    model(**inputs)
    layer = model.model.layers[0].mlp

    def fail(*args):
        if torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("what failed on rank 1")

    layer.register_full_backward_hook(fail) if in_backward else layer.register_forward_hook(fail)
    start = time.monotonic()
    try:
        model(**inputs).loss.backward()
    finally:
        assert time.monotonic() - start < 6


@pytest.mark.parametrize("in_backward, where", [(False, "forward rows from rank 1 of the ring"), (True, "backward ")])
def test_after_an_error_in_a_layer_on_one_rank_the_others_raise_after_the_timeout(workers, in_backward, where):
    """The other ranks wait in an exchange and cannot be told earlier; their message says that another rank has failed."""
    lost = rf"rank 0 lost its .* group \[0, 1\] in .?{where}.*timeout 2 s.*Another rank of the group has failed"
    messages = workers(2).run_expecting_error(rank_1_raises, f"{lost}|what failed on rank 1", in_backward)
    assert "lost its" in messages[0] and messages[1] == "OutOfMemoryError: what failed on rank 1"
