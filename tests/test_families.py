"""Every causal LM type is exact or refused: the table that start-up consults, checked against the models themselves."""

import sys
from pathlib import Path

import pytest

from harness import families

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import sweep_families as sweep  # noqa: E402

TABLE = sweep.read()
EXACT = sorted(name for name, (verdict, _) in TABLE.items() if verdict == "exact")


def test_the_table_names_every_type_of_the_installed_transformers():
    assert set(TABLE) == set(families.causal_lm_types())
    assert {verdict for verdict, _ in TABLE.values()} <= set(sweep.MEANING)


def test_start_up_and_the_page_say_what_the_table_says():
    from ds_cp.patches.transformers import support, verified

    assert support.VERIFIED == verified.TYPES | set(EXACT)
    assert sweep.PAGE.read_text() == sweep.page(TABLE)


@pytest.mark.parametrize("model_type", EXACT[::9])
def test_a_sample_of_the_exact_types_is_exact(model_type):
    found = sweep.compared(model_type)
    assert found.verdict == "exact", found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(TABLE))
def test_every_type_is_what_the_table_says(model_type):
    found = sweep.compared(model_type)
    assert found.verdict == TABLE[model_type][0], found
