"""Contenders of ``ds_cp bench step`` that run wherever ds_cp is installed: ds_cp itself, UlyssesSPAttentionHF of DeepSpeed and
data parallelism."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable

import torch

from ds_cp.cli.bench.shape import TrainShape


def build_model(shape: TrainShape, attention: str) -> Any:
    """The model of a shape, with the same random weights for every contender and on every rank.

    Args:
        shape: Shape of the model.
        attention: Name in the attention interface of transformers.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape.config(), attn_implementation=attention)
    if shape.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


class Contender(ABC):
    """A DeepSpeed engine and its batches.

    Attributes:
        engine: The engine.
        rows: Number of rows that all ranks together train in a step.
    """

    engine: Any
    rows = 1

    @abstractmethod
    def forward(self, model: Any = None) -> torch.Tensor:
        """The loss of this rank, computed by ``model``, or by the engine if that is None."""

    def step(self) -> float:
        """Train one step and return the mean loss of its rows."""
        loss = self.forward()
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


class DeepSpeedLoop(Contender):
    """A plain DeepSpeed loop: with context parallelism over all ranks, or with data parallelism.

    Args:
        shape: Shape of the model and the batch.
        context_parallel: Config entry ``context_parallel`` without its size; None for data parallelism.
    """

    def __init__(self, shape: TrainShape, context_parallel: dict[str, Any] | None) -> None:
        import deepspeed

        world = torch.distributed.get_world_size()
        self.rows = 1 if context_parallel else world
        entries = {"context_parallel": {"size": world} | context_parallel} if context_parallel else {}
        if context_parallel:
            from ds_cp import _autoload

            _autoload.activate()
        config = shape.deepspeed_config(**entries)
        self.engine, *_ = deepspeed.initialize(model=build_model(shape, "sdpa"), config=config)
        self.batch = {name: value.to(self.engine.device) for name, value in shape.batch().items()}

    def forward(self, model: Any = None) -> torch.Tensor:
        loss: torch.Tensor = (model or self.engine)(**self.batch).loss
        return loss


class UlyssesSP(Contender):
    """UlyssesSPAttentionHF of DeepSpeed, with its own data loader and with the loss averaged over the tokens of all shards."""

    def __init__(self, shape: TrainShape) -> None:
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
        from deepspeed.utils import groups

        world = torch.distributed.get_world_size()
        model = build_model(shape, "sdpa")
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=world,
            micro_batch_size=1,
            seq_length=shape.seq_len,
            seq_length_is_variable=False,
        )
        config = shape.deepspeed_config(sequence_parallel_size=world)
        self.engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
        self.group, self.vocab = groups._get_sequence_parallel_group(), shape.vocab
        rows: Any = [shape.batch()] * 64  # a list is a dataset for DataLoader, but not for its type annotation
        loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(rows, batch_size=None)
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
        mean: torch.Tensor = sum(part * count for part, count in zip(losses, counts)) / sum(counts)
        return mean


BUILDERS: dict[str, Callable[[TrainShape], Contender]] = {
    "UlyssesSPAttentionHF": UlyssesSP,
    "data parallel": lambda shape: DeepSpeedLoop(shape, None),
    "ds_cp": lambda shape: DeepSpeedLoop(shape, {"method": "auto"}),
    "ds_cp ulysses": lambda shape: DeepSpeedLoop(shape, {"method": "ulysses"}),
    "ds_cp ring": lambda shape: DeepSpeedLoop(shape, {"method": "ring"}),
    "ds_cp allgather": lambda shape: DeepSpeedLoop(shape, {"method": "allgather"}),
    "ds_cp offload_kv": lambda shape: DeepSpeedLoop(shape, {"method": "auto", "offload_kv": 1024}),
}
"""Contenders by the name that ``--contenders`` accepts; those of other packages are in :mod:`ds_cp.cli.bench.peers`."""
