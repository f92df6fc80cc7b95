"""The world agrees on a plan before there is any group, and a group on each batch before any work is done: what is wrong
on one rank fails all of them, with one message."""

from __future__ import annotations

import hashlib
import json
from typing import Sequence

import numpy as np
import torch

from ds_cp import mesh
from ds_cp.config import KEY, ConfigError
from ds_cp.mesh import Group
from ds_cp.planner import Plan

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


def agree_on_plan(plan: Plan | str, timeout: float) -> None:
    """Compare the plans of all ranks of the world, before any group is made.

    Args:
        plan: of this rank, or the sentence that says why it has none.
        timeout: seconds.

    Raises:
        ConfigError: on every rank, if any rank has no plan or the plans differ.
        GroupError: a rank did not come in time.
    """
    facts = {} if isinstance(plan, str) else {name: value for name, value in vars(plan).items() if name != "reasons"}
    told = mesh.gather_through_store(json.dumps([plan if isinstance(plan, str) else None, facts]), timeout)
    records = [json.loads(record) for record in told]
    problems = [problem for problem, _ in records]
    if any(problems):
        rank = next(rank for rank, problem in enumerate(problems) if problem)
        raise ConfigError(problems[rank] + ("" if all(problems) else f" (found on rank {rank}, raised on all)"))
    differs = [name for name in facts if any(other[name] != records[0][1][name] for _, other in records)]
    if differs:
        ranks: dict[str, list[int]] = {}
        for rank, (_, other) in enumerate(records):
            ranks.setdefault(", ".join(f"{name} {other[name]}" for name in differs), []).append(rank)
        listed = "; ".join(
            f"rank {some[0]}" + (f" and {len(some) - 1} more" if some[1:] else "") + f": {decided}"
            for decided, some in ranks.items()
        )
        raise ConfigError(
            f"the ranks decided differently how to share the model ({listed}): their groups would not fit together, and all "
            f"would wait for ever. Give every node the same DeepSpeed JSON; where nodes have different numbers of devices, set "
            f'"{KEY}.method" and "{KEY}.ulysses_size" instead of "auto". Nothing was started.'
        )


def digest_of(values: Sequence[torch.Tensor | np.ndarray | None]) -> int:
    """A 62-bit digest of the contents of integer tensors and arrays (ids, positions, masks, labels, documents)."""
    state = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, torch.Tensor):
            value = None if value.is_floating_point() else value.detach().cpu().numpy()
        if value is not None:
            state.update(repr(value.shape).encode())  # or rows of other lengths could make up the same bytes
            state.update(np.ascontiguousarray(value).tobytes())
    return int.from_bytes(state.digest(), "little") >> 2
