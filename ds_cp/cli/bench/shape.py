"""What a benchmark trains: a Llama-shaped model, a row of tokens, and what a step of it costs on paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainShape:
    """A Llama of ``layers`` layers on a row of S tokens, which holds ``documents`` equal documents."""

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
        """Of one step on one row without any recomputation: forward, and twice that backward. Causal attention counts the
        pairs that see each other."""
        projections = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        per_token = self.layers * (projections + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab
        pairs = self.seq_len * (self.seq_len / self.documents + 1) / 2
        attention = self.layers * 2 * pairs * self.heads * self.head_dim
        return 3 * 2 * (self.seq_len * per_token + attention)

    def config(self) -> Any:
        """The transformers config."""
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
        """One row: ids, labels, and positions that restart with each document."""
        import torch

        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab, (1, self.seq_len), generator=generator)
        positions = torch.arange(self.seq_len // self.documents).repeat(self.documents)[None]
        return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}

    def json(self, **more: Any) -> dict[str, Any]:
        """The DeepSpeed config; on a GPU it trains in bf16, which is what flash kernels take."""
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
