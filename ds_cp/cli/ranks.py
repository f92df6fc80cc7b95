"""Run a function on several gloo ranks of this machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from typing import Any, Callable

import torch
import torch.multiprocessing as mp


def run_on_ranks(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``work(*args)`` on ``world`` new processes that form a gloo group, with one thread each.

    Args:
        world: Number of processes.
        work: A module-level function whose result can be pickled.
        args: Its arguments; they are pickled, too.

    Returns:
        The results, in the order of the ranks.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank raised an error; the message holds its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_run_rank, (world, folder, work, args), nprocs=world, start_method="spawn")
        results = []
        for rank in range(world):
            with open(os.path.join(folder, f"result_{rank}"), "rb") as file:
                results.append(pickle.load(file))
        return results


def _run_rank(rank: int, world: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DS_ACCELERATOR="cpu",
    )  # fmt: skip
    torch.set_num_threads(1)
    import deepspeed

    # Without this, DeepSpeed compiles a shared-memory operator for 20 s that the commands do not use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, verbose=False)
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):  # hides the tables of ds_cp at start
        result = work(*args)
    with open(os.path.join(folder, f"result_{rank}"), "wb") as file:
        pickle.dump(result, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
