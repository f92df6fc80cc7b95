"""Decisions before the model runs: :func:`resolve` turns config and model facts into a :class:`Plan` without any "auto"."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping, NamedTuple

from ds_cp import cards
from ds_cp.attention.kernels import available
from ds_cp.attention.ulysses import HeadSplit
from ds_cp.config import KEY, ConfigError, ContextParallelConfig

MAX_SPLITS = 4
"""Largest number of splits that a packed batch chooses among. Each further split has communicators of its own."""

DEFAULT_KV_BLOCK = 8192
"""Tokens per block of K and V for ``"offload_kv": true``."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model that a plan depends on.

    Attributes:
        name: Name of the model in messages.
        heads: Distinct pairs (query heads, key/value heads) of the attention layers.
        head_dims: Distinct head dims of queries, keys and values; empty if they are unknown.
    """

    name: str
    heads: tuple[tuple[int, int], ...]
    head_dims: tuple[int, ...] = ()

    @property
    def heads_text(self) -> str:
        return " and ".join(f"{q} query and {k} key/value heads" for q, k in self.heads) or "layers without attention"


class Split(NamedTuple):
    """One division of a context-parallel group into a ring and a ulysses axis.

    Attributes:
        ring: Number of ranks on the ring axis.
        ulysses: Number of ranks on the ulysses axis.
        layout: Layout of batches without packed documents.
        packed_layout: Layout of batches with packed documents.
    """

    ring: int
    ulysses: int
    layout: str
    packed_layout: str

    @property
    def method(self) -> str:
        return "ulysses" if self.ring == 1 else "ring" if self.ulysses == 1 else "hybrid"

    @property
    def name(self) -> str:
        return f"hybrid {self.ring} x {self.ulysses}" if self.method == "hybrid" else self.method


@dataclass(frozen=True)
class Plan:
    """How the sequences of one model are divided between ranks. The same on all ranks of the world.

    Fields without a description are those of :class:`~ds_cp.config.ContextParallelConfig`, with every ``"auto"`` decided.

    Attributes:
        size: Number of ranks per context-parallel group, ``ring * ulysses``.
        ring: Number of ranks on the ring axis.
        ulysses: Number of ranks on the ulysses axis.
        layout: Layout of batches without packed documents.
        packed_layout: Layout of batches with packed documents. If it is ``"balanced"`` and ``layout`` is not, it is used
            where it pays (:func:`ds_cp.balance.choose`).
        tiled_mlp: Whether MLPs run in chunks of tokens. None if each forward decides by the size of its activations.
        offload_kv: Tokens per chunk of a layer and per block of K and V; 0 if K and V stay on the device.
        splits: Splits among which each packed batch chooses the fastest (:func:`ds_cp.splits.choose`); the first is that of
            the other fields, and of batches without packed documents. One if the method is configured.
        card: Name of the card in :data:`ds_cp.cards.CARDS` that times are predicted for.
        attention: Query heads, key/value heads, and head dims of queries and values of the attention layers, for the same.
        reasons: Why a field has its value, for ``method``, ``layout`` and ``kernel``.
    """

    size: int
    ring: int
    ulysses: int
    method: str
    layout: str
    packed_layout: str
    kernel: str
    checks: str
    timeout: float
    unverified: str
    tiled_loss: bool
    tiled_mlp: bool | None
    offload_activations: bool
    offload_kv: int
    recompute_attention: bool
    splits: tuple[Split, ...]
    card: str
    attention: tuple[int, int, int, int]
    reasons: Mapping[str, str]

    @property
    def layout_text(self) -> str:
        if self.packed_layout == self.layout:
            return self.layout
        return f"{self.layout}; {self.packed_layout} for packed rows"

    def with_split(self, split: Split) -> Plan:
        """The plan of a batch that uses one of :attr:`splits`."""
        if (split.ring, split.ulysses) == (self.ring, self.ulysses):
            return self
        return replace(self, method=split.method, **split._asdict())

    @property
    def prefetch_steps(self) -> int:
        """Number of ring steps whose K/V rows are in flight while a step is computed: all of them for all-gather."""
        return max(1, self.ring - 1) if self.method == "allgather" else 1


def resolve(config: ContextParallelConfig, facts: ModelFacts, node_size: int, device: str) -> Plan:
    """Decide every ``"auto"``.

    Args:
        config: Checked config with a number as ``size``.
        facts: Facts of the model.
        node_size: Number of ranks per node. An automatic ulysses axis divides it, so that its all-to-all, which does not
            overlap with computation, stays inside a node.
        device: Device type, ``"cpu"``, ``"cuda"``, ...

    Raises:
        ConfigError: The model's heads do not allow the method (the message names one that they allow), or the kernel cannot
            run here.
    """
    size = config.size
    assert isinstance(size, int), "normalise() fills in the size"
    method, ulysses, method_reason = _method(config, facts, node_size)
    ring = size // ulysses
    layout, packed_layout, layout_reason = _layout(config, ring)
    kernel, kernel_reason = _kernel(config, facts, device)
    splits = [Split(ring, ulysses, layout, packed_layout)]
    if config.method == "auto" and config.ulysses_size == "auto":
        others = (u for u in _even_in_node(facts, size, node_size) if u != ulysses)
        splits += [Split(size // u, u, *_layout(config, size // u)[:2]) for u in others]
        splits = sorted(splits, key=lambda split: (split.ulysses != ulysses, split.ulysses))[:MAX_SPLITS]
    if len(splits) > 1:
        method_reason += (
            f"; packed rows use the fastest of {', '.join(split.name for split in splits)} by predicted time"
        )
    return Plan(
        size=size,
        ring=ring,
        ulysses=ulysses,
        method=method,
        layout=layout,
        packed_layout=packed_layout,
        kernel=kernel,
        checks=config.checks,
        timeout=config.timeout,
        unverified=config.unverified,
        tiled_loss=config.tiled_loss is not False,  # auto: on, it is exact, no slower, and never needs [L, vocab]
        tiled_mlp=None if config.tiled_mlp == "auto" else config.tiled_mlp,
        offload_activations=config.offload_activations is True,  # auto: off, its copies were not measured on a GPU
        offload_kv=_kv_block(config.offload_kv),
        recompute_attention=config.recompute_attention,
        splits=tuple(splits),
        card=cards.card_here(device, kernel),
        attention=_attention_shape(facts),
        reasons={"method": method_reason, "layout": layout_reason, "kernel": kernel_reason},
    )


def _kv_block(requested: bool | int | str) -> int:
    """Tokens per block, 0 for no offloading. "auto" is 0, because the copies were not measured on a GPU."""
    if requested == "auto":
        return 0
    return DEFAULT_KV_BLOCK if requested is True else int(requested)


def _method(config: ContextParallelConfig, facts: ModelFacts, node_size: int) -> tuple[str, int, str]:
    """Method, size of the ulysses axis, and the reason."""
    size, requested = config.size, config.method
    assert isinstance(size, int)
    if config.ulysses_size != "auto" and requested not in ("auto", "hybrid"):
        raise ConfigError(
            f'"{KEY}.ulysses_size" is {config.ulysses_size}, but "{KEY}.method" is "{requested}", which would ignore it. '
            'Use "hybrid", or leave ulysses_size out. Nothing was started.'
        )
    if requested in ("ring", "allgather"):
        return requested, 1, "as configured"
    fits = [u for u in range(1, size + 1) if size % u == 0 and _splits(facts, u)]
    if requested == "ulysses":
        if size not in fits:
            raise ConfigError(_no_split(facts, size, fits))
        return "ulysses", size, "as configured"
    if config.ulysses_size != "auto":
        ulysses = int(config.ulysses_size)
        if ulysses not in fits:
            raise ConfigError(_no_split(facts, ulysses, fits))
        return "hybrid", ulysses, "as configured"
    in_node = _even_in_node(facts, size, node_size)
    if requested == "hybrid":
        inside, any_fit = ([u for u in sizes if 1 < u < size] for sizes in (in_node, fits))
        if not any_fit:
            raise ConfigError(
                f'"{KEY}.method" is "hybrid", but no split of {size} ranks into ulysses x ring with both above 1 fits '
                f'{facts.name} ({facts.heads_text}). Use "ring", or a size with such a factor. Nothing was started.'
            )
        if not inside:
            reason = "the largest ulysses that heads allow; its groups straddle nodes or split unevenly"
            return "hybrid", max(any_fit), reason
        return "hybrid", max(inside), "the largest ulysses that heads and node allow"
    best = max(in_node)
    if best == size:
        return "ulysses", size, f"{facts.heads_text} split over {size} ranks of one node"
    if best > 1:
        return "hybrid", best, f"heads or node allow ulysses over {best} of {size} ranks; ring over the rest"
    return "ring", 1, f"{facts.heads_text} do not split over the ranks of a node"


def _even_in_node(facts: ModelFacts, size: int, node_size: int) -> list[int]:
    """Sizes of a ulysses axis that divide the heads of all layers evenly and do not straddle two nodes, increasing."""
    divisors = (u for u in range(1, size + 1) if size % u == 0 and node_size % u == 0)
    return [u for u in divisors if _splits(facts, u) and all(q % u == 0 for q, _ in facts.heads)]


def _attention_shape(facts: ModelFacts) -> tuple[int, int, int, int]:
    """Heads and head dims of the attention layers, for predicted times; those of the widest layers where they differ."""
    query_heads, kv_heads = max(facts.heads, default=(1, 1))
    dim = max(facts.head_dims, default=128)
    return query_heads, kv_heads, dim, dim


def _layout(config: ContextParallelConfig, ring: int) -> tuple[str, str, str]:
    """Layout, layout of packed batches, and the reason."""
    if config.layout != "auto":
        return config.layout, config.layout, "as configured"
    if ring > 1:
        return "zigzag", "balanced", "equal causal work on every ring rank"
    return "contiguous", "contiguous", "one ring shard holds the whole sequence in order"


def _kernel(config: ContextParallelConfig, facts: ModelFacts, device: str) -> tuple[str, str]:
    """Kernel, and the reason."""
    if config.kernel == "auto":
        return available.best(device, facts.head_dims)
    problem = available.problem(config.kernel, device)
    if problem:
        raise ConfigError(f'"{KEY}.kernel" is "{config.kernel}", but {problem}. Nothing was started.')
    return config.kernel, "as configured"


def _splits(facts: ModelFacts, ranks: int) -> bool:
    return all(HeadSplit.plan(q, k, ranks) is not None for q, k in facts.heads)


def _no_split(facts: ModelFacts, requested: int, fits: list[int]) -> str:
    return (
        f'"{KEY}" asks for ulysses over {requested} ranks, but {facts.name} has {facts.heads_text}: some ranks would get no '
        f'head of their own. Use "method": "ring", or "hybrid" with "ulysses_size" in {fits[1:] or "(none fits)"}. '
        "Nothing was started."
    )


def exchanged_bytes(
    ring: int, ulysses: int, local_len: int, heads: tuple[int, int], dims: tuple[int, int], item: int
) -> float:
    """Bytes that a rank sends per layer in the forward pass of bidirectional attention without packed documents.

    The all-to-alls send ``(U-1)/U * e * L * (H + h') * (d + dv)`` bytes and ring or all-gather ``(R-1) * e * L * h' * (d + dv)``,
    where U and R are the sizes of the ulysses and ring axes, e the bytes per element, L the tokens per rank, H the query heads,
    h' the key/value heads after repetition, d the dim of queries and keys and dv that of values (Jacobs et al. 2023; Liu et al.
    2023). On the ring, causal attention sends 0.75 of it with the zigzag layout and half of it, on average, with the contiguous.

    Args:
        ring: R.
        ulysses: U.
        local_len: L.
        heads: Query heads H and key/value heads before repetition.
        dims: d and dv.
        item: e.
    """
    query_heads, key_heads = heads
    split = HeadSplit.plan(query_heads, key_heads, ulysses)
    assert split is not None
    repeated_key_heads, bytes_per_head = key_heads * split.repeat, item * local_len * sum(dims)
    all_to_all = (ulysses - 1) / ulysses * bytes_per_head * (query_heads + repeated_key_heads)
    return all_to_all + (ring - 1) * bytes_per_head * repeated_key_heads
