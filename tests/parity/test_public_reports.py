"""Each report of another project's users is covered by a test: run here, or named and present elsewhere."""

import ast

import pytest

from data.cases.public_reports import REPORTS, Elsewhere, Parity
from harness import subject
from harness.cases import config_of
from harness.oracle import truth
from harness.paths import TESTS

TO_RUN = {name: case for name, case in REPORTS.items() if isinstance(case, Parity)}


@pytest.mark.parametrize("case", TO_RUN.values(), ids=[name.partition(":")[0] for name in TO_RUN])
def test_a_reported_case_is_exact(workers, case):
    config = config_of(case.method, case.size, case.layout)
    results = workers(case.size * len(case.batches)).run(
        subject.loss_and_gradients, case.model, config, case.batches, checkpointing=case.checkpointing
    )
    losses = [truth(case.model, batch).loss for batch in case.batches for _ in range(case.size)]
    subject.check(results, truth(case.model, *case.batches), losses=losses)


def test_every_test_named_by_a_report_exists():
    named = {test for case in REPORTS.values() if isinstance(case, Elsewhere) for test in case}
    missing = [test for test in sorted(named) if test.partition("::")[2] not in _functions(test.partition("::")[0])]
    assert not missing


def _functions(file):
    tree = ast.parse((TESTS / f"{file}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
