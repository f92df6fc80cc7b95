"""The benchmarks of training steps: they run, their counters are right, and all contenders train the same model."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from ds_cp import cli
from ds_cp.cli.bench import attention, peers, scaling, step
from ds_cp.cli.bench.contenders import build_model
from ds_cp.cli.bench.probes import LiveStorages
from ds_cp.cli.bench.shape import TrainShape
from harness.processes import run_command

TINY = ["--layers", "2", "--hidden", "64", "--heads", "4", "--kv-heads", "2", "--vocab", "512"]
SHAPE = TrainShape(64, layers=2, hidden=64, heads=4, kv_heads=2, intermediate=80, vocab=128, checkpointing=False)


def bench(*arguments):
    code, text = run_command("bench", *arguments)
    assert code == 0, text
    return text


@pytest.mark.timeout(240)  # two contenders, each in new processes
def test_the_steps_of_contenders_are_measured_side_by_side(tmp_path):
    output = tmp_path / "step.json"
    text = bench("step", *TINY, "--seq-len", 256, "--rounds", 1, "--intermediate", 128, "--no-checkpointing",
                 "--contenders", "UlyssesSPAttentionHF,ds_cp ring", "--output", output)  # fmt: skip
    rows = {row["contender"]: row for row in json.loads(output.read_text())["rows"]}
    peer, ring = rows.values()
    assert peer["loss"] == pytest.approx(ring["loss"], rel=1e-5)
    assert peer["speed_ratio"] == peer["peak_ratio"] == 1
    assert peer["sent_mib"] == pytest.approx(peer["formula_mib"])
    assert ring["sent_mib"] == pytest.approx(0.75 * ring["formula_mib"])
    assert all(row["peak_mib"] > row["step_mib"] > 0 and row["live_mib"] > 0 for row in rows.values())
    missing = json.loads(output.read_text())["not measured"]
    assert {"yunchang ring", "yunchang ulysses", "ring-flash-attention"} <= set(missing)
    assert all(f"{name}: not measured, {reason}." in text for name, reason in missing.items())


@pytest.mark.parametrize(
    "name, module, said",
    [
        ("ring-flash-attention", None, "does not import here (import of ring_flash_attn halted"),
        ("yunchang ring", None, "does not import here (import of yunchang halted"),
        ("yunchang ulysses", ModuleType("yunchang"), "needs CUDA: its torch path calls"),
        ("ring-flash-attention", ModuleType("ring_flash_attn"), "needs CUDA: its only kernel, flash-attn,"),
    ],
)
def test_a_peer_that_cannot_run_here_gives_the_reason(monkeypatch, name, module, said):
    monkeypatch.setitem(sys.modules, peers._PACKAGES[name.split()[0]], module)
    assert peers.why_not(name, SHAPE).startswith(said)


@pytest.mark.parametrize("chunks", [2, 4], ids=["contiguous", "zigzag"])
def test_peers_with_an_attention_function_train_like_one_process(workers, chunks):
    losses = workers(2).run(two_steps_by_a_function, chunks)
    model = build_model(SHAPE, "sdpa")
    adam, want = torch.optim.AdamW(model.parameters(), lr=1e-4), []
    for _ in range(2):
        want.append(model(**SHAPE.batch()).loss)
        want[-1].backward()
        adam.step()
    assert losses == [pytest.approx([x.item() for x in want], rel=2e-5)] * 2


def two_steps_by_a_function(chunks):
    from torch.distributed.nn.functional import all_gather

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    whole = torch.arange(SHAPE.seq_len)[None]
    held = [peers.shard(dict.fromkeys(("input_ids", "labels", "position_ids"), whole), chunks, r, world)["input_ids"][0]
            for r in range(world)]  # fmt: skip
    may_see = torch.cat(held) <= held[rank][:, None]

    def attention(query, key, value, scale):  # a simple version of what a package does
        key, value = (torch.cat(all_gather(x.contiguous()), 1).repeat_interleave(2, 2) for x in (key, value))
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, may_see, scale=scale).transpose(1, 2)

    contender = peers.AttentionFunction(SHAPE, attention, chunks)
    return [contender.step() for _ in range(2)]


def test_bench_without_a_subcommand_runs_all_measurements_with_their_defaults(monkeypatch, tmp_path):
    runs = []
    for module, name in ((attention, "bench_attention"), (step, "bench_step"), (scaling, "bench_scaling")):

        def measurement(ranks: int = 2, output: Path | None = None, plot: Path | None = None):
            runs.append((ranks, output.name))

        monkeypatch.setattr(module, name, measurement)
    done = CliRunner().invoke(cli.app(), ["bench", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.exception
    assert runs == [(2, "attention.json"), (2, "step.json"), (2, "scaling.json")]


@pytest.mark.slow
def test_scaling_compares_with_the_flops_and_finds_the_longest_row(tmp_path):
    output = tmp_path / "points.json"
    text = bench("scaling", *TINY, "--lengths", 128, "--ranks", 2, "--within-gib", 1e-3, "--output", output)
    (point,) = json.loads(output.read_text())["points"]
    assert not point["fits"] and point["model_s"] == point["wall_s"]
    assert "longest row within 0.001 GiB per process: 0 tokens" in text


def test_live_storages_counts_new_storages_that_are_still_referenced():
    weight = torch.zeros(100)
    with LiveStorages() as storages:
        view, new = weight[:50], weight + 1
        gone = weight * 2
        del gone
        assert storages.live_bytes() == 400
        saved = (new.requires_grad_() ** 2).exp()  # autograd saves the input of the square and the result of exp
        assert storages.live_bytes() == 800
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


def test_every_contender_has_a_formula():
    from ds_cp.cli.bench.contenders import BUILDERS
    from ds_cp.cli.bench.step import _bytes_by_formula

    for name in (*BUILDERS, *peers.BUILDERS):
        assert (_bytes_by_formula(name, SHAPE, 2) == 0) == (name == "data parallel")
