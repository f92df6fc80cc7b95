"""Who trains in ``ds_cp bench step`` wherever ds_cp is installed: ds_cp, DeepSpeed's UlyssesSPAttentionHF, data parallelism."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable

import torch

from ds_cp.cli.bench.shape import TrainShape


def build_model(shape: TrainShape, attention: str) -> Any:
    """The same weights for everybody."""
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
        self.engine, *_ = deepspeed.initialize(model=build_model(shape, "sdpa"), config=shape.json(**more))
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
        model = build_model(shape, "sdpa")
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


BUILDERS: dict[str, Callable[[TrainShape], Any]] = {
    "UlyssesSPAttentionHF": UlyssesSP,
    "data parallel": lambda shape: Plain(shape, None),
    "ds_cp": lambda shape: Plain(shape, {"method": "auto"}),
    "ds_cp ulysses": lambda shape: Plain(shape, {"method": "ulysses"}),
    "ds_cp ring": lambda shape: Plain(shape, {"method": "ring"}),
    "ds_cp allgather": lambda shape: Plain(shape, {"method": "allgather"}),
    "ds_cp offload_kv": lambda shape: Plain(shape, {"method": "auto", "offload_kv": 1024}),
}
"""By the name that ``--contenders`` takes; other packages are in :mod:`ds_cp.cli.bench.peers`."""
