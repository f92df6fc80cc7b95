"""Agreement between ranks before any work is done.

All ranks of the world agree on a plan before process groups are created, and the ranks of a context-parallel group agree on
each batch. An error on one rank then raises the same message on all of them, where it would otherwise leave the other ranks
waiting in a collective.
"""

from __future__ import annotations

import hashlib
import json
from typing import Sequence

import numpy as np
import torch

from ds_cp import mesh
from ds_cp.config import KEY, ConfigError
from ds_cp.planner import Plan
from ds_cp.process_group import Group

MODES = ("hidden states gathered", "hidden states kept local", "a KV cache filled")
"""Kinds of a forward pass: hidden states are gathered; they stay sharded and only the loss is computed; a KV cache is
filled."""
WITH_CACHE = MODES.index("a KV cache filled")


class BatchError(RuntimeError):
    """A batch for which context parallelism would not be exact. Raised on all ranks of the context-parallel group."""


def agree(control: Group, error: str | None, facts: tuple[int, int, int], digest: int, forward: int) -> None:
    """Compare a short record of the batch over the context-parallel group.

    Args:
        control: Context-parallel group on gloo. The record stays on the CPU, so no rank synchronizes with its device.
        error: Error message about this rank's batch, or None.
        facts: B, S, and an index into :data:`MODES`.
        digest: Digest of the batch's contents (:func:`digest_of`), 0 where contents are not compared.
        forward: Index of the forward pass of this model, for the message.

    Raises:
        BatchError: On all ranks, if any rank reports an error or the records differ.
    """
    record = torch.tensor([error is not None, *facts, digest], dtype=torch.int64)
    records = control.all_gather(record, f"agreement on the batch of forward {forward}")
    if records[:, 0].any():
        errors = control.all_gather_object(error, "agreement on an error")
        failed = next(index for index, message in enumerate(errors) if message)
        where = "" if control.size == 1 else f" (found on rank {control.ranks[failed]}, raised on all of its group)"
        raise BatchError(errors[failed] + where)
    if (records != records[0]).any():
        listed = ", ".join(
            f"rank {rank}: {batch} x {seq_len} tokens, {MODES[mode]}, digest {content & 0xFFFF:04x}"
            for rank, (_, batch, seq_len, mode, content) in zip(control.ranks, records.tolist())
        )
        raise BatchError(
            f"the ranks of a context-parallel group got different batches in forward {forward} ({listed}). Each would have "
            "contributed a piece of another sequence, and the model would have trained on the mixture. All ranks of a "
            "group must read the same batch: shard the data by data-parallel rank, for example "
            "DistributedSampler(dataset, num_replicas=ds_cp.dp_size(), rank=ds_cp.dp_rank()), and seed random collators "
            "by data-parallel rank too."
        )


def agree_on_plan(plan: Plan | str, timeout: float) -> None:
    """Compare the plans of all ranks of the world, before any process group is created.

    Args:
        plan: Plan of this rank, or the message that says why it has none.
        timeout: Seconds to wait for the other ranks.

    Raises:
        ConfigError: On all ranks, if any rank has no plan or the plans differ.
        GroupError: A rank did not report its plan in time.
    """
    problem = plan if isinstance(plan, str) else None
    fields = {} if isinstance(plan, str) else {name: value for name, value in vars(plan).items() if name != "reasons"}
    records = [json.loads(text) for text in mesh.gather_through_store(json.dumps([problem, fields]), timeout)]
    problems = [problem for problem, _ in records]
    if any(problems):
        rank = next(rank for rank, problem in enumerate(problems) if problem)
        raise ConfigError(problems[rank] + ("" if all(problems) else f" (found on rank {rank}, raised on all)"))
    plans = [plan_fields for _, plan_fields in records]
    differing = [name for name in fields if any(other[name] != plans[0][name] for other in plans)]
    if differing:
        ranks: dict[str, list[int]] = {}
        for rank, other in enumerate(plans):
            ranks.setdefault(", ".join(f"{name} {other[name]}" for name in differing), []).append(rank)
        listed = "; ".join(
            f"rank {agreeing[0]}" + (f" and {len(agreeing) - 1} more" if agreeing[1:] else "") + f": {values}"
            for values, agreeing in ranks.items()
        )
        raise ConfigError(
            f"the ranks decided differently how to share the model ({listed}): their groups would not fit together, and all "
            f"would wait for ever. Give every node the same DeepSpeed JSON; where nodes have different numbers of devices, set "
            f'"{KEY}.method" and "{KEY}.ulysses_size" instead of "auto". Nothing was started.'
        )


def digest_of(values: Sequence[torch.Tensor | np.ndarray | None]) -> int:
    """62-bit digest of integer tensors and arrays (ids, positions, masks, labels, document ranges); floats are left out."""
    state = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, torch.Tensor):
            value = None if value.is_floating_point() else value.detach().cpu().numpy()
        if value is not None:
            state.update(repr(value.shape).encode())  # the bytes alone would not tell [2, 3] from [3, 2]
            state.update(np.ascontiguousarray(value).tobytes())
    return int.from_bytes(state.digest(), "little") >> 2
