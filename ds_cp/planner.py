"""From the key, the model's facts and the world to a frozen plan: every "auto" is decided here, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from ds_cp.attention.kernels import available
from ds_cp.attention.ulysses import HeadSplit
from ds_cp.config import KEY, ConfigError, ContextParallelConfig

KV_BLOCK = 8192
"""Tokens of a block of K and V, where "offload_kv" names none."""


@dataclass(frozen=True)
class ModelFacts:
    """What a plan depends on.

    Attributes:
        name: how messages call the model.
        heads: H and h of each attention layer, every distinct pair once.
        head_dims: of q, k and v, every distinct one once; empty where they are not known.
    """

    name: str
    heads: tuple[tuple[int, int], ...]
    head_dims: tuple[int, ...] = ()

    @property
    def heads_text(self) -> str:
        return " and ".join(f"{q} query and {k} key/value heads" for q, k in self.heads) or "layers without attention"


@dataclass(frozen=True)
class Plan:
    """How one model's sequences are shared; the other fields are the key's, with every ``"auto"`` decided.

    Attributes:
        size: ring x ulysses.
        packed_layout: for batches with several documents in a row, where it pays; ``layout`` for all others.
        tiled_mlp: None for wherever a forward's tokens are many.
        offload_kv: tokens of a block, 0 for off.
        reasons: why, per field.
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
    reasons: Mapping[str, str]

    @property
    def layout_text(self) -> str:
        return (
            self.layout if self.packed_layout == self.layout else f"{self.layout}; {self.packed_layout} for packed rows"
        )

    @property
    def prefetch_steps(self) -> int:
        """How many steps' rows may be under way at once on the ring axis."""
        return max(1, self.ring - 1) if self.method == "allgather" else 1


def resolve(config: ContextParallelConfig, facts: ModelFacts, node_size: int, device: str) -> Plan:
    """Decide every "auto".

    Args:
        config: a checked key with an explicit ``size``.
        facts: of the model.
        node_size: ranks per node; ulysses stays inside a node, because its all-to-all is exposed, so it divides this.
        device: ``"cpu"``, ``"cuda"``, ...

    Raises:
        ConfigError: a method that the model's heads do not allow, naming one that does; a kernel that cannot run here.
    """
    size = config.size
    assert isinstance(size, int), "normalise() fills the size"
    method, ulysses, why = _method(config, facts, node_size)
    ring = size // ulysses
    reasons = {"method": why}
    layout = packed_layout = config.layout
    reasons["layout"] = "as configured"
    if layout == "auto" and ring > 1:
        layout, packed_layout = "zigzag", "balanced"
        reasons["layout"] = "equal causal work on every ring rank"
    elif layout == "auto":
        layout = packed_layout = "contiguous"
        reasons["layout"] = "one ring shard holds the whole sequence in order"
    kernel, reasons["kernel"] = _kernel(config, facts, device)
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
        tiled_loss=config.tiled_loss is not False,  # as exact, no slower, and never [L, vocab]
        tiled_mlp=None if config.tiled_mlp == "auto" else config.tiled_mlp,
        offload_activations=config.offload_activations is True,  # auto: off, for its copies were not measured on a GPU
        offload_kv=_kv_block(config.offload_kv),
        recompute_attention=config.recompute_attention,
        reasons=reasons,
    )


def _kv_block(requested: bool | int | str) -> int:
    """Tokens of a block, 0 for none; "auto" is none, for its copies were not measured on a GPU."""
    return KV_BLOCK if requested is True else 0 if requested == "auto" else int(requested)


def _method(config: ContextParallelConfig, facts: ModelFacts, node_size: int) -> tuple[str, int, str]:
    """(method, ulysses ranks, why)."""
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
    even = [u for u in fits if all(q % u == 0 for q, _ in facts.heads)]
    near = [u for u in even if node_size % u == 0]  # others would straddle two nodes
    if requested == "hybrid":
        inside, across = ([u for u in some if 1 < u < size] for some in (near, fits))
        if not across:
            raise ConfigError(
                f'"{KEY}.method" is "hybrid", but no split of {size} ranks into ulysses x ring with both above 1 fits '
                f'{facts.name} ({facts.heads_text}). Use "ring", or a size with such a factor. Nothing was started.'
            )
        if not inside:
            return (
                "hybrid",
                max(across),
                "the largest ulysses that heads allow; its groups straddle nodes or split unevenly",
            )
        return "hybrid", max(inside), "the largest ulysses that heads and node allow"
    best = max(near)
    if best == size:
        return "ulysses", size, f"{facts.heads_text} split over {size} ranks of one node"
    if best > 1:
        return "hybrid", best, f"heads or node allow ulysses over {best} of {size} ranks; ring over the rest"
    return "ring", 1, f"{facts.heads_text} do not split over the ranks of a node"


def _kernel(config: ContextParallelConfig, facts: ModelFacts, device: str) -> tuple[str, str]:
    """(kernel, why)."""
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
    """Bytes that a rank sends per layer in the forward pass of bidirectional dense attention.

    ``(U-1)/U e L (H + h')(d + dv)`` for the all-to-alls and ``(R-1) e L h' (d + dv)`` for ring or all-gather, with h' the
    key/value heads after repetition, d the dim of queries and keys, dv that of values, and L tokens per rank (Jacobs et al.
    2023; Liu et al. 2023). Causal zigzag needs 0.75 of the ring's part, causal contiguous half of it on average.
    """
    query_heads, key_heads = heads
    split = HeadSplit.plan(query_heads, key_heads, ulysses)
    assert split is not None
    repeated, row = key_heads * split.repeat, item * local_len * sum(dims)
    return (ulysses - 1) / ulysses * row * (query_heads + repeated) + (ring - 1) * row * repeated
