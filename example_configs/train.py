"""Fine-tune a causal language model on long documents with the Hugging Face Trainer.

    deepspeed train.py --model_dir MODEL --train_file docs.jsonl --deepspeed cp2_zero2.json --output_dir out

On CPUs, with two processes: `deepspeed --num_accelerators 2 train.py ... --use_cpu true`.

The data is one JSON object per line with the key "text": one document. Documents are kept whole and packed
into rows of at most `--seq_length` tokens. In a row, `position_ids` restart at each document, and the first
token of each document carries no label, so documents do not see or predict each other.
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
    """What this script needs beside the Trainer's own arguments."""

    model_dir: str = field(metadata={"help": "A checkpoint folder, or a model's name on the hub."})
    train_file: str = field(metadata={"help": 'JSON lines, each with a document under the key "text".'})
    eval_file: str | None = field(default=None, metadata={"help": "The same for evaluation."})
    seq_length: int = field(default=2048, metadata={"help": "Longest packed row, in tokens."})
    dtype: str = field(default="float32", metadata={"help": "In which type the weights are loaded."})


def read_documents(file: str | Path) -> list[str]:
    """Return the documents of a JSON-lines file."""
    with open(file, encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def pack(lengths: list[int], seq_length: int) -> list[list[int]]:
    """Share documents between rows: each goes, whole, into the open row where it leaves the least room.

    Returns rows as lists of document numbers. Documents that are longer than a row are left out.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for number, length in enumerate(lengths):
        if length > seq_length:
            continue
        fitting = [row for row in range(len(rows)) if room[row] >= length]
        if fitting:
            row = min(fitting, key=room.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            room.append(seq_length)
        rows[row].append(number)
        room[row] -= length
    return rows


class PackedRows(torch.utils.data.Dataset):
    """Rows of whole documents, ready for the model: ids, restarting positions and labels of shape (1, n)."""

    def __init__(self, documents: list[str], tokenizer, seq_length: int) -> None:
        ids = tokenizer(documents)["input_ids"]
        # A one-token document predicts nothing, so it is no training data.
        self.documents = [document for document in ids if len(document) > 1]
        self.rows = pack([len(document) for document in self.documents], seq_length)
        self.left_out = len(self.documents) - sum(len(row) for row in self.rows)
        self.flatten = DataCollatorWithFlattening(return_tensors="pt")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.flatten([{"input_ids": self.documents[number]} for number in self.rows[index]])


def join_rows(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate a micro batch without padding: its rows are laid end to end, as one longer row."""
    return {key: torch.cat([row[key] for row in rows], dim=1) for key in rows[0]}


def main() -> None:
    """Read the arguments, train, evaluate where asked, save."""
    # The arguments come first: under ZeRO-3, from_pretrained must already know the DeepSpeed config.
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
            f"tokens, {train_rows.left_out} longer documents left out"
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
    # Ends the process group's threads before the interpreter does.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
