"""Dry runs of the GPU scripts on CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parent


def dry_run(script, *arguments):
    command = [sys.executable, str(GPU / script), "--device", "cpu", *map(str, arguments)]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # compilation is tested in test_merge.py
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_every_part_is_measured(tmp_path):
    text = dry_run("measure.py", "--output", tmp_path / "gpu.json")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["matmul TFLOP/s"] > 0
    assert [line["ranks"] for line in found["attention"]] == [1, 2, 4, 8]
    for line in found["attention"]:
        assert line["ms"] > 0 and line["one-shot / P over it"] > 0 and line["merge and bookkeeping"] < 1
        assert line["TFLOP/s"] == pytest.approx(line["of matmul rate"] * found["matmul TFLOP/s"])
    assert [line["merge"] for line in found["merge"]] == ["pass by pass", "fused"]
    losses = {(line["mode"], line["tokens"]): line["verdict"] for line in found["longest"]}
    assert len(losses) == 6 and {loss.split()[0] for loss in losses.values()} == {"loss"}
    for tokens in (64, 128):  # all modes train the same model
        assert len({losses[mode, tokens] for mode, length in losses if length == tokens}) == 1
    assert all(f"\n{part}\n\n| " in text for part in ("attention", "merge", "longest"))


@pytest.mark.timeout(120)
def test_kernels_are_checked_over_stand_ins():
    text = dry_run("check.py", "--kernels", "torch", "--length", 64)
    assert "0 of the cases that ran are wrong" in text
