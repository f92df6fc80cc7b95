"""Compute what the demo's training is compared with: the first step and the held-out loss in one process.

Neither ds_cp nor DeepSpeed is imported. Each document has a forward pass of its own, without packing, so that it
cannot attend to another one. The loss of a row is the mean over all its predicted tokens.
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
    """Return the mean loss per predicted token of a row.

    Args:
        model: The model.
        rows: Rows of documents.
        index: Index of the row.
        backward: Whether to accumulate the gradients in the parameters.
    """
    documents = [rows.documents[document] for document in rows.rows[index]]
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
    """Write the results to `reference.json` in the demo's folder."""
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
    results = {
        "first_loss": first_loss,
        "first_grad_norm": grad_norm.item(),
        "held_out_loss": row_loss(model.eval(), held_out, 0, backward=False),
        "row_tokens": train[0]["input_ids"].numel(),
        "row_documents": len(train.rows[0]),
    }
    if any(name.split(".")[0] in ("ds_cp", "deepspeed") for name in sys.modules):
        raise SystemExit("The reference must not import ds_cp or deepspeed, but it did.")
    (args.folder / "reference.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
