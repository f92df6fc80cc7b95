"""The demo's yardstick: one process, the plain model, each document run alone.

Nothing of ds_cp or DeepSpeed takes part, and no packing either: a document that is alone cannot see another
one. The loss of a row is the mean over all its predicted tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train import PackedRows, read_documents  # noqa: E402


def row_loss(model: torch.nn.Module, rows: PackedRows, index: int, backward: bool) -> float:
    """Return a row's mean loss per predicted token; with `backward`, add its gradient to the parameters."""
    documents = [rows.documents[number] for number in rows.rows[index]]
    predicted = sum(len(document) - 1 for document in documents)
    total = 0.0
    for document in documents:
        ids = torch.tensor([document])
        with torch.set_grad_enabled(backward):
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="sum") / predicted
        if backward:
            loss.backward()
        total += loss.item()
    return total


def main() -> None:
    """Write first_loss, first_grad_norm and held_out_loss to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seq_length", type=int, required=True)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.folder / "model")
    model = AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32)
    model.train()
    train = PackedRows(read_documents(args.folder / "train.jsonl"), tokenizer, args.seq_length)
    held_out = PackedRows(read_documents(args.folder / "eval.jsonl"), tokenizer, args.seq_length)

    first_loss = row_loss(model, train, 0, backward=True)
    grad_norm = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm()
    found = {
        "first_loss": first_loss,
        "first_grad_norm": grad_norm.item(),
        "held_out_loss": row_loss(model.eval(), held_out, 0, backward=False),
        "row_tokens": train[0]["input_ids"].numel(),
        "row_documents": len(train.rows[0]),
    }
    if any(name.split(".")[0] in ("ds_cp", "deepspeed") for name in sys.modules):
        raise SystemExit("The reference must not load ds_cp or deepspeed.")
    (args.folder / "reference.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
