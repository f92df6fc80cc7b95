"""Script of each process of the demo: runs train.py with an additional Trainer callback.

The callback writes the number of local tokens, the bytes sent and the time per step of its rank to `rank<r>.json`.
On rank 0 it also appends a line to `progress.jsonl` for each log of the Trainer. Both files are in the folder that
the environment variable DS_CP_DEMO_FOLDER names.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

import transformers.trainer
from transformers import TrainerCallback

FOLDER = Path(os.environ["DS_CP_DEMO_FOLDER"])
TRAIN = Path(__file__).resolve().parents[1] / "train.py"


def traffic() -> dict[str, float]:
    """Return the number of bytes that this rank has sent per attention layer and row, the mean of all rows so far."""
    import ds_cp

    return dict(ds_cp.traffic())


class MeasureCallback(TrainerCallback):
    """Records local tokens, traffic, time and progress, without any effect on the training."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.rank = int(os.environ.get("RANK", 0))
        self.step_start = 0.0
        self.seconds: list[float] = []

    def report_progress(self, **line: Any) -> None:
        """Append a line to `progress.jsonl`, from which run.py updates its progress bar."""
        if self.rank == 0:
            with open(FOLDER / "progress.jsonl", "a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        """Register a hook that counts the local tokens, where the first decoder layer receives them."""

        def count_tokens(layer, args, kwargs) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            if layer.training:
                self.results.setdefault("tokens", hidden.shape[0] * hidden.shape[1])

        model.get_decoder().layers[0].register_forward_pre_hook(count_tokens, with_kwargs=True)
        self.report_progress(started=True)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        """Record the start time of a step."""
        self.step_start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Record the duration of a step."""
        self.seconds.append(time.perf_counter() - self.step_start)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Report a log of the Trainer."""
        self.report_progress(step=state.global_step, **(logs or {}))

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Write the results of this rank."""
        self.results["traffic"] = traffic()
        self.results["seconds_per_step"] = sum(self.seconds) / max(len(self.seconds), 1)
        (FOLDER / f"rank{self.rank}.json").write_text(json.dumps(self.results), encoding="utf-8")


def can_build_operators() -> bool:
    """Return whether a C++ compiler, ninja and the headers of Python are installed."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return all(map(shutil.which, ("c++", "ninja"))) and headers.exists()


def main() -> None:
    """Register the callback and run train.py as `__main__`."""
    if not can_build_operators():
        # On CPU, init_distributed of DeepSpeed compiles a shared-memory operator and fails if it cannot. Training does
        # not need the operator.
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    transformers.trainer.DEFAULT_CALLBACKS.append(MeasureCallback)
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    main()
