"""Model types: forward and backward passes of a tiny model, dense rows, without an engine."""

import pytest
from rehearsal import cases, tables, verdict

pytestmark = pytest.mark.timeout(900)


def check(report):
    assert not verdict.problems(report)
    assert "refused" not in report
    assert report["regions"] > 0, "no region was opened: the model ran whole on every rank"
    allowed = tables.WITHOUT_GRADIENT.get(report["case"]["type"], ())
    lost = [name for name in report["without_gradient"] if not any(word in name for word in allowed)]
    assert not lost, "parameters without a gradient"


@pytest.mark.parametrize("case", cases.of_types(cases.SOME_TYPES), ids=cases.name_of)
def test_some_model_types(runner, case):
    check(runner.report(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.of_types(cases.MORE_TYPES), ids=cases.name_of)
def test_more_model_types(runner, case):
    check(runner.report(case))


def test_there_are_sixty():
    names = cases.SOME_TYPES + cases.MORE_TYPES
    assert len(set(names)) == len(names) >= 60
