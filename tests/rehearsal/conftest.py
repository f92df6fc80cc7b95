"""The process that rehearses, one per session."""

from pathlib import Path

import pytest
from rehearsal import build
from rehearsal.runner import Runner

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def runner(request):
    """``runner.report(case)`` runs a case; those of all tests that were collected run ahead."""
    if reason := build.why_not():
        pytest.skip(reason)
    of_session = [item for item in request.session.items if HERE in item.path.parents and hasattr(item, "callspec")]
    planned = [item.callspec.params["case"] for item in of_session if "case" in item.callspec.params]
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("rehearsal") if cache else request.getfixturevalue("tmp_path_factory").mktemp("rehearsal")
    made = Runner(Path(folder), planned)
    yield made
    made.close()
