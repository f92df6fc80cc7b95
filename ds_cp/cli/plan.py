"""``ds_cp plan``: what a key would decide for a model, without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ds_cp import balance
from ds_cp import config as key
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL
from ds_cp.mask.schedule import count, schedule
from ds_cp.planner import ModelFacts, Plan, exchanged_bytes, resolve


def plan(
    model: Annotated[str, typer.Argument(help="a checkpoint folder, a config.json, or a model id in the local cache")],
    config: Annotated[Path, typer.Option(help="the DeepSpeed JSON with the key")],
    world: Annotated[int, typer.Option(help="ranks of the job")] = 8,
    node: Annotated[int, typer.Option(help="ranks per node")] = 8,
    seq_len: Annotated[int, typer.Option(help="tokens per sequence")] = 131072,
    dtype_bytes: Annotated[int, typer.Option(help="bytes per element of q, k and v")] = 2,
) -> None:
    """Print method, layout, tokens, and bytes per layer that the key leads to."""
    from transformers import AutoConfig

    console = Console()
    try:
        checked = key.normalise({key.KEY: key.find(str(config)) or {}}, world)
        assert checked is not None
        text = AutoConfig.from_pretrained(model).get_text_config(decoder=True)
        heads = (text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        decided = resolve(checked, ModelFacts(text.model_type, (heads,)), node, "cuda")
    except (key.ConfigError, OSError) as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(1) from error
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    console.print(_table(decided, world, seq_len, heads, head_dim, dtype_bytes))


def _table(plan: Plan, world: int, seq_len: int, heads: tuple[int, int], head_dim: int, item: int) -> Table:
    document = Documents.find(1, seq_len)
    layout = balance.choose(seq_len, plan.ring, plan.ulysses, plan.layout, plan.packed_layout, document)
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("world", f"{world} = dp {world // plan.size} x ring {plan.ring} x ulysses {plan.ulysses}")
    for name, decided in (("method", plan.method), ("layout", plan.layout_text), ("kernel", plan.kernel)):
        table.add_row(name, f"{decided} ({plan.reasons[name]})")
    table.add_row("tokens per rank", f"{layout.local_len:,} of {seq_len:,} (padded to {layout.padded_len:,})")
    full = exchanged_bytes(plan.ring, plan.ulysses, layout.local_len, heads, head_dim, item)
    table.add_row("sent per layer, forward", f"{full / 2**20:,.1f} MiB per rank if every rank needed every key")
    if plan.ring > 1:
        segments = document.segments(CAUSAL)
        rows = [sum(count(s.target_rows) for s in schedule(segments, layout, r)[1:]) for r in range(plan.ring)]
        share = sum(rows) / (plan.ring * (plan.ring - 1) * layout.local_len * plan.ulysses)
        table.add_row("of the ring's rows", f"{share:.2f} are needed by one causal document")
    return table
