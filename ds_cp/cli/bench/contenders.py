"""Who trains in ``ds_cp bench step``: ds_cp, DeepSpeed's UlyssesSPAttentionHF, data parallelism; others where they run.

Peers are imported and used as their documentation says.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any, Callable

import torch

from ds_cp.cli.bench.shape import TrainShape


def _model(shape: TrainShape, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape.config(), attn_implementation=attention)
    if shape.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


class Contender(ABC):
    """An engine, and how many rows of S tokens a step of all ranks trains."""

    engine: Any
    rows = 1

    @abstractmethod
    def forward(self, model: Any = None) -> torch.Tensor:
        """The loss of this rank, by ``model`` or by the engine."""

    def step(self) -> float:
        """Train a step; the loss of the rows."""
        loss = self.forward()
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


class Plain(Contender):
    """A plain DeepSpeed loop; with the key, the rank's group shares each row."""

    def __init__(self, shape: TrainShape, key: dict[str, Any] | None):
        import deepspeed

        world = torch.distributed.get_world_size()
        self.rows = 1 if key else world
        more = {"context_parallel": {"size": world} | key} if key else {}
        if key:
            from ds_cp import _autoload

            _autoload.activate()
        self.engine, *_ = deepspeed.initialize(model=_model(shape, "sdpa"), config=shape.json(**more))
        self.batch = {name: value.to(self.engine.device) for name, value in shape.batch().items()}

    def forward(self, model: Any = None) -> torch.Tensor:
        return (model or self.engine)(**self.batch).loss


class UlyssesSP(Contender):
    """DeepSpeed's UlyssesSPAttentionHF with its own loader and its own sum of the losses of all shards."""

    def __init__(self, shape: TrainShape):
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
        from deepspeed.utils import groups

        world = torch.distributed.get_world_size()
        model = _model(shape, "sdpa")
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=world,
            micro_batch_size=1,
            seq_length=shape.seq_len,
            seq_length_is_variable=False,
        )
        config = shape.json(sequence_parallel_size=world)
        self.engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
        self.group, self.vocab = groups._get_sequence_parallel_group(), shape.vocab
        loader = torch.utils.data.DataLoader([shape.batch()] * 64, batch_size=None)
        rank = groups._get_sequence_parallel_rank()
        self.batches = UlyssesSPDataLoaderAdapter(loader, rank, self.group, world, self.engine.device)

    def forward(self, model: Any = None) -> torch.Tensor:
        from torch.distributed.nn.functional import all_gather

        batch = next(self.batches)
        targets = batch["shift_labels"]
        logits = (model or self.engine)(**batch).logits
        loss = self.engine.module.loss_function(logits=logits, labels=None, shift_labels=targets, vocab_size=self.vocab)
        counts = all_gather((targets != -100).sum(), group=self.group)
        losses = all_gather(loss, group=self.group)
        return sum(part * count for part, count in zip(losses, counts)) / sum(counts)


class Ringmaster(Contender):
    """axolotl-ringmaster in a plain DeepSpeed loop: its shards, its attention, each rank's mean of its own tokens."""

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
        model = _model(shape, "sdpa")
        model.set_attn_implementation(runtime.attn_implementation)
        self.engine, *_ = deepspeed.initialize(model=model, config=shape.json())
        batch = {name: value.to(self.engine.device) for name, value in shape.batch().items()}
        self.batch, _ = shard_batch(batch, cp_rank=torch.distributed.get_rank(), cp_size=world)

    def forward(self, model: Any = None) -> torch.Tensor:
        return (model or self.engine)(**self.batch).loss

    def step(self) -> float:
        mean = torch.tensor(super().step())
        torch.distributed.all_reduce(mean)
        return mean.item() / torch.distributed.get_world_size()


BUILDERS: dict[str, Callable[[TrainShape], Any]] = {
    "UlyssesSPAttentionHF": UlyssesSP,
    "data parallel": lambda shape: Plain(shape, None),
    "ds_cp": lambda shape: Plain(shape, {"method": "auto"}),
    "ds_cp ulysses": lambda shape: Plain(shape, {"method": "ulysses"}),
    "ds_cp ring": lambda shape: Plain(shape, {"method": "ring"}),
    "ds_cp allgather": lambda shape: Plain(shape, {"method": "allgather"}),
    "ringmaster ulysses": lambda shape: Ringmaster(shape, "ulysses"),
    "ringmaster ring": lambda shape: Ringmaster(shape, "ring"),
}
"""By the name that ``--contenders`` takes."""

OTHERS = {
    "ring-flash-attention": "ring_flash_attn",
    "yunchang": "yunchang",
}
"""Packages that share a sequence by other code: what is imported for each."""


def why_not(name: str) -> str:
    """Why one of :data:`OTHERS` is not measured here."""
    try:
        importlib.import_module(OTHERS[name])
    except ImportError as error:
        return f"does not import here ({error})"
    except Exception as error:  # a peer's import may fail in any way
        return f"does not import here ({type(error).__name__}: {error})"
    if not torch.cuda.is_available():
        return "is installed, but its kernels need a GPU"
    return "is installed, but replaces attention functions that transformers no longer calls; it is not measured"
