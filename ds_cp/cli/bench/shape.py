"""The model and the batch of a benchmark of training steps, and the number of FLOPs of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainShape:
    """A Llama of ``layers`` layers that trains on a row of ``seq_len`` tokens, packed with ``documents`` equal documents."""

    seq_len: int
    layers: int = 4
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 2
    intermediate: int = 1408
    vocab: int = 32000
    documents: int = 1
    zero_stage: int = 2
    checkpointing: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def flops(self) -> float:
        """FLOPs of a step on one row without recomputation: the forward pass, and twice as many in the backward pass.

        Attention counts the pairs of query and key that are visible under the causal mask.
        """
        projections = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        per_token = self.layers * (projections + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab
        pairs = self.seq_len * (self.seq_len / self.documents + 1) / 2
        attention = self.layers * 2 * pairs * self.heads * self.head_dim
        return 3 * 2 * (self.seq_len * per_token + attention)

    def config(self) -> Any:
        """The transformers config of the model."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=self.seq_len,
            use_cache=False,
        )

    def batch(self) -> dict[str, Any]:
        """Ids, labels and position ids of one row, [1, seq_len]; position ids restart with each document."""
        import torch

        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab, (1, self.seq_len), generator=generator)
        positions = torch.arange(self.seq_len // self.documents).repeat(self.documents)[None]
        return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}

    def deepspeed_config(self, **more: Any) -> dict[str, Any]:
        """The DeepSpeed config, updated with ``more``. On a GPU it enables bf16, which FlashAttention requires."""
        import torch

        return {
            "bf16": {"enabled": torch.cuda.is_available()},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": self.zero_stage},
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        } | more
