"""On which device the groups send their first messages, where nobody but the start of a run chooses one."""

import pytest

pytestmark = pytest.mark.timeout(900)

RANK = 3
ON_HOST = {"kind": "engine", "steps": 0, "on_host": True, "method": "hybrid", "stage": 2, "batch": "dense", "checkpointing": "off",
           "memory": "plain", "kernel": "torch", "rank": RANK}  # fmt: skip
LOOP = {"kind": "plain_loop", "method": "ring", "rank": RANK}


def first_messages(report):
    """(device of the tensors, current device) of each group's first message, by the backend that the group asked for."""
    first = {}
    for _, _, group, device, current, _ in report["messages"]:
        first.setdefault(group, (report["backends"].get(group, "world"), device, current))
    return list(first.values())


@pytest.mark.parametrize("case", [ON_HOST, LOOP], ids=["deepspeed.initialize", "context_parallel"])
def test_the_device_of_the_rank_is_current_before_the_first_message(runner, case):
    report = runner.report(case)
    assert not report["error"] and not report["faults"]
    assert report["chosen"] and set(report["chosen"]) == {RANK}
    messages = first_messages(report)
    assert {backend for backend, _, _ in messages} >= {"nccl", "gloo"}
    for backend, device, current in messages:
        assert current == RANK and device == ("cpu" if backend == "gloo" else f"cuda:{RANK}")


@pytest.mark.parametrize("case", [ON_HOST | {"plant": "device_chosen_too_late"}], ids=["too late"])
def test_a_message_from_the_first_device_is_reported(runner, case):
    report = runner.report(case)
    assert ("nccl", "cuda:0", 0) in first_messages(report)
    assert any(kind == "device" for kind, *_ in report["faults"])
