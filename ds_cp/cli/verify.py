"""``ds_cp verify``: does this model train exactly when it is shared? Answered on this machine, before GPUs are rented."""

from __future__ import annotations

import copy
import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from ds_cp import config as key
from ds_cp.cli import compare, find
from ds_cp.cli.ranks import run_on_ranks
from ds_cp.cli.shrink import shrink, tiny_config
from ds_cp.cli.sizes import VOCAB

METHODS = ("ring", "ulysses", "hybrid", "allgather")
STAGES = (0, 1, 2, 3)
OUTSIDE = "embeddings, head"


@dataclass(frozen=True)
class Task:
    """What a model is trained for: which class of transformers builds it, and the batches that it is compared on."""

    auto_class: str
    batches: Callable[[torch.nn.Module, int], tuple[compare.Batch, ...]]


TASKS = {"causal-lm": Task("AutoModelForCausalLM", compare.causal_lm_batches)}


@dataclass(frozen=True)
class Finding:
    """One comparison: the errors of the loss and of each layer kind's gradients, or the sentence that refused it."""

    method: str
    stage: int | None
    batch: str = ""
    loss: float = float("inf")
    kinds: dict[str, float] = field(default_factory=dict)
    tolerance: float = 0.0
    refused: str = ""

    @property
    def exact(self) -> bool:
        return max(self.loss, *self.kinds.values(), 0.0) <= self.tolerance


def verify(
    model: Annotated[
        str,
        typer.Argument(help="a checkpoint or .gguf folder, a config.json, a cached model id, or a type such as llama"),
    ],
    config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="a DeepSpeed JSON; its key's kernel and layout are used"),
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="gloo processes on this machine")] = 2,
    full: Annotated[
        bool, typer.Option("--full", help="the real weights instead of a tiny model of the same kind")
    ] = False,
    method: Annotated[
        list[str] | None, typer.Option(help="only this method; may be repeated, and must then not be refused")
    ] = None,
    stages: Annotated[bool, typer.Option(help="each ZeRO stage too, with the method that auto chooses")] = True,
    task: Annotated[str, typer.Option(help=f"what it is trained for: {', '.join(TASKS)}")] = "causal-lm",
) -> None:
    """Compare loss and gradients with one process, for each method and ZeRO stage; exit 0 only if all are exact.

    An error is relative: of a parameter's gradient to its own norm, or to 1/1000 of the whole gradient's where that is
    larger; of several parameters, the largest.
    """
    console = Console() if sys.stdout.isatty() else Console(width=140)  # a pipe has no width of its own
    try:
        requested = dict(key.required_value(config)) if config else {}
        key.read(requested)
        _look_for(model)
    except (key.ConfigError, OSError, ValueError) as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(1) from error
    for name in ("size", "method", "ulysses_size"):
        requested.pop(name, None)
    if task not in TASKS or not set(method or ()) <= set(METHODS):
        raise typer.BadParameter(f"tasks are {', '.join(TASKS)}, methods {', '.join(METHODS)}")
    methods = tuple(method or (name for name in METHODS if name != "hybrid" or ranks > 3))
    with TemporaryDirectory() as folder:
        findings = run_on_ranks(ranks, findings_of, model, requested, methods, full, stages, task, folder)[0]
    console.print(_table(f"{model}, {ranks} ranks against one process", findings))
    compared = [one for one in findings if not one.refused]
    unwanted = [one for one in findings if one.refused and one.method in (method or ())]
    if unwanted or not compared or not all(one.exact for one in compared):
        raise typer.Exit(1)


def _look_for(model: str) -> None:
    """Make sure, before processes start, that a model's name leads somewhere.

    Raises:
        ValueError: says what was looked for, and the nearest model type.
    """
    import transformers

    if model not in transformers.CONFIG_MAPPING and not _source(model):
        find.config_of(model, types=True)


def _table(title: str, findings: list[Finding]) -> Table:
    kinds = [*dict.fromkeys(kind for one in findings for kind in one.kinds)]
    table = Table(title=title, title_justify="left")
    for column in ("method", "ZeRO", "batch", "loss", *kinds, "allowed", ""):
        table.add_column(column)
    for one in findings:
        stage = "-" if one.stage is None else str(one.stage)
        numbers = [one.loss, *(one.kinds.get(kind, 0.0) for kind in kinds), one.tolerance]
        cells = [""] * len(numbers) if one.refused else [f"{number:.1e}" for number in numbers]
        table.add_row(one.method, stage, one.batch, *cells, one.refused or ("exact" if one.exact else "WRONG"))
    return table


def findings_of(
    model: str, requested: dict[str, Any], methods: Iterable[str], full: bool, stages: bool, task: str, folder: str
) -> list[Finding]:
    """On every rank: each method without an engine, then each ZeRO stage with the method that auto chooses.

    What is found is right on rank 0, which alone knows the truth.
    """
    size = torch.distributed.get_world_size()
    original = build(model, full, TASKS[task])
    vocab = original.config.get_text_config(decoder=True).vocab_size if full else VOCAB
    kinds = layer_kinds(original)
    batches = TASKS[task].batches(original, vocab)
    truths = [_truth(original, batch, Path(folder)) for batch in batches]
    findings: list[Finding] = []
    for method in methods:
        findings += _with(original, {**requested, "size": size, "method": method}, batches, truths, kinds)
    if stages and any(not one.refused for one in findings):
        for stage in STAGES:
            twin = copy.deepcopy(original)
            findings += _with_engine(twin, {**requested, "size": size}, stage, batches, truths, kinds)
            del twin
            gc.collect()
    return findings


def build(model: str, full: bool, task: Task) -> torch.nn.Module:
    """The real model, or a tiny one of the same kind with random weights; fp32, eager, in training mode."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(attn_implementation="eager", dtype=torch.float32)
    auto_class = getattr(transformers, task.auto_class)
    source = _source(model)
    if full:
        loaded = auto_class.from_pretrained(model, **source, **settings)
        loaded.config.__dict__.pop("quantization_config", None)  # its weights are plain fp32 now
        return _without_dropout(loaded).train()
    known = transformers.CONFIG_MAPPING
    config = tiny_config(model) if model in known else shrink(transformers.AutoConfig.from_pretrained(model, **source))
    settings["experts_implementation"] = "eager"  # the grouped matmul of experts knows no fp64
    return auto_class.from_config(config, **settings).train()


def _source(model: str) -> dict[str, str]:
    """What ``from_pretrained`` needs to know of a folder that holds one GGUF file and no config."""
    folder = Path(model)
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() and not (folder / "config.json").exists() else []
    return {"gguf_file": files[0].name} if len(files) == 1 else {}


def _without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """Random numbers are other ones when tokens are shared, so both sides run without."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def layer_kinds(model: torch.nn.Module) -> dict[str, str]:
    """The kind of layer that each parameter belongs to: its attention as the config calls it, and whether it has experts."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    of_layer: dict[str, str] = {}
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        layer = re.match(r".*?\.(\d+)\.", name)
        if layer:
            index = int(layer[1])
            kind = types[index] if index < len(types) else "layers"
            experts = any("expert" in other for other in names if other.startswith(layer[0]))
            of_layer[layer[0]] = kind + (", experts" if experts else "")
    return {name: next((kind for layer, kind in of_layer.items() if name.startswith(layer)), OUTSIDE) for name in names}


def _truth(model: torch.nn.Module, batch: compare.Batch, folder: Path) -> compare.Truth | None:
    """On rank 0, while the others wait; the gradients lie in a file, so that they need no memory until they are read."""
    truth = None
    if torch.distributed.get_rank() == 0:
        found = compare.truth(model, batch)
        torch.save(found.gradients, folder / batch.name)
        truth = compare.Truth(found.loss, torch.load(folder / batch.name, mmap=True), found.own_error)
    torch.distributed.barrier()
    return truth


def _with(
    model: torch.nn.Module,
    requested: dict[str, Any],
    batches: tuple[compare.Batch, ...],
    truths: list[compare.Truth | None],
    kinds: dict[str, str],
) -> list[Finding]:
    """One method, on the model itself, which is as before afterwards."""
    import ds_cp
    from ds_cp import patches

    findings, before = [], patches.installed()
    try:
        ds_cp.context_parallel(model, {**requested, "unverified": "allow"})
        for batch, truth in zip(batches, truths):
            findings.append(_finding(requested["method"], None, batch, *compare.shared(model, batch), truth, kinds))
    except (ValueError, RuntimeError) as refusal:
        findings.append(Finding(requested["method"], None, refused=" ".join(str(refusal).split())))
    for patch in reversed(patches.installed()):
        if patch not in before and patch.target.startswith("model "):
            patches.remove(patch)
    return findings


def _finding(
    method: str,
    stage: int | None,
    batch: compare.Batch,
    loss: float,
    gradients: Iterable[tuple[str, torch.Tensor]],
    truth: compare.Truth | None,
    kinds: dict[str, str],
) -> Finding:
    if truth is None:
        for _ in gradients:  # the others' part of what rank 0 compares
            pass
        return Finding(method, stage, batch.name)
    errors = compare.errors(loss, gradients, truth)
    worst: dict[str, float] = {}
    for name, error in errors.by_parameter.items():
        worst[kinds[name]] = max(error, worst.get(kinds[name], 0.0))
    return Finding(method, stage, batch.name, errors.loss, worst, truth.tolerance)


def _with_engine(
    model: torch.nn.Module,
    requested: dict[str, Any],
    stage: int,
    batches: tuple[compare.Batch, ...],
    truths: list[compare.Truth | None],
    kinds: dict[str, str],
) -> list[Finding]:
    """Loss and ZeRO's reduced gradients of one step per batch, at a learning rate of zero."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    from ds_cp import _autoload, patches

    _autoload.activate()
    config = {
        "train_micro_batch_size_per_gpu": batches[0].inputs["input_ids"].size(0),
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        key.KEY: {**requested, "unverified": "allow"},
    }
    before = patches.installed()
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def gradients() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in engine.module.named_parameters():
            found = safe_get_full_grad(parameter) if parameter.requires_grad and name in kinds else None
            if found is not None:
                yield name, found.double()

    findings = []
    for batch, truth in zip(batches, truths):
        loss = engine(**batch.inputs).loss
        engine.backward(loss)
        findings.append(_finding("auto", stage, batch, loss.item(), gradients(), truth, kinds))
        engine.step()
    for patch in reversed(patches.installed()):
        if patch not in before and patch.target.startswith("model "):
            patches.remove(patch)
    engine.destroy()
    return findings
