"""Read the signatures of FlashAttention's private functions from the packages, without building them.

    python tests/tools/flash_signatures.py                      # refresh tests/data/flash_signatures.json
    python tests/tools/flash_signatures.py --check              # say what moved, write nothing
    python tests/tools/flash_signatures.py --hopper NAME FILE   # add FlashAttention 3 from a file of its repository

Source distributions come through pip, which asks setup.py for metadata but compiles nothing; their Python files are
parsed, never imported. FlashAttention 3 is on no index: its entries stay as they are unless --hopper gives a file.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Iterator

DATA = Path(__file__).resolve().parents[1] / "data" / "flash_signatures.json"

DENSE_AND_VARLEN = (
    "_flash_attn_forward",
    "_flash_attn_backward",
    "_flash_attn_varlen_forward",
    "_flash_attn_varlen_backward",
)
SOURCES = {
    "flash_attention_2": {
        "package": "flash-attn",
        "file": "flash_attn/flash_attn_interface.py",
        "functions": DENSE_AND_VARLEN,
        "versions": ["2.5.0", "2.5.9.post1", "2.6.0.post1", "2.6.3", "2.7.0.post2", "2.7.4.post1", "2.8.0.post2", "2.8.3.post2"],
    },
    "flash_attention_4": {
        "package": "flash-attn-4",
        "file": "flash_attn/cute/interface.py",
        "functions": ("_flash_attn_fwd", "_flash_attn_bwd"),
        "versions": ["4.0.0b4", "4.0.0b15", "4.0.0b36"],
    },
}  # fmt: skip


def download(package: str, version: str, folder: str) -> Path:
    """The source distribution of a version, or its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, f"{package}=={version}"]
    source_only = ["--no-binary", ":all:", "--no-build-isolation"]
    environment = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    for options in (source_only, []):
        done = subprocess.run(command + options, env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            return next(Path(folder).iterdir())
    raise RuntimeError(f"{package} {version} could not be downloaded: {done.stderr[-500:]}")


def read_member(archive: Path, name: str) -> str:
    """The text of one file of an archive; source distributions have a top-level folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(name).decode()
    with tarfile.open(archive) as source:
        member = next(m for m in source if m.name.split("/", 1)[-1] == name)
        file = source.extractfile(member)
        assert file is not None
        return file.read().decode()


def signatures(text: str, functions: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Parameters, returned names and, for a torch custom operator, what it mutates, per function."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            value = [n for n in node.body if isinstance(n, ast.Return)][-1].value
            value = value.body if isinstance(value, ast.IfExp) else value
            names = value.elts if isinstance(value, ast.Tuple) else [value]
            found[node.name] = {
                "parameters": ast.unparse(node.args),
                "returns": [ast.unparse(name) for name in names],
                **_custom_operator(node),
            }
    return found


def _custom_operator(node: ast.FunctionDef) -> dict[str, Any]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and "custom_op" in ast.unparse(decorator.func):
            mutates = next(k.value for k in decorator.keywords if k.arg == "mutates_args")
            return {
                "custom_op": True,
                "annotation": ast.unparse(node.returns),
                "mutates": list(ast.literal_eval(mutates)),
            }
    return {}


def collect() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(kernel, version, signatures) of every version on the package index."""
    for kernel, source in SOURCES.items():
        for version in source["versions"]:
            with tempfile.TemporaryDirectory() as folder:
                archive = download(source["package"], version, folder)
                yield kernel, version, signatures(read_member(archive, source["file"]), source["functions"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing; exit 1 if something moved")
    parser.add_argument(
        "--hopper", nargs=2, metavar=("NAME", "FILE"), help="hopper/flash_attn_interface.py and its name"
    )
    options = parser.parse_args(arguments)
    known = json.loads(DATA.read_text()) if DATA.exists() else {}
    fresh = json.loads(json.dumps(known))
    if options.hopper:
        name, file = options.hopper
        fresh.setdefault("flash_attention_3", {})[name] = signatures(Path(file).read_text(), DENSE_AND_VARLEN)
    else:
        for kernel, version, found in collect():
            fresh.setdefault(kernel, {})[version] = found
    moved = [f"{k} {v}" for k in fresh for v in fresh[k] if fresh[k][v] != known.get(k, {}).get(v)]
    print("moved: " + ", ".join(moved) if moved else "nothing moved")
    if not options.check:
        DATA.write_text(json.dumps(fresh, indent=1, sort_keys=True) + "\n")
    return int(options.check and bool(moved))


if __name__ == "__main__":
    sys.exit(main())
