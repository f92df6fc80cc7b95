"""``ds_cp verify``: does a model train exactly under context parallelism? Compared on the CPUs of this machine."""

from __future__ import annotations

import copy
import gc
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

from ds_cp import config as cp_config
from ds_cp.cli import compare
from ds_cp.cli.model_argument import build_model, check_model
from ds_cp.cli.ranks import run_on_ranks
from ds_cp.cli.sizes import VOCAB

METHODS = ("ring", "ulysses", "hybrid", "allgather")
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Task:
    """What a model is trained for.

    Attributes:
        auto_class: Name of the class of transformers that builds the model.
        batches: Function of a model and the size of its vocabulary that returns the batches to compare.
    """

    auto_class: str
    batches: Callable[[torch.nn.Module, int], tuple[compare.Batch, ...]]


TASKS = {"causal-lm": Task("AutoModelForCausalLM", compare.causal_lm_batches)}


@dataclass(frozen=True)
class Comparison:
    """One line of the table: errors on one batch, or why the method refuses the model.

    Attributes:
        method: Method of context parallelism.
        stage: ZeRO stage; None without a DeepSpeed engine.
        batch: Name of the batch.
        loss: Relative error of the loss.
        kinds: Largest relative error of a gradient by kind of layer.
        tolerance: Largest error that counts as exact.
        refused: Error message of a method that refuses the model or the batch; empty otherwise.
    """

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


@dataclass(frozen=True)
class Case:
    """What every method and ZeRO stage is compared on.

    Attributes:
        entry: Config entry ``context_parallel``; each comparison completes it.
        batches: The batches.
        references: Results of one process by batch; None on all ranks but rank 0.
        layer_kinds: Kind of layer by parameter name.
    """

    entry: dict[str, Any]
    batches: tuple[compare.Batch, ...]
    references: tuple[compare.Reference | None, ...]
    layer_kinds: dict[str, str]


def verify(
    model: Annotated[
        str,
        typer.Argument(
            help="Checkpoint folder, folder with one .gguf file, config.json, id of a cached model, or type such as llama."
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='DeepSpeed config (JSON); its "context_parallel" is used without size, method and ulysses_size.',
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Number of gloo processes on this machine.")] = 2,
    full: Annotated[
        bool,
        typer.Option("--full", help="Use the real weights instead of a tiny model with the same kinds of layers."),
    ] = False,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Compare only this method; may be repeated. If it refuses the model, the exit status is 1."),
    ] = None,
    stages: Annotated[
        bool, typer.Option(help='Compare each ZeRO stage, too, with the method that "auto" chooses.')
    ] = True,
    task: Annotated[str, typer.Option(help=f"What the model is trained for: {', '.join(TASKS)}.")] = "causal-lm",
) -> None:
    """Compare loss and gradients with those of one process, for each method and ZeRO stage.

    The exit status is 0 only if all of them are exact. Errors are relative: the error of a parameter's gradient to its norm,
    or to 1/1000 of the norm of all gradients where that is larger. The table lists the largest error of each kind of layer.
    """
    console = Console() if sys.stdout.isatty() else Console(width=140)  # without a terminal, rich would wrap at 80
    try:
        entry = dict(cp_config.required_value(config)) if config else {}
        cp_config.read(entry)
        check_model(model)
    except (cp_config.ConfigError, OSError, ValueError) as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(1) from error
    for name in ("size", "method", "ulysses_size"):
        entry.pop(name, None)
    if task not in TASKS or not set(method or ()) <= set(METHODS):
        raise typer.BadParameter(f"--task must be one of {', '.join(TASKS)}, --method one of {', '.join(METHODS)}")
    methods = tuple(method or (name for name in METHODS if name != "hybrid" or ranks > 3))
    with TemporaryDirectory() as folder:
        comparisons = run_on_ranks(ranks, compare_all, model, entry, methods, full, stages, task, folder)[0]
    console.print(_table(f"{model}, {ranks} ranks against one process", comparisons))
    compared = [one for one in comparisons if not one.refused]
    unwanted = [one for one in comparisons if one.refused and one.method in (method or ())]
    if unwanted or not compared or not all(one.exact for one in compared):
        raise typer.Exit(1)


def _table(title: str, comparisons: list[Comparison]) -> Table:
    kinds = [*dict.fromkeys(kind for one in comparisons for kind in one.kinds)]
    table = Table(title=title, title_justify="left")
    for column in ("method", "ZeRO", "batch", "loss", *kinds, "allowed", ""):
        table.add_column(column)
    for one in comparisons:
        stage = "-" if one.stage is None else str(one.stage)
        numbers = [one.loss, *(one.kinds.get(kind, 0.0) for kind in kinds), one.tolerance]
        cells = [""] * len(numbers) if one.refused else [f"{number:.1e}" for number in numbers]
        table.add_row(one.method, stage, one.batch, *cells, one.refused or ("exact" if one.exact else "WRONG"))
    return table


def compare_all(
    model: str, entry: dict[str, Any], methods: Iterable[str], full: bool, stages: bool, task: str, folder: str
) -> list[Comparison]:
    """Compare each method without a DeepSpeed engine, then each ZeRO stage with the method that ``"auto"`` chooses.

    Runs on every rank. The errors are valid on rank 0, which alone holds the reference.

    Args:
        model: Argument of the command.
        entry: Config entry ``context_parallel`` without size and method.
        methods: Methods to compare.
        full: Whether to use the real weights.
        stages: Whether to compare the ZeRO stages.
        task: Key of :data:`TASKS`.
        folder: Folder for the reference gradients.
    """
    original = build_model(model, TASKS[task].auto_class, full)
    model_config: Any = original.config
    vocab = model_config.get_text_config(decoder=True).vocab_size if full else VOCAB
    batches = TASKS[task].batches(original, vocab)
    references = tuple(_reference(original, batch, Path(folder)) for batch in batches)
    entry = {**entry, "size": torch.distributed.get_world_size(), "unverified": "allow"}
    case = Case(entry, batches, references, compare.layer_kinds(original))
    comparisons: list[Comparison] = []
    for method in methods:
        comparisons += _compare_method(original, method, case)
    if stages and any(not one.refused for one in comparisons):
        for stage in ZERO_STAGES:
            comparisons += _compare_stage(copy.deepcopy(original), stage, case)
            gc.collect()
    return comparisons


def _reference(model: torch.nn.Module, batch: compare.Batch, folder: Path) -> compare.Reference | None:
    """The reference on rank 0, None on the others. Its gradients are mapped from a file, so they take memory only when read."""
    reference = None
    if torch.distributed.get_rank() == 0:
        in_memory = compare.reference(model, batch)
        torch.save(in_memory.gradients, folder / batch.name)
        gradients = torch.load(folder / batch.name, mmap=True)
        reference = compare.Reference(in_memory.loss, gradients, in_memory.fp32_error)
    torch.distributed.barrier()
    return reference


def _compare_method(model: torch.nn.Module, method: str, case: Case) -> list[Comparison]:
    """Compare a method without a DeepSpeed engine. ``model`` is attached and detached again."""
    import ds_cp
    from ds_cp import patches

    comparisons, before = [], patches.installed()
    try:
        ds_cp.context_parallel(model, {**case.entry, "method": method})
        for batch, reference in zip(case.batches, case.references):
            loss, gradients = compare.context_parallel(model, batch)
            comparisons.append(_comparison(method, None, batch, loss, gradients, reference, case.layer_kinds))
    except (ValueError, RuntimeError) as refusal:
        comparisons.append(Comparison(method, None, refused=" ".join(str(refusal).split())))
    _remove_patches_of_models(before)
    return comparisons


def _compare_stage(model: torch.nn.Module, stage: int, case: Case) -> list[Comparison]:
    """Compare the loss and the gradients that a ZeRO stage has reduced, one step per batch at a learning rate of zero."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    from ds_cp import _autoload, patches

    _autoload.activate()
    config = {
        "train_micro_batch_size_per_gpu": case.batches[0].inputs["input_ids"].size(0),
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        cp_config.KEY: case.entry,
    }
    before = patches.installed()
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def gradients() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad and name in case.layer_kinds:
                gradient = safe_get_full_grad(parameter)
                if gradient is not None:
                    yield name, gradient.double()

    comparisons = []
    for batch, reference in zip(case.batches, case.references):
        loss = engine(**batch.inputs).loss
        engine.backward(loss)
        comparisons.append(_comparison("auto", stage, batch, loss.item(), gradients(), reference, case.layer_kinds))
        engine.step()
    _remove_patches_of_models(before)
    engine.destroy()
    return comparisons


def _comparison(
    method: str,
    stage: int | None,
    batch: compare.Batch,
    loss: float,
    gradients: compare.Gradients,
    reference: compare.Reference | None,
    layer_kinds: dict[str, str],
) -> Comparison:
    if reference is None:
        for _ in gradients:  # takes part in the collectives in which rank 0 receives the gradients
            pass
        return Comparison(method, stage, batch.name)
    errors = compare.errors(loss, gradients, reference)
    worst: dict[str, float] = {}
    for name, error in errors.by_parameter.items():
        worst[layer_kinds[name]] = max(error, worst.get(layer_kinds[name], 0.0))
    return Comparison(method, stage, batch.name, errors.loss, worst, reference.tolerance)


def _remove_patches_of_models(before: tuple[Any, ...]) -> None:
    """Undo the patches of model instances, in reverse order, that are not in ``before``."""
    from ds_cp import patches

    for patch in reversed(patches.installed()):
        if patch not in before and patch.target.startswith("model "):
            patches.remove(patch)
