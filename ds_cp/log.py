"""The logger of ds_cp, created by DeepSpeed's factory so that its lines are formatted and routed like DeepSpeed's own."""

from __future__ import annotations

import logging
from functools import cache

import torch.distributed
from deepspeed.utils.logging import LoggerFactory


@cache
def logger() -> logging.Logger:
    """``logging.getLogger("ds_cp")``, to stdout at level INFO; DeepSpeed's own logger shows warnings only."""
    ds_cp_logger: logging.Logger = LoggerFactory.create_logger(name="ds_cp", level=logging.INFO)
    return ds_cp_logger


def log_rank_0(message: str, level: int = logging.INFO) -> None:
    """Log a message on rank 0 of the world only."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger().log(level, message)
