"""Workers: an error, a death or a hang of a rank fails the test and names the rank."""

import os
import signal

import pytest
import torch
import torch.distributed

from harness.workers import RanksFailed, workers


def sum_of_ranks():
    value = torch.tensor(torch.distributed.get_rank() + 1)
    torch.distributed.all_reduce(value)
    return value.item()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_results_are_returned_by_rank(world):
    assert workers(world).run(sum_of_ranks) == [world * (world + 1) // 2] * world


def fault_of_rank_1(fault):
    if torch.distributed.get_rank() == 1:
        fault()
    sum_of_ranks()


def raise_an_error():
    raise ValueError("a fault of its own")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = [
    (raise_an_error, "rank \\[1\\]: ValueError: a fault of its own"),
    (die, "rank \\[1\\]: died without a report, signal SIGKILL"),
    (signal.pause, "rank \\[1\\]: hung for 2 s\n(.*\n)*.*fault_of_rank_1"),
]


@pytest.mark.parametrize("fault, message", FAULTS, ids=["an error", "a death", "a hang"])
def test_an_error_or_death_or_hang_of_one_rank_fails_the_test(fault, message):
    with pytest.raises(RanksFailed, match=message):
        workers(2, timeout=2).run(fault_of_rank_1, fault)


def test_an_expected_error_must_be_raised_on_every_rank():
    assert workers(2).run_expecting_error(raise_an_error, "own") == ["ValueError: a fault of its own"] * 2
    with pytest.raises(AssertionError, match="no match for 'other'"):
        workers(2).run_expecting_error(raise_an_error, "other")
    with pytest.raises(AssertionError, match="{0: 'hung', 1: 'raised'}"):
        workers(2, timeout=2).run_expecting_error(fault_of_rank_1, "fault", raise_an_error)
    with pytest.raises(AssertionError, match="{0: 'returned', 1: 'returned'}"):
        workers(2).run_expecting_error(sum_of_ranks, "")
