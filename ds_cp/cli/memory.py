"""Estimates of the memory of a training step: model states by the formulas of ZeRO, activations counted on the meta device.

What a layer holds is linear in its number of tokens, so two short runs on the meta device (:mod:`.meta_model`) give it for
any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Mapping

import torch

from ds_cp.chunked import cross_entropy as chunked_loss
from ds_cp.cli.meta_model import MetaModel
from ds_cp.layout import Layout
from ds_cp.patches.transformers import structure
from ds_cp.patches.transformers.memory import chunked_mlp
from ds_cp.planner import Plan

MIN_TOKENS = 4096
"""Smallest number of tokens of the shorter run on the meta device. Where MLPs run on chunks, it has at least two chunks."""

HIDDEN_STATES_PER_TOKEN = 5
"""Hidden states per token that a layer under ``offload_kv`` holds at its peak, among them its input and output and their
gradients (tests/patches/transformers/memory/test_chunked_layers.py)."""


@dataclass(frozen=True, eq=False)
class Job:
    """A training job.

    Attributes:
        config: Config of the text model.
        plan: Plan that follows from the config entry ``context_parallel``.
        zero: Section ``zero_optimization`` of the DeepSpeed config.
        world: Number of ranks.
        dtype: Dtype of weights and activations.
        rows: Number of sequences per forward (micro batch).
        checkpointing: Whether gradient checkpointing is on.
    """

    config: Any
    plan: Plan
    zero: Mapping[str, Any]
    world: int
    dtype: torch.dtype
    rows: int = 1
    checkpointing: bool = True

    @property
    def saves_inputs_only(self) -> bool:
        """Whether a layer saves its input only; under ``offload_kv`` it does so without gradient checkpointing, too."""
        return self.checkpointing or bool(self.plan.offload_kv)


@dataclass(frozen=True)
class Memory:
    """Memory of one rank in bytes.

    Attributes:
        model_states: Weights, gradients and states of Adam on the device.
        zero_buffers: Buckets of ZeRO and weights that ZeRO-3 has gathered.
        saved: Activations of all layers that are saved for the backward pass.
        largest_layer: What the largest layer holds in addition to that while it runs.
        loss: What the loss holds while it runs.
        host: Bytes in host memory; the other attributes are bytes on the device.
    """

    model_states: float
    zero_buffers: float
    saved: float
    largest_layer: float
    loss: float
    host: float

    @property
    def total(self) -> float:
        """Peak on the device; the loss and the layers do not run at the same time."""
        return self.model_states + self.zero_buffers + self.saved + max(self.largest_layer, self.loss)


def estimate(job: Job, seq_len: int) -> Memory:
    """Estimate the memory of a step on sequences of ``seq_len`` tokens.

    Does not count fragmentation in the allocator, buffers of NCCL and workspaces of kernels.

    Raises:
        RuntimeError: A layer does not run on the meta device, for example because its code reads values of a tensor.
    """
    plan, item_size, model = job.plan, job.dtype.itemsize, _meta_model(job)
    tokens = job.rows * Layout(seq_len, plan.ring, plan.ulysses, plan.layout).local_len
    states, host = model_states(model.num_weights, job.zero, job.world, item_size)
    saved, layer = _layers(job, tokens)
    if plan.offload_activations and job.saves_inputs_only:
        host, saved = host + saved, 0.0
    if plan.offload_kv:
        _, layer = _layers(job, min(tokens, plan.offload_kv))
        layer += HIDDEN_STATES_PER_TOKEN * tokens * job.config.hidden_size * item_size
        host += _host_kv(job, seq_len)
    return Memory(
        model_states=states,
        zero_buffers=zero_buffers(model.num_weights, job.config.hidden_size, job.zero, item_size),
        saved=saved,
        largest_layer=layer,
        loss=_loss(job, tokens, model.num_lm_head_weights),
        host=host,
    )


def longest(job: Job, budget: float, start: int) -> int:
    """The longest sequence whose step needs at most ``budget`` bytes on the device, found by bisection.

    Args:
        job: The training job.
        budget: Bytes of one device.
        start: Number of tokens at which the search starts.

    Returns:
        A length in units of 1024 tokens per rank of the context-parallel group, one unit or 2 percent short at most; 0 if
        no sequence fits.
    """
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


def model_states(num_weights: int, zero: Mapping[str, Any], world: int, item_size: int) -> tuple[float, float]:
    """Bytes of weights, gradients and states of Adam on one rank: (on the device, in host memory).

    With N ranks, ZeRO stage 1 shards the optimizer states over them, stage 2 the gradients too, and stage 3 the weights too
    (Rajbhandari et al. 2020). For ZeRO the ranks of a context-parallel group are data-parallel ranks, so N is ``world``.
    """
    stage = int(zero.get("stage", 0))
    weights: float = num_weights * item_size
    gradients = weights
    optimizer: float = num_weights * (8 if item_size == 4 else 12)
    optimizer /= world if stage >= 1 else 1
    gradients /= world if stage >= 2 else 1
    weights /= world if stage >= 3 else 1
    device, host = weights + gradients + optimizer, 0.0
    if _is_offloaded(zero, "offload_optimizer"):
        offloaded = optimizer + (gradients if stage >= 2 else 0)
        device, host = device - offloaded, host + offloaded
    if _is_offloaded(zero, "offload_param"):
        device, host = device - weights, host + weights
    return device, host


def zero_buffers(num_weights: int, hidden_size: int, zero: Mapping[str, Any], item_size: int) -> float:
    """Upper bound of the bytes of ZeRO's reduce buckets and, under stage 3, of the weights that it has gathered."""

    def size(name: str, default: float, auto: float) -> float:
        value = zero.get(name, default)
        return min(num_weights, auto if value == "auto" else float(value))

    stage = int(zero.get("stage", 0))
    buckets = size("reduce_bucket_size", 5e8, hidden_size * hidden_size)
    buckets *= 2 if zero.get("overlap_comm", stage == 3) else 1
    gathered = size("stage3_max_live_parameters", 1e9, 1e9) if stage == 3 else 0
    return (buckets * (stage > 0) + gathered) * item_size


def _is_offloaded(zero: Mapping[str, Any], section: str) -> bool:
    device: str = (zero.get(section) or {}).get("device", "none")
    return device != "none"


def _host_kv(job: Job, seq_len: int) -> float:
    """Upper bound of the host memory of ``offload_kv``: K and V of all tokens for one layer, and their gradients in fp32."""
    head_counts, head_dims = structure.head_counts(job.config), structure.head_dims(job.config)
    kv_heads = max((kv_heads for _, kv_heads in head_counts), default=0) / job.plan.ulysses
    return job.rows * seq_len * kv_heads * 2 * max(head_dims, default=0) * (job.dtype.itemsize + 4)


def _loss(job: Job, tokens: int, num_lm_head_weights: int) -> float:
    """Bytes of the last hidden states, of the logits, and of the gradients of both."""
    item_size, hidden_size = job.dtype.itemsize, int(job.config.hidden_size)
    vocab = num_lm_head_weights // hidden_size
    hidden = 2 * tokens * hidden_size * item_size
    if not job.plan.tiled_loss:
        return hidden + tokens * vocab * (2 * item_size + 2 * 4)  # logits and their gradients, in the dtype and in fp32
    chunk = min(tokens * vocab * 4, chunked_loss.CHUNK_BYTES * chunked_loss.DEVICE_FACTOR)
    return hidden + num_lm_head_weights * 4 + 3 * chunk


def _layers(job: Job, tokens: int) -> tuple[float, float]:
    """Bytes of all layers on ``tokens`` local tokens.

    Returns:
        (bytes that all layers save for the backward pass, bytes that the largest layer holds in addition while it runs).
    """
    token_bytes = (getattr(job.config, "intermediate_size", None) or 0) * job.dtype.itemsize
    chunked = job.plan.tiled_mlp
    if chunked is None:
        chunked = tokens * token_bytes > chunked_mlp.LARGE_BYTES
    chunk_bytes = chunked_mlp.CHUNK_BYTES * chunked_mlp.DEVICE_FACTOR
    measured = max(MIN_TOKENS, 2 * chunk_bytes // max(1, token_bytes)) if chunked else MIN_TOKENS
    total, largest = 0.0, 0.0
    for index, count in _meta_model(job).layer_kinds:
        saved: float
        layer: float
        saved, layer = _layer(job, index, chunked, min(tokens, measured))
        if tokens > measured:
            saved_twice, layer_twice = _layer(job, index, chunked, 2 * measured)
            steps = (tokens - measured) / measured
            saved, layer = saved + (saved_twice - saved) * steps, layer + (layer_twice - layer) * steps
        total, largest = total + count * saved, max(largest, layer)
    return total, largest


@cache
def _meta_model(job: Job) -> MetaModel:
    return MetaModel(job.config, job.dtype)


@cache
def _layer(job: Job, index: int, chunked_mlps: bool, tokens: int) -> tuple[int, int]:
    """(bytes saved, bytes held in addition while it runs) of one layer: the difference between runs of two layers and of one."""
    (saved_by_one, _), (saved_by_two, peak_of_two) = (
        _meta_model(job).run(index, n, tokens, job.plan, job.saves_inputs_only, chunked_mlps) for n in (1, 2)
    )
    saved = saved_by_two - saved_by_one
    return saved, peak_of_two - 2 * saved
