"""Runs of the Hugging Face Trainer: data sets, arguments and configs."""

import pytest
import torch

from harness import engine, models
from harness.models import ModelSpec

LLAMA = ModelSpec("llama")

ROWS = 12


class RowDataset(torch.utils.data.Dataset):
    """Rows of different lengths, determined by their index."""

    def __init__(self, size=ROWS):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index >= self.size:
            raise IndexError(index)  # ends iteration
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, models.VOCAB, (9 + 5 * (index % 4),), generator=generator)


def pad_right(rows):
    length = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (0, length - len(row))) for row in rows])
    mask = torch.stack([torch.arange(length) < len(row) for row in rows]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def arguments(folder, ds_config, kind=None, **more):
    from transformers import TrainingArguments

    defaults = dict(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=1,
        max_steps=3, logging_steps=1, save_strategy="no", report_to=[], learning_rate=0.5, lr_scheduler_type="constant",
        max_grad_norm=0.0, seed=7, include_num_input_tokens_seen="non_padding", disable_tqdm=True,
        optim="sgd", deepspeed=ds_config,
    )  # fmt: skip
    return (kind or TrainingArguments)(**defaults | more)


def json_for(cp, stage, **more):
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**6,
    }
    return config | ({"context_parallel": cp} if cp else {}) | more


def trained(folder, ds_config, resume=None, collator=pad_right, spec=LLAMA, data=None, loss=None, **more):
    """Train; logs, trainer state and weights.

    Args:
        data: the training set; default: :class:`RowDataset`.
        loss: ``compute_loss_func`` of the Trainer.
        more: training arguments.
    """
    from transformers import Trainer

    engine.activate()
    model = models.build(spec)  # before the arguments, which would activate zero.Init
    args = arguments(folder, ds_config, **more)
    trainer = Trainer(
        model=model, args=args, train_dataset=RowDataset() if data is None else data, eval_dataset=type(data)(ROWS) if isinstance(data, RowDataset) else RowDataset(),
        data_collator=collator,
        compute_loss_func=loss,
    )  # fmt: skip
    figures = trainer.train(resume_from_checkpoint=resume).metrics
    names = ("loss", "grad_norm", "step", "learning_rate")
    logs = [{k: log.get(k) for k in names} for log in trainer.state.log_history if "loss" in log]
    weights = engine.full_weights(trainer.model_wrapped.module if ds_config else trainer.model)
    return {
        "logs": logs,
        "tokens": trainer.state.num_input_tokens_seen,
        "epoch": trainer.state.epoch,
        "flos": trainer.state.total_flos,
        **{
            name: round(figures[f"train_{name}_per_second"] * figures["train_runtime"]) for name in ("samples", "steps")
        },
        "total_batch": trainer.get_total_train_batch_size(args),
        "weights": weights,
        "eval_loss": trainer.evaluate()["eval_loss"],
    }


def assert_same_training(got, want):
    for name in ("epoch", "tokens", "total_batch", "steps"):
        assert got[name] == want[name], name
    assert got["samples"] == pytest.approx(want["samples"], rel=0.02)  # a rate with three digits
    assert [log["learning_rate"] for log in got["logs"]] == [log["learning_rate"] for log in want["logs"]]
    for one, other in zip(got["logs"], want["logs"]):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-5)
    for name, weight in want["weights"].items():
        assert (got["weights"][name] - weight).norm() <= 1e-5 * weight.norm(), name
    assert got["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-5)
