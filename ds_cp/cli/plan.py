"""``ds_cp plan``: what a key would decide for a model, without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Iterator, Mapping

import torch
import typer
from rich.console import Console
from rich.table import Table

from ds_cp import balance
from ds_cp import config as key
from ds_cp.cli import find
from ds_cp.cli import memory as estimate
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL
from ds_cp.mask.schedule import count, schedule
from ds_cp.planner import ModelFacts, Plan, exchanged_bytes, resolve

GIB = 2**30


def plan(
    model: Annotated[str, typer.Argument(help="a checkpoint folder, a config.json, or a model id in the local cache")],
    config: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="the DeepSpeed JSON with the key")],
    world: Annotated[int, typer.Option(min=1, help="ranks of the job")] = 8,
    node: Annotated[int, typer.Option(min=1, help="ranks per node")] = 8,
    seq_len: Annotated[int, typer.Option(min=1, help="tokens per sequence")] = 131072,
    dtype_bytes: Annotated[int, typer.Option(help="of what the model computes in: 2 (bf16) or 4 (fp32)")] = 2,
    memory: Annotated[float, typer.Option(min=0, help="GiB of one device, for the longest sequence")] = 80,
    checkpointing: Annotated[bool, typer.Option(help="gradient checkpointing")] = True,
) -> None:
    """Print method, layout, tokens, bytes sent and memory that the key leads to."""
    console = Console()
    if dtype_bytes not in (2, 4):
        raise typer.BadParameter("2 or 4", param_hint="--dtype-bytes")
    try:
        checked = key.normalise({key.KEY: key.required_value(config)}, world)
        assert checked is not None
        ds_config = key.load(str(config))
        zero = _zero(ds_config)
        whole = find.config_of(model)
        text = whole.get_text_config(decoder=True)
        heads = _heads(text)
        decided = resolve(checked, ModelFacts(text.model_type, heads), node, "cuda")
    except (key.ConfigError, OSError, ValueError) as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(1) from error
    table = _table(decided, world, seq_len, text, heads, dtype_bytes)
    rows = _micro_batch(ds_config, world // decided.size)
    dtype = torch.float32 if dtype_bytes == 4 else torch.bfloat16
    job = estimate.Job(text, decided, zero, world, dtype, rows, checkpointing)
    if text is not whole:
        table.add_row("counted below", f"{text.model_type} alone; weights and activations of the rest come on top")
    for name, line in _memory(job, seq_len, memory):
        table.add_row(name, line)
    console.print(table)


def _zero(ds_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section ``zero_optimization`` as DeepSpeed reads it, with its defaults; sizes that are "auto" stay so.

    Raises:
        ConfigError: DeepSpeed does not take it.
    """
    from deepspeed.runtime.zero.config import get_zero_config

    given = ds_config.get("zero_optimization", {})
    try:
        read = get_zero_config(dict(ds_config)).model_dump(by_alias=True)
    except (TypeError, ValueError) as error:
        raise key.ConfigError(f'DeepSpeed does not take "zero_optimization": {error}') from error
    sizes = given.items() if isinstance(given, Mapping) else ()
    return read | {name: value for name, value in sizes if name.endswith("_size") and value == "auto"}


def _micro_batch(ds_config: Mapping[str, Any], dp: int) -> int:
    """Rows per forward, by DeepSpeed's own arithmetic; 1 where the config leaves it to the script."""
    rows, batch, steps = (
        value if isinstance(value := ds_config.get(name), int) else None
        for name in ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    )
    return rows or max(1, (batch or 0) // (dp * (steps or 1)))


def _heads(text: Any) -> tuple[tuple[int, int], ...]:
    """H and h of a model's layers; none without attention."""
    queries = getattr(text, "num_attention_heads", None)
    return ((queries, getattr(text, "num_key_value_heads", None) or queries),) if queries else ()


def _dims(text: Any) -> tuple[int, int]:
    """Dims of a head: of queries and keys, and of values, which differ under multi-head latent attention."""
    usual = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return getattr(text, "qk_head_dim", None) or usual, getattr(text, "v_head_dim", None) or usual


def _table(plan: Plan, world: int, seq_len: int, text: Any, heads: tuple[tuple[int, int], ...], item: int) -> Table:
    document = Documents.find(1, seq_len)
    layout = balance.choose(seq_len, plan.ring, plan.ulysses, plan.layout, plan.packed_layout, document)
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("world", f"{world} = dp {world // plan.size} x ring {plan.ring} x ulysses {plan.ulysses}")
    for name, decided in (("method", plan.method), ("layout", plan.layout_text), ("kernel", plan.kernel)):
        table.add_row(name, f"{decided} ({plan.reasons[name]})")
    table.add_row("tokens per rank", f"{layout.local_len:,} of {seq_len:,} (padded to {layout.padded_len:,})")
    for each in heads:
        full = exchanged_bytes(plan.ring, plan.ulysses, layout.local_len, each, _dims(text), item)
        table.add_row("sent per layer, forward", f"{full / 2**20:,.1f} MiB per rank if every rank needed every key")
    if heads and plan.ring > 1:
        segments = document.segments(CAUSAL)
        rows = [sum(count(s.target_rows) for s in schedule(segments, layout, r)[1:]) for r in range(plan.ring)]
        share = sum(rows) / (plan.ring * (plan.ring - 1) * layout.local_len * plan.ulysses)
        table.add_row("of the ring's rows", f"{share:.2f} are needed by one causal document")
    return table


def _memory(job: estimate.Job, seq_len: int, budget: float) -> Iterator[tuple[str, str]]:
    try:
        step, fitting = estimate.estimate(job, seq_len), estimate.longest(job, budget * GIB, seq_len)
    except Exception as error:  # the model's own code runs on tensors without data, and may ask for some
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        yield "memory per rank", f"not estimated: {job.config.model_type} does not run without data ({said[:120]})"
        return
    larger, smaller = sorted([(step.working, "a layer at work"), (step.loss, "the loss")], reverse=True)
    parts = [
        (step.states, "weights, gradients, Adam's states"),
        (step.buffers, "ZeRO's buckets and gathered weights"),
        (step.kept, "kept for the backward pass"),
        (larger[0], f"{larger[1]}; in its turn {smaller[1]}, {smaller[0] / GIB:.1f}"),
    ]
    listed = "".join(f"\n{part / GIB:7.1f}  {name}" for part, name in parts)
    host = f"; {step.host / GIB:.1f} GiB in host memory" if step.host else ""
    rows = f"{job.rows} row{'s' * (job.rows > 1)} at a time"
    yield "memory per rank", f"about {step.total / GIB:.1f} GiB, {rows}{host}{listed}"
    yield f"longest in {budget:g} GiB", f"about {fitting:,} tokens per sequence" if fitting else "no sequence fits"
