"""The rehearsal must see each mistake that is planted in a run, and nothing in the same run without one."""

import re

import pytest
from rehearsal import cases, verdict

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("case", [cases.SMALL], ids=["no mistake"])
def test_without_a_mistake_there_is_nothing_to_report(runner, case):
    assert not verdict.problems(runner.report(case))


@pytest.mark.parametrize(
    "case", [cases.SMALL | {"plant": name} for name in cases.MISTAKES], ids=lambda case: case["plant"]
)
def test_a_planted_mistake_is_reported(runner, case):
    said = verdict.problems(runner.report(case))
    expected = cases.MISTAKES[case["plant"]]
    assert any(re.match(expected, problem) for problem in said), f"expected {expected!r}, the rehearsal says {said}"


@pytest.mark.parametrize(
    "case", [cases.PLAIN | {"plant": name} for name in cases.BOUNDS], ids=lambda case: case["plant"]
)
def test_a_mistake_that_costs_too_much_breaks_a_bound(runner, case):
    report = runner.report(case)
    assert not verdict.problems(report)
    kind = cases.BOUNDS[case["plant"]]
    assert any(problem.startswith(kind) for problem in verdict.over_bounds(report))
