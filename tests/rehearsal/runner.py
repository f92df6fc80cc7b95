"""The test's side: cases go to one process in which everything is fake, reports come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterable

from rehearsal import build

START_SECONDS = 240
CASE_SECONDS = 240
JOBS = min(2, os.cpu_count() or 1)


class Runner:
    """Runs cases, each in a process of its own, forked from one that has imported all libraries.

    Args:
        folder: for the compiled guard.
        planned: cases that tests will ask for; they run ahead, as many at a time as there are cores, two at most.
    """

    def __init__(self, folder: Path, planned: Iterable[dict[str, Any]] = ()):
        self._reports = tempfile.TemporaryDirectory(prefix="rehearsal_reports_")
        self._asked: dict[str, Path] = {}
        self._log = open(Path(self._reports.name) / "log", "w+")
        environment = {
            **os.environ, "DS_ACCELERATOR": "cuda", "DS_CP_REHEARSAL_GUARD": str(build.build(folder)),
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1",
        }  # fmt: skip
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
            environment.pop(name, None)
        command = [sys.executable, "-P", str(Path(__file__).with_name("server.py")), str(JOBS)]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT, env=environment, text=True
        )
        for case in planned:
            self._ask(case, wanted=False)

    def _ask(self, case: dict[str, Any], wanted: bool) -> Path:
        key = json.dumps(case, sort_keys=True)
        if key not in self._asked:
            file = Path(self._reports.name) / f"{len(self._asked)}.json"
            request = {"case": case, "file": str(file), "seconds": CASE_SECONDS, "wanted": wanted}
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            self._asked[key] = file
        return self._asked[key]

    def report(self, case: dict[str, Any]) -> dict[str, Any]:
        """What happened in a case; see :func:`rehearsal.scenario.run`."""
        file = self._ask(case, wanted=True)
        deadline = time.monotonic() + START_SECONDS + CASE_SECONDS
        while not file.exists():
            assert self._server.poll() is None, f"the rehearsal's process ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"no report after {START_SECONDS + CASE_SECONDS} s:\n{self.log()}"
            time.sleep(0.02)
        for _ in range(50):  # a report of a child that died is not written at once
            try:
                return json.loads(file.read_text())
            except json.JSONDecodeError:
                time.sleep(0.02)
        raise AssertionError(f"{file} is no report")

    def log(self) -> str:
        self._log.flush()
        return (Path(self._reports.name) / "log").read_text()[-6000:]

    def close(self) -> None:
        """End the process and its children; reports that nobody asked for are lost."""
        self._server.stdin.close()  # it then ends its children and itself
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._log.close()
        self._reports.cleanup()
