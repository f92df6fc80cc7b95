"""A training step of a Llama in DeepSpeed's engine, as one of eight ranks with a pretended card each."""

import pytest
from rehearsal import cases, verdict

pytestmark = pytest.mark.timeout(900)


def check(report):
    assert not verdict.problems(report)
    assert not verdict.over_bounds(report)
    assert all(verdict.attention_calls(report).values()), "attention did not run in the kernel that the case names"
    assert {message[4] for message in report["messages"]} == {report["case"]["rank"]}, "sent from another device"


@pytest.mark.parametrize("case", cases.selection(), ids=cases.name_of)
def test_a_step(runner, case):
    check(runner.report(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.other_versions(), ids=cases.name_of)
def test_packed_rows_in_other_versions_of_flash_attention(runner, case):
    check(runner.report(case))
