"""The demo: fine-tune SmolLM2-135M-Instruct on whole source files, each packed row shared by two processes.

Four stages: make the checkpoint folder and the documents; compute the first step with one process and without
ds_cp; train through the `deepspeed` launcher with train.py and demo.json; lay both side by side in a table.
The exit status is 1 when the first step differs or the held-out loss does not fall.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parent
REPOSITORY = CONFIGS.parent
TOLERANCE = 1e-4
# A stage in which nothing happens for so long is taken for a hang. Building DeepSpeed's operator is in it.
PATIENCE = 600


class StageError(Exception):
    """A stage that failed: its message is for the user, its log is worth showing."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


def arguments() -> argparse.Namespace:
    """Read the command line; the defaults are the demo."""
    parser = argparse.ArgumentParser(description="Fine-tune a real checkpoint, its rows shared by CPU processes.")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "demo", help="where files go")
    parser.add_argument("--config", type=Path, default=CONFIGS / "demo.json", help="the DeepSpeed config")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seq_length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    return parser.parse_args()


def run_stage(command: list[str], log: Path, env: dict[str, str], watch: Callable[[], bool]) -> None:
    """Run a command with its output in a log file; call `watch` twice a second, which tells of progress."""
    with open(log, "w", encoding="utf-8") as out:
        # Its own process group, so that the launcher's ranks end with it.
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
        alive_at = time.monotonic()
        try:
            while process.poll() is None:
                time.sleep(0.5)
                if watch():
                    alive_at = time.monotonic()
                if time.monotonic() - alive_at > PATIENCE:
                    raise StageError(f"nothing happened for {PATIENCE} s", log)
            watch()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode != 0:
        raise StageError(f"ended with status {process.returncode}", log)


def new_lines(file: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield, at each request, the JSON lines that were added to a file since the last one."""
    done = 0
    while True:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        # A line that is being written has no newline yet, and waits for the next request.
        complete = text[: text.rfind("\n") + 1].splitlines()
        yield [json.loads(line) for line in complete[done:]]
        done = len(complete)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(threads: int, **more: str) -> dict[str, str]:
    """Return the environment of a stage: on CPU, on this machine alone, with its own number of threads."""
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(REPOSITORY / "build" / "extensions"))
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(max(threads, 1)),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": extensions,
        # All processes are on this machine: no name of it has to resolve.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        **more,
    }


def train_command(args: argparse.Namespace) -> list[str]:
    """Return the launcher's command line, as a user would type it but for the watching rank.py."""
    launcher = Path(sys.executable).parent / "deepspeed"
    return [
        str(launcher),
        *("--num_accelerators", str(args.processes)),
        *("--master_port", str(free_port())),
        str(HERE / "rank.py"),
        *("--model_dir", str(args.folder / "model")),
        *("--train_file", str(args.folder / "train.jsonl")),
        *("--eval_file", str(args.folder / "eval.jsonl")),
        *("--seq_length", str(args.seq_length)),
        *("--output_dir", str(args.folder / "out")),
        *("--deepspeed", str(args.config)),
        *("--use_cpu", "true"),
        *("--max_steps", str(args.steps)),
        *("--per_device_train_batch_size", "1"),
        *("--per_device_eval_batch_size", "1"),
        *("--learning_rate", str(args.learning_rate)),
        *("--lr_scheduler_type", "constant"),
        *("--max_grad_norm", "0"),
        # The first batch must be the row that the reference computed.
        *("--train_sampling_strategy", "sequential"),
        *("--logging_steps", "1"),
        *("--eval_on_start", "true"),
        *("--save_strategy", "no"),
        *("--report_to", "none"),
        *("--disable_tqdm", "true"),
    ]


def train(args: argparse.Namespace, progress: Progress) -> None:
    """Run the training and move its bar."""
    for old in (args.folder / "progress.jsonl", *args.folder.glob("rank*.json")):
        old.unlink(missing_ok=True)
    bar = progress.add_task("training: start of the processes", total=args.steps)
    lines = new_lines(args.folder / "progress.jsonl")

    def watch() -> bool:
        new = next(lines)
        for line in new:
            if "loss" in line:
                said = f"step {line['step']}: loss {line['loss']:.4f}, gradient norm {line['grad_norm']:.3f}"
                progress.update(bar, completed=line["step"], description=f"training: {said}")
                if not progress.console.is_terminal:
                    progress.console.print(said)
            elif "eval_loss" in line:
                progress.update(bar, description=f"training: held-out loss {line['eval_loss']:.4f}")
        return bool(new)

    share = (os.cpu_count() or 1) // args.processes
    env = environment(share, DS_CP_DEMO_FOLDER=str(args.folder))
    run_stage(train_command(args), args.folder / "train.log", env, watch)


def read_json(file: Path) -> dict[str, Any]:
    """Return what a JSON file holds."""
    return json.loads(file.read_text(encoding="utf-8"))


def relative(value: float, reference: float) -> float:
    """Return the relative difference."""
    return abs(value - reference) / abs(reference)


def report(args: argparse.Namespace, console: Console) -> bool:
    """Print the table; return whether everything that must hold does."""
    reference = read_json(args.folder / "reference.json")
    history = read_json(args.folder / "out" / "trainer_state.json")["log_history"]
    ranks = [read_json(args.folder / f"rank{rank}.json") for rank in range(args.processes)]
    first = next(line for line in history if "loss" in line)
    held_out = [line["eval_loss"] for line in history if "eval_loss" in line]
    per_rank = [rank["tokens"] for rank in ranks]

    table = Table(title=f"SmolLM2-135M-Instruct, each row shared by {args.processes} processes")
    table.add_column("")
    for name in ("shared", "one process, no ds_cp", "difference"):
        table.add_column(name, justify="right")
    same = True
    for name, value, wanted in (
        ("first step: loss", first["loss"], reference["first_loss"]),
        ("first step: gradient norm", first["grad_norm"], reference["first_grad_norm"]),
        ("held-out row: loss before", held_out[0], reference["held_out_loss"]),
    ):
        difference = relative(value, wanted)
        # Written so that NaN counts as a difference.
        ok = difference < TOLERANCE
        same = same and ok
        colour = "green" if ok else "red"
        table.add_row(name, f"{value:.7f}", f"{wanted:.7f}", f"[{colour}]{difference:.1e}[/]")
    falls = held_out[-1] < held_out[0]
    mark = "[green]falls[/]" if falls else "[red]does not fall[/]"
    table.add_row(f"held-out row: loss after {args.steps} steps", f"{held_out[-1]:.7f}", "", mark)
    table.add_section()
    name = f"first row ({reference['row_documents']} documents): tokens per rank"
    table.add_row(name, " + ".join(map(str, per_rank)), str(reference["row_tokens"]), "")
    exchanged = True
    for way in ("forward", "backward"):
        sent = [rank["traffic"].get(f"{way}_bytes_per_layer", 0) for rank in ranks]
        exchanged = exchanged and all(sent)
        table.add_row(f"bytes sent per layer and row, {way}", " + ".join(f"{number:,.0f}" for number in sent), "0", "")
    table.add_row("seconds per step", f"{max(rank['seconds_per_step'] for rank in ranks):.1f}", "", "")
    console.print(table)

    if not same:
        console.print(f"[red]A shared row must give one process's numbers within {TOLERANCE:.0e}.[/]")
    if not falls:
        console.print("[red]The held-out loss must fall.[/]")
    if not exchanged:
        console.print("[red]A rank that sends nothing shares no row: context parallelism was not active.[/]")
    return same and falls and exchanged


def main() -> int:
    """Run all stages; return the exit status."""
    args = arguments()
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    # A pipe has no width of its own, and a wrapped table is hard to read.
    console = Console() if sys.stdout.isatty() else Console(width=110)
    began = time.monotonic()
    size = ("--seq_length", str(args.seq_length))
    stages: list[tuple[str, Callable[[Progress], None]]] = []
    # Half of the cores: threads that wait for a core that is busy otherwise cost more than they bring.
    # Without the autoload, ds_cp is not even looked at by these two.
    alone = environment((os.cpu_count() or 1) // 2, TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    def script(name: str) -> Callable[[Progress], None]:
        command = [sys.executable, str(HERE / f"{name}.py"), "--folder", str(args.folder), *size]
        return lambda progress: run_stage(command, args.folder / f"{name}.log", alone, lambda: False)

    stages.append(("checkpoint and documents", script("prepare")))
    stages.append(("first step with one process, without ds_cp", script("reference")))
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            for name, stage in stages:
                if not console.is_terminal:
                    console.print(name)
                bar = progress.add_task(name, total=1)
                stage(progress)
                progress.update(bar, completed=1)
            train(args, progress)
    except StageError as err:
        console.print(f"[red]The demo stopped: {err}.[/] The end of {err.log}:")
        lines = err.log.read_text(encoding="utf-8", errors="replace").splitlines()
        console.print("\n".join(lines[-40:]), markup=False)
        return 1
    good = report(args, console)
    console.print(f"{time.monotonic() - began:.0f} s in all; logs and results lie in {args.folder}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
