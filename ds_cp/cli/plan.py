"""``ds_cp plan``: what a DeepSpeed config with ``context_parallel`` means for a model, without starting any process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Iterator, Mapping

import torch
import typer
from rich.console import Console
from rich.table import Table

from ds_cp import balance
from ds_cp import config as cp_config
from ds_cp.cli import memory as memory_estimate
from ds_cp.cli.model_argument import load_config
from ds_cp.layout import total_length
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL
from ds_cp.mask.schedule import schedule
from ds_cp.planner import ModelFacts, Plan, exchanged_bytes, resolve

GIB = 2**30


def plan(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, config.json, or id of a model in the local cache.")],
    config: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help='DeepSpeed config (JSON) with "context_parallel".')
    ],
    world: Annotated[int, typer.Option(min=1, help="Number of ranks of the job.")] = 8,
    node: Annotated[int, typer.Option(min=1, help="Number of ranks per node.")] = 8,
    seq_len: Annotated[int, typer.Option(min=1, help="Number of tokens per sequence.")] = 131072,
    dtype_bytes: Annotated[int, typer.Option(help="Bytes per weight and activation: 2 (bf16) or 4 (fp32).")] = 2,
    memory: Annotated[float, typer.Option(min=0, help="Memory of one device in GiB, for the longest sequence.")] = 80,
    checkpointing: Annotated[bool, typer.Option(help="Whether gradient checkpointing is on.")] = True,
) -> None:
    """Print the method, the layout, the bytes sent and the memory of a training step that follow from a config."""
    console = Console()
    if dtype_bytes not in (2, 4):
        raise typer.BadParameter("must be 2 or 4", param_hint="--dtype-bytes")
    try:
        checked = cp_config.normalise({cp_config.KEY: cp_config.required_value(config)}, world)
        assert checked is not None
        ds_config = cp_config.load(str(config))
        zero = _zero_section(ds_config)
        model_config = load_config(model)
        text_config = model_config.get_text_config(decoder=True)
        heads = _head_counts(text_config)
        decided = resolve(checked, ModelFacts(text_config.model_type, heads), node, "cuda")
    except (cp_config.ConfigError, OSError, ValueError) as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(1) from error
    table = _table(decided, world, seq_len, text_config, heads, dtype_bytes)
    rows = _micro_batch(ds_config, world // decided.size)
    dtype = torch.float32 if dtype_bytes == 4 else torch.bfloat16
    job = memory_estimate.Job(text_config, decided, zero, world, dtype, rows, checkpointing)
    if text_config is not model_config:
        table.add_row(
            "counted below",
            f"{text_config.model_type} alone; weights and activations of the other parts are not included",
        )
    for name, value in _memory(job, seq_len, memory):
        table.add_row(name, value)
    console.print(table)


def _zero_section(ds_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section ``zero_optimization`` with DeepSpeed's defaults; sizes that are ``"auto"`` stay ``"auto"``.

    Raises:
        ConfigError: DeepSpeed does not accept the section.
    """
    from deepspeed.runtime.zero.config import get_zero_config

    section = ds_config.get("zero_optimization", {})
    try:
        with_defaults: dict[str, Any] = get_zero_config(dict(ds_config)).model_dump(by_alias=True)
    except (TypeError, ValueError) as error:
        raise cp_config.ConfigError(f'DeepSpeed does not take "zero_optimization": {error}') from error
    entries = section.items() if isinstance(section, Mapping) else ()
    return with_defaults | {name: value for name, value in entries if name.endswith("_size") and value == "auto"}


def _micro_batch(ds_config: Mapping[str, Any], dp: int) -> int:
    """Number of rows per forward, computed as DeepSpeed does; 1 where the config leaves it to the script.

    Args:
        ds_config: DeepSpeed config.
        dp: Number of context-parallel groups, each of which is one data-parallel worker.
    """
    micro_batch, train_batch, accumulation_steps = (
        value if isinstance(value := ds_config.get(name), int) else None
        for name in ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    )
    return micro_batch or max(1, (train_batch or 0) // (dp * (accumulation_steps or 1)))


def _head_counts(text_config: Any) -> tuple[tuple[int, int], ...]:
    """(query heads, key/value heads) of the attention layers; empty for a model without attention."""
    query_heads = getattr(text_config, "num_attention_heads", None)
    return ((query_heads, getattr(text_config, "num_key_value_heads", None) or query_heads),) if query_heads else ()


def _head_dims(text_config: Any) -> tuple[int, int]:
    """Head dim of queries and keys, and of values; they differ under multi-head latent attention."""
    default = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return getattr(text_config, "qk_head_dim", None) or default, getattr(text_config, "v_head_dim", None) or default


def _table(
    plan: Plan, world: int, seq_len: int, text_config: Any, heads: tuple[tuple[int, int], ...], item_size: int
) -> Table:
    document = Documents.find(1, seq_len)
    layout = balance.choose(seq_len, plan.ring, plan.ulysses, plan.layout, plan.packed_layout, document)
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("world", f"{world} = dp {world // plan.size} x ring {plan.ring} x ulysses {plan.ulysses}")
    for name, value in (("method", plan.method), ("layout", plan.layout_text), ("kernel", plan.kernel)):
        table.add_row(name, f"{value} ({plan.reasons[name]})")
    table.add_row("tokens per rank", f"{layout.local_len:,} of {seq_len:,} (padded to {layout.padded_len:,})")
    for head_counts in heads:
        sent = exchanged_bytes(
            plan.ring, plan.ulysses, layout.local_len, head_counts, _head_dims(text_config), item_size
        )
        table.add_row(
            "sent per layer, forward", f"{sent / 2**20:,.1f} MiB per rank if every query attended to every key"
        )
    if heads and plan.ring > 1:
        segments = document.segments(CAUSAL)
        rows = [
            sum(total_length(step.target_rows) for step in schedule(segments, layout, r)[1:]) for r in range(plan.ring)
        ]
        share = sum(rows) / (plan.ring * (plan.ring - 1) * layout.local_len * plan.ulysses)
        table.add_row("of the ring's K/V rows", f"{share:.2f} are needed by one causal document")
    return table


def _memory(job: memory_estimate.Job, seq_len: int, budget: float) -> Iterator[tuple[str, str]]:
    """Lines (name, value) of the table about memory.

    Args:
        job: The training job.
        seq_len: Number of tokens per sequence.
        budget: Memory of one device in GiB.
    """
    try:
        memory = memory_estimate.estimate(job, seq_len)
        longest = memory_estimate.longest(job, budget * GIB, seq_len)
    except Exception as error:  # the model's own code runs on the meta device, and may raise anything there
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        yield (
            "memory per rank",
            f"not estimated: {job.config.model_type} does not run on torch's meta device ({reason[:120]})",
        )
        return
    peaks = [(memory.largest_layer, "the largest layer"), (memory.loss, "the loss")]
    (larger, larger_name), (smaller, smaller_name) = sorted(peaks, reverse=True)
    parts = [
        (memory.model_states, "weights, gradients, Adam's states"),
        (memory.zero_buffers, "ZeRO's buckets and gathered weights"),
        (memory.saved, "activations saved for the backward pass"),
        (larger, f"{larger_name} while it runs; at other times {smaller_name}, {smaller / GIB:.1f}"),
    ]
    listed = "".join(f"\n{size / GIB:7.1f}  {name}" for size, name in parts)
    host = f"; {memory.host / GIB:.1f} GiB in host memory" if memory.host else ""
    rows = f"{job.rows} row{'s' * (job.rows > 1)} at a time"
    yield "memory per rank", f"about {memory.total / GIB:.1f} GiB, {rows}{host}{listed}"
    yield f"longest in {budget:g} GiB", f"about {longest:,} tokens per sequence" if longest else "no sequence fits"
