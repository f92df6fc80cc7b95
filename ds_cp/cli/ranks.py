"""A few gloo ranks on this machine, for commands that compare or measure."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from typing import Any, Callable

import torch
import torch.multiprocessing as mp


def run_on_ranks(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``work(*args)`` on ``world`` new processes that form a gloo group, one thread each.

    Args:
        work: a module-level function; what it returns must pickle.

    Returns:
        The results by rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank's error, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world, folder, work, args), nprocs=world, start_method="spawn")
        results = []
        for rank in range(world):
            with open(os.path.join(folder, f"result_{rank}"), "rb") as file:
                results.append(pickle.load(file))
        return results


def _rank(rank: int, world: int, folder: str, work: Callable[..., Any], args: tuple) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DS_ACCELERATOR="cpu",
    )  # fmt: skip
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # 20 s of compiling that nothing here uses
    deepspeed.init_distributed("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, verbose=False)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # start tables of tiny models
        result = work(*args)
    with open(os.path.join(folder, f"result_{rank}"), "wb") as file:
        pickle.dump(result, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
