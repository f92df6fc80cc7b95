"""The table that rank 0 logs at the start: what was decided, and why."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from ds_cp.log import log_rank_0
from ds_cp.mesh import Mesh
from ds_cp.planner import ModelFacts, Plan


def log_start(
    plan: Plan,
    mesh: Mesh,
    facts: ModelFacts,
    layers: int,
    recurrent: tuple[int, int] = (0, 0),
) -> None:
    """Log how a model's sequences are shared, on rank 0, through the logger ``ds_cp``.

    Args:
        layers: how many layers mix tokens.
        recurrent: how many of them exchange tokens for channels, and how many run whole on every rank.
    """
    world = mesh.dp_size * plan.size
    table = Table(title=f"ds_cp: {facts.name}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("world", f"{world} ranks = dp {mesh.dp_size} x ring {plan.ring} x ulysses {plan.ulysses}")
    table.add_row("groups", _listed(mesh.dp_size, plan.size))
    table.add_row("method", f"{plan.method} ({plan.reasons['method']})")
    table.add_row("layout", f"{plan.layout_text} ({plan.reasons['layout']})")
    table.add_row("kernel", f"{plan.kernel} ({plan.reasons['kernel']})")
    table.add_row("layers", _layers(layers - sum(recurrent), *recurrent))
    table.add_row("tokens per rank", f"the sequence / {plan.size}, padded inside to a multiple")
    table.add_row("sequences per step", f"micro batch x accumulation x dp {mesh.dp_size}")
    table.add_row("loss", "one sum and one count over a group; DeepSpeed means over the world")
    table.add_row("memory", _memory(plan))
    log_rank_0(_rendered(table))


def _rendered(table: Table) -> str:
    """The table as text, below the logger's line, as wide as the terminal."""
    text = io.StringIO()
    Console(file=text, width=Console().width).print(table)
    return "\n" + text.getvalue().rstrip()


def _layers(attention: int, traded: int, whole: int) -> str:
    parts = [
        f"{attention} attention layers: exchange, tiles, merge" if attention or not traded + whole else "",
        f"{traded} recurrent layers: tokens for channels and back" if traded else "",
        f"{whole} recurrent layers run whole on every rank, on all tokens" if whole else "",
        "everything else is per token",
    ]
    return "; ".join(filter(None, parts))


def _memory(plan: Plan) -> str:
    mlps = {True: "MLPs in tiles", False: "MLPs whole", None: "MLPs in tiles where they are large"}[plan.tiled_mlp]
    if plan.offload_kv:
        mlps = f"layers in tiles of {plan.offload_kv} tokens, their K and V in host memory"
    loss = "a known loss in tiles, so that no rank holds [L, vocab]" if plan.tiled_loss else "a rank's logits whole"
    return f"{loss}; {mlps}" + ("; layer inputs wait in host memory" if plan.offload_activations else "")


def _listed(groups: int, size: int) -> str:
    shown = [f"{g * size}-{(g + 1) * size - 1}" for g in range(min(groups, 4))]
    return "ranks " + ", ".join(shown) + (f", ... ({groups} groups)" if groups > 4 else "")
