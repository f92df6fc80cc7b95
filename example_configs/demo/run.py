"""The demo: fine-tune SmolLM2-135M-Instruct on source files, with context parallelism over two processes.

It has four stages. prepare.py writes the checkpoint folder and the documents. reference.py computes the first step in
one process without ds_cp. The `deepspeed` launcher trains with train.py and demo.json. A table compares both. The exit
status is 1 if the first step differs, if the held-out loss does not fall, or if a rank has sent nothing.
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
# Seconds without progress after which a stage is stopped. Compiling an operator of DeepSpeed takes part of them.
STALL_TIMEOUT = 600


class StageError(Exception):
    """A stage failed.

    Attributes:
        log: Log file of the stage, whose end is printed.
    """

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Fine-tune a checkpoint with context parallelism over CPU processes.")
    parser.add_argument(
        "--folder",
        type=Path,
        default=REPOSITORY / "build" / "demo",
        help="folder for checkpoint, documents, logs and results",
    )
    parser.add_argument("--config", type=Path, default=CONFIGS / "demo.json", help="DeepSpeed config")
    parser.add_argument("--processes", type=int, default=2, help="number of processes")
    parser.add_argument("--seq_length", type=int, default=2048, help="largest number of tokens of a row")
    parser.add_argument("--steps", type=int, default=10, help="number of training steps")
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    return parser.parse_args()


def run_stage(command: list[str], log: Path, env: dict[str, str], made_progress: Callable[[], bool]) -> None:
    """Run a command with its output in a log file.

    Args:
        command: The command.
        log: The log file.
        env: Environment of the command.
        made_progress: Called twice a second; returns whether there was progress since its last call.

    Raises:
        StageError: The command failed, or made no progress for STALL_TIMEOUT seconds.
    """
    with open(log, "w", encoding="utf-8") as out:
        # In a process group of its own, so that the processes which the launcher starts can be stopped with it.
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
        progress_at = time.monotonic()
        try:
            while process.poll() is None:
                time.sleep(0.5)
                if made_progress():
                    progress_at = time.monotonic()
                if time.monotonic() - progress_at > STALL_TIMEOUT:
                    raise StageError(f"there was no progress for {STALL_TIMEOUT} s", log)
            made_progress()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode != 0:
        raise StageError(f"a command ended with status {process.returncode}", log)


def new_lines(file: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield, on each `next`, the JSON lines that were appended to a file since the last one."""
    lines_read = 0
    while True:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        # A line without a newline is incomplete and is left for the next call.
        complete = text[: text.rfind("\n") + 1].splitlines()
        yield [json.loads(line) for line in complete[lines_read:]]
        lines_read = len(complete)


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(threads: int, **more: str) -> dict[str, str]:
    """Return the environment of a stage, which runs on the CPUs of this machine with a number of threads."""
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(REPOSITORY / "build" / "extensions"))
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(max(threads, 1)),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": extensions,
        # All processes are on this machine, so gloo does not have to resolve its host name.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        **more,
    }


def train_command(args: argparse.Namespace) -> list[str]:
    """Return the command line of the launcher: that of a user, but with rank.py instead of train.py."""
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
        # The first row must be the one that reference.py has computed.
        *("--train_sampling_strategy", "sequential"),
        *("--logging_steps", "1"),
        *("--eval_on_start", "true"),
        *("--save_strategy", "no"),
        *("--report_to", "none"),
        *("--disable_tqdm", "true"),
    ]


def train(args: argparse.Namespace, progress: Progress) -> None:
    """Run the training and update its progress bar."""
    for old in (args.folder / "progress.jsonl", *args.folder.glob("rank*.json")):
        old.unlink(missing_ok=True)
    bar = progress.add_task("training: processes are starting", total=args.steps)
    lines = new_lines(args.folder / "progress.jsonl")

    def update_bar() -> bool:
        new = next(lines)
        for line in new:
            if "loss" in line:
                text = f"step {line['step']}: loss {line['loss']:.4f}, gradient norm {line['grad_norm']:.3f}"
                progress.update(bar, completed=line["step"], description=f"training: {text}")
                if not progress.console.is_terminal:
                    progress.console.print(text)
            elif "eval_loss" in line:
                progress.update(bar, description=f"training: held-out loss {line['eval_loss']:.4f}")
        return bool(new)

    threads = (os.cpu_count() or 1) // args.processes
    env = environment(threads, DS_CP_DEMO_FOLDER=str(args.folder))
    run_stage(train_command(args), args.folder / "train.log", env, update_bar)


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file."""
    return json.loads(file.read_text(encoding="utf-8"))


def relative(value: float, reference: float) -> float:
    """Return the relative difference of a value to a reference."""
    return abs(value - reference) / abs(reference)


def report(args: argparse.Namespace, console: Console) -> bool:
    """Print the table and return whether the demo succeeded."""
    reference = read_json(args.folder / "reference.json")
    history = read_json(args.folder / "out" / "trainer_state.json")["log_history"]
    ranks = [read_json(args.folder / f"rank{rank}.json") for rank in range(args.processes)]
    first = next(line for line in history if "loss" in line)
    held_out = [line["eval_loss"] for line in history if "eval_loss" in line]
    per_rank = [rank["tokens"] for rank in ranks]

    table = Table(title=f"SmolLM2-135M-Instruct, context parallelism over {args.processes} processes")
    table.add_column("")
    for name in ("ds_cp", "one process, no ds_cp", "difference"):
        table.add_column(name, justify="right")
    same = True
    for name, value, expected in (
        ("first step: loss", first["loss"], reference["first_loss"]),
        ("first step: gradient norm", first["grad_norm"], reference["first_grad_norm"]),
        ("held-out row: loss before", held_out[0], reference["held_out_loss"]),
    ):
        difference = relative(value, expected)
        ok = difference < TOLERANCE  # False for NaN, too
        same = same and ok
        colour = "green" if ok else "red"
        table.add_row(name, f"{value:.7f}", f"{expected:.7f}", f"[{colour}]{difference:.1e}[/]")
    falls = held_out[-1] < held_out[0]
    mark = "[green]falls[/]" if falls else "[red]does not fall[/]"
    table.add_row(f"held-out row: loss after {args.steps} steps", f"{held_out[-1]:.7f}", "", mark)
    table.add_section()
    name = f"first row ({reference['row_documents']} documents): tokens per process"
    table.add_row(name, " + ".join(map(str, per_rank)), str(reference["row_tokens"]), "")
    exchanged = True
    for phase in ("forward", "backward"):
        sent = [rank["traffic"].get(f"{phase}_bytes_per_layer", 0) for rank in ranks]
        exchanged = exchanged and all(sent)
        table.add_row(
            f"bytes sent per layer and row, {phase}", " + ".join(f"{number:,.0f}" for number in sent), "0", ""
        )
    table.add_row("seconds per step", f"{max(rank['seconds_per_step'] for rank in ranks):.1f}", "", "")
    console.print(table)

    if not same:
        console.print(f"[red]The first step differs from that of one process by more than {TOLERANCE:.0e}.[/]")
    if not falls:
        console.print("[red]The held-out loss did not fall.[/]")
    if not exchanged:
        console.print("[red]A process has sent nothing for attention: context parallelism was not active.[/]")
    return same and falls and exchanged


def main() -> int:
    """Run all stages and return the exit status."""
    args = arguments()
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    # Without a terminal rich would wrap the table at 80 columns.
    console = Console() if sys.stdout.isatty() else Console(width=110)
    start = time.monotonic()
    size = ("--seq_length", str(args.seq_length))
    stages: list[tuple[str, Callable[[Progress], None]]] = []
    # Half of the cores, because a process with more threads than there are idle cores is slower.
    # Without the autoload of backends torch does not load ds_cp in these two stages.
    without_ds_cp = environment((os.cpu_count() or 1) // 2, TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    def script(name: str) -> Callable[[Progress], None]:
        command = [sys.executable, str(HERE / f"{name}.py"), "--folder", str(args.folder), *size]
        return lambda progress: run_stage(command, args.folder / f"{name}.log", without_ds_cp, lambda: False)

    stages.append(("checkpoint and documents", script("prepare")))
    stages.append(("first step with one process, without ds_cp", script("reference")))
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
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
    succeeded = report(args, console)
    console.print(f"{time.monotonic() - start:.0f} s in total; logs and results are in {args.folder}")
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
