"""The process in which everything is fake: it imports all libraries once, and runs each case in a fork of itself.

Reads one JSON object per line, ``{"file": where the report goes, "case": ..., "seconds": limit, "wanted": whether somebody
waits for it}``, and runs as many at a time as its argument says.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rehearsal import card  # noqa: E402, I001  before torch

card.pretend()

import gc  # noqa: E402
import json  # noqa: E402
import warnings  # noqa: E402


def prepare() -> None:
    """Import what every case needs, and activate ds_cp as importing torch does where it is installed."""
    warnings.filterwarnings("ignore")
    import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from rehearsal import scenario  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import ds_cp.patches.transformers.attach  # noqa: F401
    from ds_cp import _autoload

    _autoload.activate()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def fork(request: dict) -> int:
    """Run a case in a child; its number."""
    pid = os.fork()
    if pid:
        return pid
    from rehearsal import scenario

    file = Path(request["file"])
    signal.alarm(request["seconds"])
    try:
        scenario.write(scenario.run(request["case"]), file)
    except BaseException:
        scenario.write({"case": request["case"], "error": traceback.format_exc()}, file)
    finally:
        sys.stderr.flush()
        os._exit(0)


def main(jobs: int) -> None:
    prepare()
    running: dict[int, dict] = {}
    waiting: list[dict] = []
    more, buffered = True, b""
    while more or waiting or running:
        _reap(running)
        while waiting and len(running) < jobs:
            request = waiting.pop(0)
            running[fork(request)] = request
        if not more:
            time.sleep(0.05)
        elif select.select([0], [], [], 0.05)[0]:
            data = os.read(0, 1 << 16)
            more = bool(data)
            if not more:  # the test's side has ended, however it did
                waiting.clear()
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
            *lines, buffered = (buffered + data).split(b"\n")
            waiting += map(json.loads, lines)
            waiting.sort(key=lambda request: not request["wanted"])  # what somebody waits for comes first


def _reap(running: dict[int, dict]) -> None:
    """Take leave of the children that have ended; a report for those that wrote none."""
    for pid, request in list(running.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        del running[pid]
        if not Path(request["file"]).exists():
            died = f"the rehearsal died with status {status} (its limit is {request['seconds']} s)"
            Path(request["file"]).write_text(json.dumps({"case": request["case"], "error": died}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
