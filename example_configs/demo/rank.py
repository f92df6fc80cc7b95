"""What each process of the demo runs: train.py as it stands, watched by one Trainer callback.

The callback writes what only a rank knows, the tokens that it computed and the bytes that it sent, to
`rank<r>.json`, and after each step a line to `progress.jsonl`. Both lie in the folder that the environment
variable DS_CP_DEMO_FOLDER names.
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
    """Return the bytes that this rank sent per layer, as ds_cp counted them over all rows so far."""
    import ds_cp

    return dict(ds_cp.traffic())


class Watch(TrainerCallback):
    """Notes local tokens, traffic and progress; changes nothing."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.rank = int(os.environ.get("RANK", 0))
        self.step_began = 0.0
        self.seconds: list[float] = []

    def tell(self, **line: Any) -> None:
        """Append a line for the driver's progress bar."""
        if self.rank == 0:
            with open(FOLDER / "progress.jsonl", "a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        """Count tokens where a decoder layer receives them: behind the border at which rows are shared."""

        def count(layer, inputs, named) -> None:
            hidden = inputs[0] if inputs else named["hidden_states"]
            if layer.training:
                self.seen.setdefault("tokens", hidden.shape[0] * hidden.shape[1])

        model.get_decoder().layers[0].register_forward_pre_hook(count, with_kwargs=True)
        self.tell(started=True)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        """Start the step's clock."""
        self.step_began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Stop the clock."""
        self.seconds.append(time.perf_counter() - self.step_began)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Pass the Trainer's own log lines on."""
        self.tell(step=state.global_step, **(logs or {}))

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Write this rank's file."""
        self.seen["traffic"] = traffic()
        self.seen["seconds_per_step"] = sum(self.seconds) / max(len(self.seconds), 1)
        (FOLDER / f"rank{self.rank}.json").write_text(json.dumps(self.seen), encoding="utf-8")


def can_build_operators() -> bool:
    """Tell whether a C++ compiler, ninja and Python's headers are there."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return all(map(shutil.which, ("c++", "ninja"))) and headers.exists()


def main() -> None:
    """Register the callback, then run train.py as `__main__`."""
    if not can_build_operators():
        # On CPU DeepSpeed builds a shared-memory operator at start and stops when it cannot.
        # It works without one.
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    transformers.trainer.DEFAULT_CALLBACKS.append(Watch)
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    main()
