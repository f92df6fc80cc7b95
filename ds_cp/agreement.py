"""A group agrees on each batch before any work is done: a bad batch on one rank fails all ranks, with one message."""

from __future__ import annotations

import hashlib
from typing import Sequence

import numpy as np
import torch

from ds_cp.mesh import Group

MODES = ("without labels", "with labels", "with a cache")
"""What a call is: hidden states are gathered, stay local for a loss, or go with a cache."""
WITH_CACHE = MODES.index("with a cache")


class BatchError(RuntimeError):
    """A batch that cannot be shared exactly; raised on every rank of the group together."""


def agree(control: Group, error: str | None, facts: tuple[int, int, int], digest: int, forward: int) -> None:
    """Compare a small record over the group, so that a bad batch on one rank fails all ranks with one message.

    Args:
        control: the cp group on gloo; the record lives on the CPU, no device waits for it.
        error: what is wrong with this rank's batch, if anything.
        facts: B, S, and a place in :data:`MODES`.
        digest: of the batch's content; 0 where contents are not compared.
        forward: counts the forwards of this model, for the message.

    Raises:
        BatchError: on every rank, if any rank has an error or the records differ.
    """
    record = torch.tensor([error is not None, *facts, digest], dtype=torch.int64)
    records = control.all_gather(record, f"agreement on the batch of forward {forward}")
    if records[:, 0].any():
        errors = control.all_gather_object(error, "agreement on an error")
        first = next(i for i, message in enumerate(errors) if message)
        where = "" if control.size == 1 else f" (found on rank {control.ranks[first]}, raised on all of its group)"
        raise BatchError(errors[first] + where)
    if (records != records[0]).any():
        listed = ", ".join(
            f"rank {rank}: {b} x {s} tokens, {MODES[mode]}, digest {d & 0xFFFF:04x}"
            for rank, (_, b, s, mode, d) in zip(control.ranks, records.tolist())
        )
        raise BatchError(
            f"the ranks of a context-parallel group got different batches in forward {forward} ({listed}). Each would have "
            "contributed a piece of another sequence, and the model would have trained on the mixture. All ranks of a "
            "group must read the same batch: shard the data by data-parallel rank, for example "
            "DistributedSampler(dataset, num_replicas=ds_cp.dp_size(), rank=ds_cp.dp_rank()), and seed random collators "
            "by data-parallel rank too."
        )


def digest_of(tensors: Sequence[torch.Tensor | None]) -> int:
    """A 62-bit digest of the contents of integer tensors (ids, positions, masks, labels)."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        if tensor is not None and not tensor.is_floating_point():
            state.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).tobytes())
    return int.from_bytes(state.digest(), "little") >> 2
