"""Packages that share a sequence by other code, in ``ds_cp bench step`` where they can train.

They are imported and used as their documentation says. The training loop around all of them is a plain DeepSpeed loop, in
which each rank has a shard of the row, and its own part of the row's mean loss.
"""

from __future__ import annotations

import importlib
from typing import Any, Callable

import torch

from ds_cp.cli.bench.contenders import Contender, build_model
from ds_cp.cli.bench.shape import TrainShape


class _OnShards(Contender):
    """A model whose attention is replaced, on shards of the row.

    Attributes:
        batch: this rank's shard.
    """

    batch: dict[str, torch.Tensor]

    def forward(self, model: Any = None) -> torch.Tensor:
        return (model or self.engine)(**self.batch).loss

    def step(self) -> float:
        mean = torch.tensor(super().step())
        torch.distributed.all_reduce(mean)
        return mean.item() / torch.distributed.get_world_size()


class Ringmaster(_OnShards):
    """axolotl-ringmaster: its shards, its attention, each rank's mean of its own tokens."""

    def __init__(self, shape: TrainShape, backend: str):
        import deepspeed
        import ringmaster
        from ringmaster.shard import shard_batch

        world = torch.distributed.get_world_size()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        zigzag = backend == "ring" and device == "cuda"  # it has no zigzag for CPUs
        config = ringmaster.RingmasterConfig(
            size=world,
            backend=ringmaster.Backend(backend),
            rotate_method=ringmaster.RotateMethod.ALLTOALL,
            load_balance=ringmaster.LoadBalance.HEAD_TAIL if zigzag else ringmaster.LoadBalance.NONE,
        )
        runtime = ringmaster.setup(config, num_kv_heads=shape.kv_heads, device_type=device, inner_attn="sdpa")
        model = build_model(shape, "sdpa")
        model.set_attn_implementation(runtime.attn_implementation)
        self.engine, *_ = deepspeed.initialize(model=model, config=shape.json())
        batch = {name: value.to(self.engine.device) for name, value in shape.batch().items()}
        self.batch, _ = shard_batch(batch, cp_rank=torch.distributed.get_rank(), cp_size=world)


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Causal attention of local q, k, v [B, L, heads, d] and a scale; out is like q."""


class ByFunction(_OnShards):
    """A package that offers a function of local q, k and v: registered under a name in transformers' table.

    Args:
        attention: the function.
        chunks: into how many pieces the row is cut; a rank has its own, and in zigzag the one as far from the end.
    """

    def __init__(self, shape: TrainShape, attention: Attention, chunks: int):
        import deepspeed
        from transformers import AttentionInterface

        def forward(module, query, key, value, attention_mask, scaling, **kwargs):
            return attention(*(x.transpose(1, 2) for x in (query, key, value)), scaling), None

        AttentionInterface.register("ds_cp_bench_peer", forward)
        model = build_model(shape, "ds_cp_bench_peer")
        self.engine, *_ = deepspeed.initialize(model=model, config=shape.json())
        self.batch = shard(shape.batch(), chunks, torch.distributed.get_rank(), torch.distributed.get_world_size())
        self.batch = {name: value.to(self.engine.device) for name, value in self.batch.items()}
        self.targets = (shape.seq_len - 1) / torch.distributed.get_world_size()

    def forward(self, model: Any = None) -> torch.Tensor:
        return (model or self.engine)(**self.batch, num_items_in_batch=self.targets).loss


def shard(batch: dict[str, torch.Tensor], chunks: int, rank: int, world: int) -> dict[str, torch.Tensor]:
    """A rank's tokens of a row, with the labels shifted before they are cut."""
    following = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    mine = [rank] if chunks == world else [rank, chunks - 1 - rank]

    def of(whole: torch.Tensor) -> torch.Tensor:
        pieces = whole.chunk(chunks, dim=1)
        return torch.cat([pieces[i] for i in mine], dim=1)

    labels = of(following)
    ids, positions = of(batch["input_ids"]), of(batch["position_ids"])
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "shift_labels": labels}


def ring_flash_attention(shape: TrainShape) -> Contender:
    """Its zigzag ring."""
    from ring_flash_attn import zigzag_ring_flash_attn_func

    def attention(query, key, value, scale):
        return zigzag_ring_flash_attn_func(query, key, value, softmax_scale=scale, causal=True)

    return ByFunction(shape, attention, 2 * torch.distributed.get_world_size())


def yunchang(shape: TrainShape, ulysses: bool) -> Contender:
    """Its LongContextAttention, all ulysses or all ring: zigzag on flash-attn, else on torch's kernel and contiguous."""
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

    def attention(query, key, value, scale):
        if not HAS_FLASH_ATTN:  # torch's operator wants a key head for each query head
            key, value = (x.repeat_interleave(query.size(2) // x.size(2), dim=2) for x in (key, value))
        return layer(query, key, value, softmax_scale=scale, causal=True)

    return ByFunction(shape, attention, 2 * world if HAS_FLASH_ATTN and not ulysses else world)


BUILDERS: dict[str, Callable[[TrainShape], Contender]] = {
    "ringmaster ulysses": lambda shape: Ringmaster(shape, "ulysses"),
    "ringmaster ring": lambda shape: Ringmaster(shape, "ring"),
    "ring-flash-attention": ring_flash_attention,
    "yunchang ulysses": lambda shape: yunchang(shape, True),
    "yunchang ring": lambda shape: yunchang(shape, False),
}
"""By the name that ``--contenders`` takes."""

_PACKAGES = {"ringmaster": "ringmaster", "ring-flash-attention": "ring_flash_attn", "yunchang": "yunchang"}
"""What is imported, by the first word of a contender."""

_NEEDS_CUDA = {
    "ring-flash-attention": "its only kernel, flash-attn, has no CPU code",
    "yunchang": "its torch path calls aten::_scaled_dot_product_flash_attention, which CPUs lack, or has no backward pass",
}


def why_not(name: str, shape: TrainShape) -> str | None:
    """Why a peer of :data:`BUILDERS` cannot train here; None if it can."""
    package = name.split(" ", 1)[0]
    try:
        importlib.import_module(_PACKAGES[package])
    except ImportError as error:
        return f"does not import here ({error})"
    except Exception as error:  # a peer's import may fail in any way
        return f"does not import here ({type(error).__name__}: {error})"
    if package in _NEEDS_CUDA and not torch.cuda.is_available():
        return f"needs CUDA: {_NEEDS_CUDA[package]}"
    if package in _NEEDS_CUDA and shape.documents > 1:
        return "would let packed documents see each other"
    return None
