"""Contenders of ``ds_cp bench step`` from other packages for context parallelism, which train where they can run.

Each package is imported and called as its documentation describes. The training loop is the same plain DeepSpeed loop for all:
each rank has a shard of the row, and its loss is its part of the row's mean loss.
"""

from __future__ import annotations

import importlib
from typing import Any, Callable

import torch

from ds_cp.cli.bench.contenders import Contender, build_model
from ds_cp.cli.bench.shape import TrainShape


class _ShardedContender(Contender):
    """A model with the attention of another package, on shards of the row.

    Attributes:
        batch: Shard of this rank.
    """

    batch: dict[str, torch.Tensor]

    def forward(self, model: Any = None) -> torch.Tensor:
        loss: torch.Tensor = (model or self.engine)(**self.batch).loss
        return loss

    def step(self) -> float:
        mean = torch.tensor(super().step())
        torch.distributed.all_reduce(mean)
        return mean.item() / torch.distributed.get_world_size()


class Ringmaster(_ShardedContender):
    """axolotl-ringmaster with its own sharding and attention; the loss of a rank is the mean over its own tokens.

    Args:
        shape: Shape of the model and the batch.
        backend: ``"ring"`` or ``"ulysses"``.
    """

    def __init__(self, shape: TrainShape, backend: str) -> None:
        import deepspeed
        import ringmaster
        from ringmaster.shard import shard_batch

        world = torch.distributed.get_world_size()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        zigzag = backend == "ring" and device == "cuda"  # ringmaster has no zigzag ring on CPUs
        config = ringmaster.RingmasterConfig(
            size=world,
            backend=ringmaster.Backend(backend),
            rotate_method=ringmaster.RotateMethod.ALLTOALL,
            load_balance=ringmaster.LoadBalance.HEAD_TAIL if zigzag else ringmaster.LoadBalance.NONE,
        )
        runtime = ringmaster.setup(config, num_kv_heads=shape.kv_heads, device_type=device, inner_attn="sdpa")
        model = build_model(shape, "sdpa")
        model.set_attn_implementation(runtime.attn_implementation)
        self.engine, *_ = deepspeed.initialize(model=model, config=shape.deepspeed_config())
        batch = {name: value.to(self.engine.device) for name, value in shape.batch().items()}
        self.batch, _ = shard_batch(batch, cp_rank=torch.distributed.get_rank(), cp_size=world)


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Causal attention of local q, k, v [B, L, heads, d] with a softmax scale; the output has the shape of q."""


class AttentionFunction(_ShardedContender):
    """A package that offers a function of local q, k and v, registered in the attention interface of transformers.

    Args:
        shape: Shape of the model and the batch.
        attention: The function.
        chunks: Number of equal chunks of the row. With one chunk per rank, rank r has chunk r; with two (zigzag), it has the
            chunks r and ``chunks - 1 - r``.
    """

    def __init__(self, shape: TrainShape, attention: Attention, chunks: int) -> None:
        import deepspeed
        from transformers import AttentionInterface

        def attend(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            scaling: float,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, None]:
            return attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scaling), None

        AttentionInterface.register("ds_cp_bench_peer", attend)
        model = build_model(shape, "ds_cp_bench_peer")
        self.engine, *_ = deepspeed.initialize(model=model, config=shape.deepspeed_config())
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        batch = shard(shape.batch(), chunks, rank, world)
        self.batch = {name: value.to(self.engine.device) for name, value in batch.items()}
        self.targets_per_rank = (shape.seq_len - 1) / world

    def forward(self, model: Any = None) -> torch.Tensor:
        # DeepSpeed averages the gradients over the ranks, so each rank divides by its mean number of targets.
        loss: torch.Tensor = (model or self.engine)(**self.batch, num_items_in_batch=self.targets_per_rank).loss
        return loss


def shard(batch: dict[str, torch.Tensor], chunks: int, rank: int, world: int) -> dict[str, torch.Tensor]:
    """The shard of a rank, with labels that are shifted before they are sharded.

    Args:
        batch: Ids, labels and position ids of a row, [1, S].
        chunks: Number of equal chunks of the row, ``world`` or ``2 * world``; see :class:`AttentionFunction`.
        rank: Rank of the shard.
        world: Number of ranks.
    """
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    indices = [rank] if chunks == world else [rank, chunks - 1 - rank]

    def local(full: torch.Tensor) -> torch.Tensor:
        parts = full.chunk(chunks, dim=1)
        return torch.cat([parts[i] for i in indices], dim=1)

    labels = local(shifted)
    ids, positions = local(batch["input_ids"]), local(batch["position_ids"])
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "shift_labels": labels}


def ring_flash_attention(shape: TrainShape) -> Contender:
    """The zigzag ring of ring-flash-attention."""
    from ring_flash_attn import zigzag_ring_flash_attn_func

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        out: torch.Tensor = zigzag_ring_flash_attn_func(query, key, value, softmax_scale=scale, causal=True)
        return out

    return AttentionFunction(shape, attention, 2 * torch.distributed.get_world_size())


def yunchang(shape: TrainShape, ulysses: bool) -> Contender:
    """LongContextAttention of yunchang: with flash-attn and a zigzag layout, or without flash-attn on torch's kernel and a
    contiguous layout.

    Args:
        shape: Shape of the model and the batch.
        ulysses: Whether all ranks form a ulysses group; otherwise they form a ring.
    """
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.globals import HAS_FLASH_ATTN
    from yunchang.kernels import AttnType

    world = torch.distributed.get_world_size()
    degrees = (world, 1) if ulysses else (1, world)
    set_seq_parallel_pg(*degrees, torch.distributed.get_rank(), world)
    if HAS_FLASH_ATTN:
        layer = LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.FA)
    else:
        layer = LongContextAttention(ring_impl_type="basic_pytorch", attn_type=AttnType.TORCH_FLASH)

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        if not HAS_FLASH_ATTN:  # torch's operator needs one key/value head per query head
            key, value = (x.repeat_interleave(query.size(2) // x.size(2), dim=2) for x in (key, value))
        out: torch.Tensor = layer(query, key, value, softmax_scale=scale, causal=True)
        return out

    return AttentionFunction(shape, attention, 2 * world if HAS_FLASH_ATTN and not ulysses else world)


BUILDERS: dict[str, Callable[[TrainShape], Contender]] = {
    "ringmaster ulysses": lambda shape: Ringmaster(shape, "ulysses"),
    "ringmaster ring": lambda shape: Ringmaster(shape, "ring"),
    "ring-flash-attention": ring_flash_attention,
    "yunchang ulysses": lambda shape: yunchang(shape, True),
    "yunchang ring": lambda shape: yunchang(shape, False),
}
"""Contenders by the name that ``--contenders`` accepts."""

_PACKAGES = {"ringmaster": "ringmaster", "ring-flash-attention": "ring_flash_attn", "yunchang": "yunchang"}
"""Python package by the first word of a contender's name."""

_NEEDS_CUDA = {
    "ring-flash-attention": "its only kernel, flash-attn, has no CPU code",
    "yunchang": "its torch path calls aten::_scaled_dot_product_flash_attention, which CPUs lack, or has no backward pass",
}


def why_not(name: str, shape: TrainShape) -> str | None:
    """Why a contender of :data:`BUILDERS` cannot train on this machine; None if it can."""
    package = name.split(" ", 1)[0]
    try:
        importlib.import_module(_PACKAGES[package])
    except ImportError as error:
        return f"does not import here ({error})"
    except Exception as error:  # importing another package may raise anything
        return f"does not import here ({type(error).__name__}: {error})"
    if package in _NEEDS_CUDA and not torch.cuda.is_available():
        return f"needs CUDA: {_NEEDS_CUDA[package]}"
    if package in _NEEDS_CUDA and shape.documents > 1:
        return "would let queries attend to other documents of a packed row"
    return None
