"""What a training step will hold on a rank: model states by ZeRO's formula, activations by running layers without data.

Layers of the real model run forward and backward on torch's meta device, whose tensors have sizes and lifetimes but no
data, with a stand-in for attention that allocates what ds_cp's does. So the count follows the model's own code and
autograd's own order, and costs a second.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Iterator, Mapping

import torch

from ds_cp.cli.bench.probes import PeakStorages
from ds_cp.layout import Layout
from ds_cp.patches.transformers import anatomy
from ds_cp.patches.transformers.memory import mlp
from ds_cp.planner import Plan
from ds_cp.tiled import loss as tiled_loss

STAND_IN = "ds_cp_plan"

FEW = 4096
"""Tokens that layers run on here: several tiles of an MLP."""

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
    plan, item = job.plan, job.dtype.itemsize
    tokens = job.rows * Layout(seq_len, plan.ring, plan.ulysses, plan.layout).local_len
    numbers, weights_of_head = _parameters(job.config)
    states, host = model_states(numbers, job.zero, job.world, item)
    kept, working = _layer(job, tokens)
    kept *= job.config.num_hidden_layers
    if plan.offload_activations and job.checkpointing:
        host, kept = host + kept, 0.0
    if plan.offload_kv:
        _, working = _layer(job, min(tokens, plan.offload_kv))
        working += SPANS * tokens * job.config.hidden_size * item
    return Memory(
        states=states,
        buffers=zero_buffers(numbers, job.config.hidden_size, job.zero, item),
        kept=kept,
        working=working,
        loss=_loss(job, tokens, weights_of_head),
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


def _parameters(config: Any) -> tuple[int, int]:
    """(numbers in the model, numbers in its head), from the model on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    return sum(p.numel() for p in model.parameters()), 0 if head is None else head.weight.numel()


def _loss(job: Job, tokens: int, weights_of_head: int) -> float:
    """Of the last hidden states and the logits, with what their gradients need."""
    item, vocab = job.dtype.itemsize, weights_of_head // job.config.hidden_size
    hidden = 2 * tokens * job.config.hidden_size * item
    if not job.plan.tiled_loss:
        return hidden + tokens * vocab * (2 * item + 2 * 4)  # logits in both precisions, and their gradients
    tile = min(tokens * vocab * 4, tiled_loss.TILE_BYTES * tiled_loss.ON_DEVICE)
    return hidden + weights_of_head * 4 + 3 * tile


def _layer(job: Job, tokens: int) -> tuple[float, float]:
    """(what each layer keeps until its backward pass, what the one at work holds besides), bytes."""
    large = tokens * (getattr(job.config, "intermediate_size", None) or 0) * job.dtype.itemsize > mlp.LARGE
    in_tiles = large if job.plan.tiled_mlp is None else job.plan.tiled_mlp
    return tuple(at + (more - at) / FEW * (tokens - FEW) for at, more in zip(*_at_two_lengths(job, in_tiles)))


@cache
def _at_two_lengths(job: Job, in_tiles: bool) -> list[tuple[int, int]]:
    """:func:`_layer` of few tokens and of twice as many; all of it is linear in them."""
    found = []
    for tokens in (FEW, 2 * FEW):
        one, two = (_run(job, tokens, layers, in_tiles) for layers in (1, 2))
        kept = two[0] - one[0]
        found.append((kept, two[1] - 2 * kept))
    return found


def _run(job: Job, tokens: int, layers: int, in_tiles: bool) -> tuple[int, int]:
    """(bytes that live between forward and backward, the most that ever live), of the first layers alone."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(job.config)
    config.num_hidden_layers, config.use_cache = layers, False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    with _stand_in(job), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=job.dtype, attn_implementation=STAND_IN).train()
        decoder = anatomy.find_decoder(model)
        if job.checkpointing:
            with warnings.catch_warnings(action="ignore"):  # the name that every version knows
                model.gradient_checkpointing_enable({"use_reentrant": False})
        mlp.attach(decoder, in_tiles)
        for weight in model.parameters():  # ZeRO takes gradients as they come
            weight.register_post_accumulate_grad_hook(_let_go)
        given = torch.empty(1, tokens, config.hidden_size, dtype=job.dtype, requires_grad=True)
        with PeakStorages() as storages:
            out = decoder(inputs_embeds=given, position_ids=torch.arange(tokens)[None]).last_hidden_state
            live = storages.live()
            out.backward(torch.empty_like(out))
    return live, storages.most


def _let_go(weight: torch.Tensor) -> None:
    weight.grad = None


@contextmanager
def _stand_in(job: Job) -> Iterator[None]:
    """While this holds, attention by the stand-in's name keeps and allocates what ds_cp's would."""
    from transformers.modeling_utils import AttentionInterface

    waiting: dict[torch.nn.Module, torch.Tensor] = {}

    def attend(module, query, key, value, *args, **kwargs):
        known = waiting.pop(module, None)
        out = _Attention.apply(query, key, value, known, job.plan)
        if job.checkpointing and known is None and not job.plan.recompute_attention:
            waiting[module] = out.detach()
        return out.transpose(1, 2), None

    AttentionInterface.register(STAND_IN, attend)  # to a name without a mask function transformers hands no mask
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(STAND_IN, None)


class _Attention(torch.autograd.Function):
    """Allocates as :mod:`ds_cp.attention.attend` does: rows under way, sums in fp32, what is saved."""

    @staticmethod
    def forward(ctx, query, key, value, known, plan):
        batch, heads, length, _ = query.shape
        ctx.plan = plan
        out, lse = known, query.new_empty((batch, heads, length), dtype=torch.float32)
        if known is None:
            under_way = _under_way(plan, query, key, value)
            sums = query.new_empty((batch, length, heads, value.size(-1)), dtype=torch.float32)
            out = sums.to(query.dtype).transpose(1, 2)
            del under_way, sums
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _, _ = ctx.saved_tensors
        under_way = _under_way(ctx.plan, query, key, value, grad, grad)
        sums = [x.new_empty(x.shape, dtype=torch.float32) for x in (query, key, value)]
        parcels = [x.new_empty(x.shape, dtype=torch.float32) for x in (key, value) * 3 if ctx.plan.ring > 1]
        del under_way, parcels
        return *(x.to(query.dtype) for x in sums), None, None


def _under_way(plan: Plan, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies of the tensors by heads and what arrives (ulysses), and K and V of three steps (ring)."""
    key, value = tensors[1:3]
    traded = [x.new_empty(x.shape) for x in tensors * 2 if plan.ulysses > 1]
    return traded + [x.new_empty(x.shape) for x in (key, value) * (2 + plan.ahead) if plan.ring > 1]
