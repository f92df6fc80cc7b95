"""The logger of ds_cp: made by DeepSpeed's factory, so that its lines look and go as DeepSpeed's own."""

from __future__ import annotations

import logging
from functools import cache

import torch.distributed
from deepspeed.utils.logging import LoggerFactory


@cache
def logger() -> logging.Logger:
    """``logging.getLogger("ds_cp")``, to stdout at level INFO; DeepSpeed's own logger shows warnings only."""
    made: logging.Logger = LoggerFactory.create_logger(name="ds_cp", level=logging.INFO)
    return made


def log_rank_0(message: str, level: int = logging.INFO) -> None:
    """Log a message on the first rank of the world."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger().log(level, message)
