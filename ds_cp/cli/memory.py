"""What a training step will hold on a rank: model states by ZeRO's formula, activations by running layers without data.

What layers hold is linear in their tokens, so two short runs without data (:mod:`.without_data`) tell it for any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Mapping

import torch

from ds_cp.chunked import cross_entropy as chunked_loss
from ds_cp.cli.without_data import WithoutData
from ds_cp.layout import Layout
from ds_cp.patches.transformers import structure
from ds_cp.patches.transformers.memory import chunked_mlp
from ds_cp.planner import Plan

FEW = 4096
"""Tokens that layers run on here, at least; where MLPs run in tiles, two of them."""

SPANS = 5
"""Hidden states per token that a layer in tiles holds at its peak, its input and output and their gradients among them
(tests/test_offload_kv.py)."""


@dataclass(frozen=True, eq=False)
class Job:
    """What is trained, and how.

    Attributes:
        config: of the text model.
        plan: of the key.
        zero: the section ``zero_optimization`` of the DeepSpeed config.
        world: ranks.
        dtype: that the model computes in.
        rows: micro batch.
        checkpointing: whether gradient checkpointing is on.
    """

    config: Any
    plan: Plan
    zero: Mapping[str, Any]
    world: int
    dtype: torch.dtype
    rows: int = 1
    checkpointing: bool = True

    @property
    def checkpoints(self) -> bool:
        """Whether layers keep their input only; those in tiles do by themselves."""
        return self.checkpointing or bool(self.plan.offload_kv)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank's device, and in its host memory."""

    states: float
    buffers: float
    kept: float
    working: float
    loss: float
    host: float

    @property
    def total(self) -> float:
        """Loss and layers take turns."""
        return self.states + self.buffers + self.kept + max(self.working, self.loss)


def estimate(job: Job, seq_len: int) -> Memory:
    """Of a step on a sequence of S tokens. The allocator's gaps, NCCL's buffers and kernels' workspaces come on top.

    Raises:
        RuntimeError: a layer does not run without data (experts that are chosen by value).
    """
    plan, item, model = job.plan, job.dtype.itemsize, _model(job)
    tokens = job.rows * Layout(seq_len, plan.ring, plan.ulysses, plan.layout).local_len
    states, host = model_states(model.numbers, job.zero, job.world, item)
    kept, working = _layers(job, tokens)
    if plan.offload_activations and job.checkpoints:
        host, kept = host + kept, 0.0
    if plan.offload_kv:
        _, working = _layers(job, min(tokens, plan.offload_kv))
        working += SPANS * tokens * job.config.hidden_size * item
        host += _keys_in_host(job, seq_len)
    return Memory(
        states=states,
        buffers=zero_buffers(model.numbers, job.config.hidden_size, job.zero, item),
        kept=kept,
        working=working,
        loss=_loss(job, tokens, model.of_head),
        host=host,
    )


def longest(job: Job, budget: float, start: int) -> int:
    """The longest sequence, in whole thousands of tokens, whose step stays within so many bytes; 0 if none does."""
    unit = 1024 * job.plan.size

    def fits(units: int) -> bool:
        return estimate(job, units * unit).total <= budget

    low, high = 0, max(1, start // unit)
    while fits(high) and high < 1 << 20:
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit


def model_states(numbers: int, zero: Mapping[str, Any], world: int, item: int) -> tuple[float, float]:
    """Weights, gradients and Adam's states of one rank in bytes, (on the device, in host memory).

    ZeRO (Rajbhandari et al. 2020): with N ranks, stage 1 shares the optimizer's states, 2 the gradients too, 3 the
    weights too. Ranks that share a sequence are data-parallel ranks to ZeRO, so N is the whole world.
    """
    stage = int(zero.get("stage", 0))
    weights, gradients, optimizer = numbers * item, numbers * item, numbers * (8 if item == 4 else 12)
    optimizer /= world if stage >= 1 else 1
    gradients /= world if stage >= 2 else 1
    weights /= world if stage >= 3 else 1
    device, host = weights + gradients + optimizer, 0.0
    if _is_away(zero, "offload_optimizer"):
        away = optimizer + (gradients if stage >= 2 else 0)
        device, host = device - away, host + away
    if _is_away(zero, "offload_param"):
        device, host = device - weights, host + weights
    return device, host


def zero_buffers(numbers: int, hidden: int, zero: Mapping[str, Any], item: int) -> float:
    """What ZeRO gathers and reduces at a time, at most: buckets, and under stage 3 the weights that are whole."""

    def size(name: str, default: float, auto: float) -> float:
        value = zero.get(name, default)
        return min(numbers, auto if value == "auto" else float(value))

    stage = int(zero.get("stage", 0))
    buckets = size("reduce_bucket_size", 5e8, hidden * hidden) * (2 if zero.get("overlap_comm", stage == 3) else 1)
    whole = size("stage3_max_live_parameters", 1e9, 1e9) if stage == 3 else 0
    return (buckets * (stage > 0) + whole) * item


def _is_away(zero: Mapping[str, Any], name: str) -> bool:
    return (zero.get(name) or {}).get("device", "none") != "none"


def _keys_in_host(job: Job, seq_len: int) -> float:
    """K and V of one layer, of all tokens at most, and their gradients in fp32."""
    pairs, dims = structure.head_counts(job.config), structure.head_dims(job.config)
    key_heads = max((keys for _, keys in pairs), default=0) / job.plan.ulysses
    return job.rows * seq_len * key_heads * 2 * max(dims, default=0) * (job.dtype.itemsize + 4)


def _loss(job: Job, tokens: int, weights_of_head: int) -> float:
    """Of the last hidden states and the logits, with what their gradients need."""
    item, vocab = job.dtype.itemsize, weights_of_head // job.config.hidden_size
    hidden = 2 * tokens * job.config.hidden_size * item
    if not job.plan.tiled_loss:
        return hidden + tokens * vocab * (2 * item + 2 * 4)  # logits in both precisions, and their gradients
    tile = min(tokens * vocab * 4, chunked_loss.CHUNK_BYTES * chunked_loss.DEVICE_FACTOR)
    return hidden + weights_of_head * 4 + 3 * tile


def _layers(job: Job, tokens: int) -> tuple[float, float]:
    """(what all layers keep until their backward pass, what the largest one at work holds besides), bytes."""
    item = job.dtype.itemsize
    row = (getattr(job.config, "intermediate_size", None) or 0) * item
    in_tiles = tokens * row > chunked_mlp.LARGE if job.plan.tiled_mlp is None else job.plan.tiled_mlp
    few = max(FEW, 2 * chunked_mlp.TILE_BYTES // max(1, row)) if in_tiles else FEW
    total, largest = 0.0, 0.0
    for index, count in _model(job).kinds:
        kept, working = _layer(job, index, in_tiles, min(tokens, few))
        if tokens > few:
            more = _layer(job, index, in_tiles, 2 * few)
            kept, working = (at + (then - at) / few * (tokens - few) for at, then in zip((kept, working), more))
        total, largest = total + count * kept, max(largest, working)
    return total, largest


@cache
def _model(job: Job) -> WithoutData:
    return WithoutData(job.config, job.dtype)


@cache
def _layer(job: Job, index: int, in_tiles: bool, tokens: int) -> tuple[int, int]:
    """(kept, working) of one layer on few tokens."""
    one, two = (_model(job).run(index, n, tokens, job.plan, job.checkpoints, in_tiles) for n in (1, 2))
    kept = two[0] - one[0]
    return kept, two[1] - 2 * kept
