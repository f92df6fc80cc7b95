"""``ds_cp bench simulate``: predicted time of a model's layers on cards that are not here, for every split of the ranks.

The schedule is the one that a run would use; FLOPs, bytes, launches and messages are counted from it, and
:mod:`ds_cp.cost` states the roofline that turns them into seconds. Nothing is measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Iterator, Sequence

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ds_cp import balance, cost
from ds_cp.attention.ulysses import HeadSplit
from ds_cp.cards import CARDS, LINKS, Card
from ds_cp.cli.model_argument import load_config
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL, OPEN
from ds_cp.mask.schedule import schedule
from ds_cp.mask.tile import Tile

MATMUL_SHARE = 0.7
"""Share of a card's peak that the projections and MLPs of a layer reach; an assumption, typical of bf16 training."""

PUBLISHED = (
    # (what, card, tokens, ranks, published, source): forward and backward of a causal zigzag ring, iterations per second
    ("zigzag ring, 8 x H800, 8192 tokens per card", "H800-FA2", 65536, 8, 17.4, "README of ring-flash-attention"),
    ("zigzag ring, 8 x A100, 8192 tokens per card", "A100", 65536, 8, 10.6, "README of ring-flash-attention"),
    ("one call, H800, 8192 tokens", "H800-FA2", 8192, 1, 154.7, "README of ring-flash-attention"),
    ("one call, A100, 8192 tokens", "A100", 8192, 1, 94.7, "README of ring-flash-attention"),
)


@dataclass(frozen=True)
class Split:
    """One way to divide the ranks of a context-parallel group, and the predicted time of one layer's attention."""

    ring: int
    ulysses: int
    layout: str
    time: cost.Time
    ideal: float

    @property
    def name(self) -> str:
        """The method, with both sizes for a hybrid."""
        if self.ulysses == 1:
            return f"ring ({self.layout})"
        return "ulysses" if self.ring == 1 else f"hybrid {self.ring} x {self.ulysses} ({self.layout})"


def simulate(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, config.json, or id of a model in the local cache.")],
    gpus: Annotated[int, typer.Option(min=1, help="Number of ranks that share one sequence.")] = 8,
    per_node: Annotated[int, typer.Option(min=1, help="Number of ranks per node.")] = 8,
    gpu: Annotated[str, typer.Option(help=f"Card: {', '.join(CARDS)}.")] = "H100",
    seq_len: Annotated[int, typer.Option(min=1, help="Number of tokens per row.")] = 131072,
    lengths: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with one document length per line, packed into rows."),
    ] = None,
    checkpointing: Annotated[bool, typer.Option(help="Whether gradient checkpointing is on.")] = True,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Predict the time of a layer for every method and split, without a card. Predicted, not measured."""
    if gpu not in CARDS:
        raise typer.BadParameter(f"known cards: {', '.join(CARDS)}", param_hint="--gpu")
    config = load_config(model).get_text_config(decoder=True)
    shape = _shape(config)
    rows = list(_rows(lengths, seq_len)) if lengths else [[seq_len]]
    card = CARDS[gpu]
    console = Console()
    lines = []
    table = Table(
        title=f"{config.model_type}, {gpus} x {card.name}, rows of {seq_len:,} tokens: PREDICTED, not measured"
    )
    for column in (
        "split",
        "attention per layer",
        "of it exposed messages",
        "times the ideal",
        "layer",
        "MFU",
        "sent per layer",
    ):
        table.add_column(column)
    for splits in _by_split([predict(shape, row, gpus, per_node, gpu) for row in rows]):
        first = splits[0]
        attention = float(np.mean([split.time.total for split in splits]))
        exposed = float(np.mean([split.time.parts["exposed messages"] for split in splits]))
        ratio = attention / float(np.mean([split.ideal for split in splits]))
        layer = attention + _linear_seconds(config, seq_len // gpus, card, checkpointing)
        flops = _model_flops(config, seq_len) + float(np.mean([_attention_flops(row, shape) for row in rows]))
        mfu = flops / gpus / layer / card.peak
        sent = float(np.mean([split.time.counts["bytes sent"] for split in splits]))
        table.add_row(
            first.name, f"{attention * 1e3:.2f} ms", f"{exposed * 1e3:.2f} ms", f"{ratio:.3f}", f"{layer * 1e3:.2f} ms",
            f"{mfu:.0%}", f"{sent / 2**20:,.0f} MiB",
        )  # fmt: skip
        lines.append(
            {
                "split": first.name, "ring": first.ring, "ulysses": first.ulysses, "attention_s": attention,
                "exposed_s": exposed, "ratio_to_ideal": ratio, "layer_s": layer, "mfu": mfu, "bytes_sent": sent,
                "parts_s": dict(first.time.parts), "counts": dict(first.time.counts),
            }
        )  # fmt: skip
    console.print(table)
    console.print(_published_table())
    if output:
        output.write_text(json.dumps({"gpu": gpu, "gpus": gpus, "seq_len": seq_len, "splits": lines}, indent=1))


def predict(shape: cost.AttentionShape, documents: Sequence[int], ranks: int, per_node: int, gpu: str) -> list[Split]:
    """Predict one layer's attention for every split whose ulysses axis fits the heads and a node.

    Args:
        shape: Of the attention.
        documents: Lengths of the documents of one row, causal each.
        ranks: Ranks that share the row.
        per_node: Ranks per node; a ring that crosses nodes uses the link between nodes.
        gpu: Name of the card in :data:`ds_cp.cards.CARDS`.

    Returns:
        One entry per split, of its slowest rank.
    """
    card, seq_len = CARDS[gpu], sum(documents)
    found = Documents.find(1, seq_len, boundaries=np.cumsum([0, *documents]))
    segments = found.segments(CAUSAL)
    starts = np.cumsum([0, *documents]).tolist()
    tiles = [Tile(0, 1, a, b, a, b, -OPEN, 0) for a, b in zip(starts, starts[1:])]
    ideal = cost.ideal_time(tiles, ranks, shape, card)
    splits = []
    for ulysses in (u for u in range(1, ranks + 1) if ranks % u == 0 and per_node % u == 0):
        if HeadSplit.plan(shape.query_heads, shape.kv_heads, ulysses) is None or shape.query_heads % ulysses:
            continue
        ring = ranks // ulysses
        link = LINKS[gpu if ranks <= per_node or ring == 1 else "ib"]
        usual, packed = ("zigzag", "balanced") if ring > 1 else ("contiguous", "contiguous")
        layout = balance.choose(seq_len, ring, ulysses, usual, packed, found)
        times = [
            cost.attention_time(schedule(segments, layout, rank), ulysses, shape, card, link) for rank in range(ring)
        ]
        splits.append(Split(ring, ulysses, layout.name, max(times, key=lambda time: time.total), ideal))
    return splits


def _shape(config: Any) -> cost.AttentionShape:
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return cost.AttentionShape(heads, getattr(config, "num_key_value_heads", None) or heads, dim, dim)


def _rows(file: Path, seq_len: int) -> Iterator[list[int]]:
    """Rows of documents, packed in the order of the file; a document that does not fit starts the next row."""
    row: list[int] = []
    for length in (min(int(line), seq_len) for line in file.read_text().split()):
        if sum(row) + length > seq_len:
            yield [*row, *([seq_len - sum(row)] if sum(row) < seq_len else [])]
            row = []
        row.append(length)
    if row:
        yield [*row, *([seq_len - sum(row)] if sum(row) < seq_len else [])]


def _by_split(of_rows: list[list[Split]]) -> Iterator[list[Split]]:
    """The same split of all rows together, the fastest first."""
    together = [list(splits) for splits in zip(*of_rows)]
    yield from sorted(together, key=lambda splits: sum(split.time.total for split in splits))


def _weights_per_layer(config: Any) -> int:
    """Weights of one dense decoder layer: projections of attention and a gated MLP."""
    shape, hidden = _shape(config), config.hidden_size
    attention = hidden * shape.dim * (2 * shape.query_heads + 2 * shape.kv_heads)
    return int(attention + 3 * hidden * config.intermediate_size)


def _linear_seconds(config: Any, tokens: int, card: Card, checkpointing: bool) -> float:
    """Seconds of a layer's matrix products on a rank's tokens: forward, backward, and the forward again if checkpointed."""
    passes = 4 if checkpointing else 3
    return 2 * passes * _weights_per_layer(config) * tokens / (card.peak * MATMUL_SHARE)


def _model_flops(config: Any, tokens: int) -> float:
    """FLOPs of a layer's matrix products without recomputation, the convention of MFU."""
    return 6.0 * _weights_per_layer(config) * tokens


def _attention_flops(documents: Sequence[int], shape: cost.AttentionShape) -> float:
    return 3.5 * shape.pair_flops() * sum(n * (n + 1) / 2 for n in documents)


def _published_table() -> Table:
    table = Table(title="The same roofline beside published figures (forward and backward, Llama 3.1 8B's attention)")
    for column in ("what", "predicted", "published", "source"):
        table.add_column(column)
    for what, rate, published, source in published_figures():
        table.add_row(what, f"{rate:.1f} / s ({rate / published - 1:+.0%})", f"{published} / s", source)
    return table


def published_figures() -> Iterator[tuple[str, float, float, str]]:
    """(what, predicted iterations per second, published, source) of figures that the curves were not fitted to."""
    shape = cost.AttentionShape(32, 8)
    for what, gpu, tokens, ranks, published, source in PUBLISHED:
        if ranks == 1:
            seconds = cost.ideal_time([Tile(0, 1, 0, tokens, 0, tokens, -OPEN, 0)], 1, shape, CARDS[gpu])
        else:
            splits = predict(shape, [tokens], ranks, ranks, gpu)
            seconds = next(split.time.total for split in splits if split.ulysses == 1)
        yield what, 1 / seconds, published, source
