"""Fine-tune a causal language model on long documents with the Hugging Face Trainer.

    deepspeed train.py --model_dir MODEL --train_file docs.jsonl --deepspeed cp2_zero2.json --output_dir out

On CPUs, with two processes: `deepspeed --num_accelerators 2 train.py ... --use_cpu true`.

Each line of the data is a JSON object whose value "text" is a document. Documents are packed, without splitting
them, into rows of at most `--seq_length` tokens. In a row, `position_ids` restart with each document and the first
token of each document has the label -100, so that no document attends to another one or predicts its tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    """Arguments of this script; those of the Trainer are in `TrainingArguments`."""

    model_dir: str = field(metadata={"help": "Checkpoint folder, or id of a model on the Hugging Face Hub."})
    train_file: str = field(
        metadata={"help": 'File of JSON lines with the documents to train on, each with a value "text".'}
    )
    eval_file: str | None = field(default=None, metadata={"help": "The same for the documents to evaluate on."})
    seq_length: int = field(default=2048, metadata={"help": "Largest number of tokens of a packed row."})
    dtype: str = field(default="float32", metadata={"help": "Dtype of the loaded weights."})


def read_documents(file: str | Path) -> list[str]:
    """Return the documents of a JSON-lines file."""
    with open(file, encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def pack(lengths: list[int], seq_length: int) -> list[list[int]]:
    """Pack documents into rows by best fit: each goes into the row with the least free space that is enough.

    Args:
        lengths: Number of tokens of each document.
        seq_length: Largest number of tokens of a row.

    Returns:
        For each row the indices of its documents. Documents with more than `seq_length` tokens are left out.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for index, length in enumerate(lengths):
        if length > seq_length:
            continue
        fitting = [row for row in range(len(rows)) if free[row] >= length]
        if fitting:
            row = min(fitting, key=free.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            free.append(seq_length)
        rows[row].append(index)
        free[row] -= length
    return rows


class PackedRows(torch.utils.data.Dataset):
    """Packed rows as inputs of the model: `input_ids`, `position_ids` and `labels` of shape (1, n)."""

    def __init__(self, documents: list[str], tokenizer, seq_length: int) -> None:
        ids = tokenizer(documents)["input_ids"]
        # A document of one token has no token to predict.
        self.documents = [document for document in ids if len(document) > 1]
        self.rows = pack([len(document) for document in self.documents], seq_length)
        self.left_out = len(self.documents) - sum(len(row) for row in self.rows)
        self.flatten = DataCollatorWithFlattening(return_tensors="pt")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.flatten([{"input_ids": self.documents[document]} for document in self.rows[index]])


def join_rows(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate the rows of a micro batch without padding, by concatenating them into one row."""
    return {key: torch.cat([row[key] for row in rows], dim=1) for key in rows[0]}


def main() -> None:
    """Train a model, evaluate it if there is an `--eval_file`, and save it."""
    # Parse the arguments before from_pretrained: under ZeRO-3 it reads the DeepSpeed config from TrainingArguments.
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(script.model_dir)
    model = AutoModelForCausalLM.from_pretrained(script.model_dir, dtype=script.dtype)
    train_rows = PackedRows(read_documents(script.train_file), tokenizer, script.seq_length)
    eval_rows = None
    if script.eval_file is not None:
        eval_rows = PackedRows(read_documents(script.eval_file), tokenizer, script.seq_length)
    if args.process_index == 0:
        print(
            f"{len(train_rows.documents)} documents, {len(train_rows)} rows of at most {script.seq_length} "
            f"tokens; {train_rows.left_out} longer documents are left out"
        )

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        data_collator=join_rows,
        processing_class=tokenizer,
    )
    trainer.train()
    if eval_rows is not None:
        trainer.evaluate()
    trainer.save_state()
    if args.save_strategy != "no":
        trainer.save_model()
    # The threads of the process group must end before the interpreter shuts down.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
