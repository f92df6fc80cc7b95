"""``ds_cp verify``: does this model train exactly when it is shared? Answered on this machine, before GPUs are rented."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from ds_cp import config as key
from ds_cp.cli import compare
from ds_cp.cli.ranks import run_on_ranks
from ds_cp.cli.shrink import VOCAB, shrink, tiny_config

METHODS = ("ring", "ulysses", "allgather")
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Finding:
    """One comparison: its error, what is allowed, or the sentence that refused it."""

    method: str
    stage: int | None
    batch: str
    error: float = float("inf")
    tolerance: float = 0.0
    refused: str = ""

    @property
    def exact(self) -> bool:
        return self.error <= self.tolerance


def verify(
    model: Annotated[str, typer.Argument(help="a checkpoint folder, a model type such as llama, or a cached model id")],
    config: Annotated[Path | None, typer.Option(help="a DeepSpeed JSON; its key's kernel and layout are used")] = None,
    ranks: Annotated[int, typer.Option(help="gloo processes on this machine")] = 2,
    full: Annotated[
        bool, typer.Option("--full", help="the real weights instead of a tiny model of the same kind")
    ] = False,
) -> None:
    """Compare loss and gradients with one process, for each method and ZeRO stage; exit 0 only if all are exact."""
    console = Console()
    asked = dict(key.find(str(config)) or {}) if config else {}
    for name in ("size", "method", "ulysses_size"):
        asked.pop(name, None)
    findings = run_on_ranks(ranks, findings_of, model, asked, full)[0]
    table = Table(title=f"{model}, {ranks} ranks against one process", title_justify="left")
    for column in ("method", "ZeRO", "batch", "error", "allowed", ""):
        table.add_column(column)
    for one in findings:
        stage = "-" if one.stage is None else str(one.stage)
        numbers = ("", "") if one.refused else (f"{one.error:.1e}", f"{one.tolerance:.1e}")
        table.add_row(one.method, stage, one.batch, *numbers, "exact" if one.exact else one.refused or "WRONG")
    console.print(table)
    compared = [one for one in findings if not one.refused]
    if not compared or not all(one.exact for one in compared):
        raise typer.Exit(1)


def findings_of(model: str, asked: dict[str, Any], full: bool) -> list[Finding]:
    """On every rank: each method without an engine, then each ZeRO stage with the method that auto chooses."""
    import ds_cp

    size = torch.distributed.get_world_size()
    original = _build(model, full)
    vocab = original.config.get_text_config(decoder=True).vocab_size
    batches = compare.batches(vocab if full else VOCAB)
    truths = {batch.name: compare.truth(original, batch) for batch in batches}
    findings = []
    for method in METHODS:
        twin = copy.deepcopy(original)
        try:
            ds_cp.context_parallel(twin, {**asked, "size": size, "method": method, "unverified": "allow"})
            for batch in batches:
                error = compare.error(compare.shared(twin, batch), truths[batch.name].want)
                findings.append(Finding(method, None, batch.name, error, truths[batch.name].tolerance))
        except (ValueError, RuntimeError) as refusal:
            findings.append(Finding(method, None, "", refused=" ".join(str(refusal).split())))
    if any(one.exact for one in findings):
        for stage in STAGES:
            for batch in batches:
                got = _with_engine(
                    copy.deepcopy(original), {**asked, "size": size, "unverified": "allow"}, stage, batch
                )
                error = compare.error(got, truths[batch.name].want)
                findings.append(Finding("auto", stage, batch.name, error, truths[batch.name].tolerance))
    return findings


def _build(model: str, full: bool) -> torch.nn.Module:
    """The real model, or a tiny one of the same kind with random weights; fp32, eager, in training mode."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = dict(attn_implementation="eager", dtype=torch.float32)
    if full:
        return AutoModelForCausalLM.from_pretrained(model, **settings).train()
    config = tiny_config(model) if model in CONFIG_MAPPING else shrink(AutoConfig.from_pretrained(model))
    settings["experts_implementation"] = "eager"  # the grouped matmul of experts knows no fp64
    return AutoModelForCausalLM.from_config(config, **settings).train()


def _with_engine(model: torch.nn.Module, asked: dict, stage: int, batch: compare.Batch) -> tuple[float, dict]:
    """Loss and ZeRO's reduced gradients of one step."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    from ds_cp import _autoload

    _autoload.activate()
    config = {
        "train_micro_batch_size_per_gpu": batch.inputs["input_ids"].size(0),
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        key.KEY: asked,
    }
    names = {name for name, parameter in model.named_parameters()}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    loss = engine(**batch.inputs).loss
    engine.backward(loss)
    found = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters() if n in names}
    return loss.item(), {name: gradient.double() for name, gradient in found.items() if gradient is not None}
