"""The benchmarks of training steps run, count what they say they count, and their contenders train the same model."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from ds_cp.cli.bench.probes import LiveStorages
from ds_cp.cli.bench.shape import TrainShape

TINY = ["--layers", "2", "--hidden", "64", "--heads", "4", "--kv-heads", "2", "--vocab", "512"]


def ds_cp(*arguments):
    command = [sys.executable, "-c", "from ds_cp.cli import main; main()", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "250"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(240)  # two contenders, each in processes that import everything anew
def test_the_steps_of_contenders_are_measured_side_by_side(tmp_path):
    output = tmp_path / "step.json"
    text = ds_cp("bench", "step", *TINY, "--seq-len", 256, "--rounds", 1, "--intermediate", 128, "--no-checkpointing",
                 "--contenders", "UlyssesSPAttentionHF,ds_cp ring", "--output", output)  # fmt: skip
    rows = {row["contender"]: row for row in json.loads(output.read_text())["rows"]}
    peer, ring = rows.values()
    assert peer["loss"] == pytest.approx(ring["loss"], rel=1e-5)
    assert peer["speed_ratio"] == peer["peak_ratio"] == 1
    assert peer["sent_mib"] == pytest.approx(peer["formula_mib"])
    assert ring["sent_mib"] == pytest.approx(0.75 * ring["formula_mib"])
    assert all(row["peak_mib"] > row["step_mib"] > 0 and row["live_mib"] > 0 for row in rows.values())
    assert "yunchang" in text and "ring-flash-attention" in text


@pytest.mark.slow
def test_scaling_compares_with_the_flops_and_finds_the_longest_row(tmp_path):
    output = tmp_path / "points.json"
    text = ds_cp("bench", "scaling", *TINY, "--lengths", 128, "--ranks", 2, "--within-gib", 1e-3, "--output", output)
    (point,) = json.loads(output.read_text())["points"]
    assert not point["fits"] and point["model_s"] == point["wall_s"]
    assert "longest row within 0.001 GiB per process: 0 tokens" in text


def test_live_storages_are_new_ones_that_somebody_holds():
    weight = torch.zeros(100)
    with LiveStorages() as storages:
        view, new = weight[:50], weight + 1
        gone = weight * 2
        del gone
        assert storages.live() == 400
        saved = (new.requires_grad_() ** 2).exp()  # the graph holds the square's base and the result, not the square
        assert storages.live() == 800
    assert view is not None and saved is not None


def test_flops_of_a_step_are_those_that_torch_counts():
    """torch counts attention as if every pair were computed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    shape = TrainShape(96, layers=2, hidden=64, heads=4, kv_heads=2, intermediate=80, vocab=128)
    model = AutoModelForCausalLM.from_config(shape.config(), attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(**shape.batch()).loss.backward()
    seen = (shape.seq_len + 1) / 2 / shape.seq_len
    attention = 3 * 2 * shape.layers * 2 * shape.seq_len**2 * shape.hidden
    assert math.isclose(shape.flops() + (1 - seen) * attention, counter.get_total_flops(), rel_tol=0.01)
