"""Trainer runs for tests: small data sets, arguments, and configs as users write them."""

import torch

from harness import models

ROWS = 12


class Rows(torch.utils.data.Dataset):
    """Rows of different length, padded by the collator; fixed by their index."""

    def __init__(self, size=ROWS):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, models.VOCAB, (9 + 5 * (index % 4),), generator=generator)


def pad_right(rows):
    length = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (0, length - len(row))) for row in rows])
    mask = torch.stack([torch.arange(length) < len(row) for row in rows]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def arguments(folder, ds_config, **more):
    from transformers import TrainingArguments

    defaults = dict(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=1,
        max_steps=3, logging_steps=1, save_strategy="no", report_to=[], learning_rate=0.5, lr_scheduler_type="constant",
        max_grad_norm=0.0, seed=7, include_num_input_tokens_seen="non_padding", disable_tqdm=True,
        optim="sgd", deepspeed=ds_config,
    )  # fmt: skip
    return TrainingArguments(**defaults | more)


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
