"""The table that rank 0 logs when context parallelism is attached to a model: what was decided, and why."""

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
    """Log on rank 0, through the logger ``ds_cp``, how a model's sequences are divided between ranks.

    Args:
        plan: The plan that all ranks agreed on.
        mesh: Mesh of the plan.
        facts: Facts of the model.
        layers: Number of layers that mix tokens.
        recurrent: Numbers of recurrent layers among them that exchange tokens for channels, and that are replicated.
    """
    world = mesh.dp_size * plan.size
    table = Table(title=f"ds_cp: {facts.name}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("world", f"{world} ranks = dp {mesh.dp_size} x ring {plan.ring} x ulysses {plan.ulysses}")
    table.add_row("groups", _group_ranks(mesh.dp_size, plan.size))
    table.add_row("method", f"{plan.method} ({plan.reasons['method']})")
    table.add_row("layout", f"{plan.layout_text} ({plan.reasons['layout']})")
    table.add_row("kernel", f"{plan.kernel} ({plan.reasons['kernel']})")
    table.add_row("layers", _layers(layers - sum(recurrent), *recurrent))
    table.add_row("tokens per rank", f"sequence length / {plan.size}, padded to a multiple")
    table.add_row("sequences per step", f"micro batch x accumulation x dp {mesh.dp_size}")
    table.add_row("loss", "one sum and one count over a context-parallel group; DeepSpeed averages over the world")
    table.add_row("memory", _memory(plan))
    log_rank_0(_as_text(table))


def _as_text(table: Table) -> str:
    """The table as text, starting on a line of its own, as wide as the terminal."""
    text = io.StringIO()
    Console(file=text, width=Console().width).print(table)
    return "\n" + text.getvalue().rstrip()


def _layers(attention: int, exchanged: int, replicated: int) -> str:
    parts = [
        f"{attention} attention layers on exchanged keys and values" if attention or not exchanged + replicated else "",
        f"{exchanged} recurrent layers on all tokens of some channels" if exchanged else "",
        f"{replicated} recurrent layers replicated on every rank, on all tokens" if replicated else "",
        "everything else is per token",
    ]
    return "; ".join(filter(None, parts))


def _memory(plan: Plan) -> str:
    layers = {
        True: "MLPs in chunks of tokens",
        False: "MLPs on all tokens of a rank at once",
        None: "MLPs in chunks of tokens where activations are large",
    }[plan.tiled_mlp]
    if plan.offload_kv:
        layers = f"layers in chunks of {plan.offload_kv} tokens, their K and V in host memory"
    loss = (
        "losses that ds_cp knows in chunks, so that no rank holds [L, vocab]"
        if plan.tiled_loss
        else "[L, vocab] logits"
    )
    return f"{loss}; {layers}" + ("; layer inputs offloaded to host memory" if plan.offload_activations else "")


def _group_ranks(groups: int, size: int) -> str:
    """Ranks of the first four context-parallel groups."""
    shown = [f"{group * size}-{(group + 1) * size - 1}" for group in range(min(groups, 4))]
    return "ranks " + ", ".join(shown) + (f", ... ({groups} groups)" if groups > 4 else "")
