"""Which parts of a model run now: heads, and the stacks inside of them, each with the region that it has opened."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator

from ds_cp.patches.transformers.losses.task_head_call import TaskHeadCall
from ds_cp.region import Region
from ds_cp.rng import ForkedRng


@dataclass(eq=False)
class _Running:
    """A head or a stack that runs.

    Attributes:
        owner: its module.
        depth, thread: how deep in Python's stack its hook ran, and in which thread.
        region: what a stack has opened, if anything.
        rng: of the region.
        call: what a head wants; None for a stack.
    """

    owner: object
    depth: int
    thread: int
    region: Region | None = None
    rng: ForkedRng | None = None
    call: TaskHeadCall | None = None


_running: list[_Running] = []


def _entry(owner: object) -> _Running:
    """A head or stack on top of those that run. Closes first what was interrupted, for torch runs no hook then.

    A module does not run inside itself, and what runs inside another is deeper in Python's stack: an entry of this owner,
    or one that is not above this call, was left by KeyboardInterrupt or the like, and so were those around it.
    """
    frame, depth, thread = sys._getframe(1), 0, threading.get_ident()
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    if any(each.owner is owner or (each.thread == thread and each.depth >= depth) for each in _running):
        while _running:
            if (rng := _running.pop().rng) is not None:
                rng.close_interrupted()
    return _Running(owner, depth, thread)


def begin_stack(owner: object, region: Region | None) -> None:
    """Open a region (or none, to shadow an outer one) while ``owner`` runs."""
    top = _entry(owner)
    if region:
        top.region, top.rng = region, ForkedRng(region.mesh.cp_group.rank)
        region.seed_base = top.rng.outer_seed
    _running.append(top)


def end_stack(owner: object) -> Region | None:
    """Close what ``owner`` opened, if it did, and return its region."""
    if not _running or _running[-1].owner is not owner:
        return None
    top = _running.pop()
    if top.rng:
        top.rng.close(drawn=top.region.group_seed is not None)
    return top.region


@contextmanager
def running_layer(owner: object, region: Region | None) -> Iterator[None]:
    """While ``owner``, a part of what ran in a region, runs there once more: in the backward pass, when that is closed."""
    top = _entry(owner)
    top.region = region
    _running.append(top)
    try:
        yield
    finally:
        if _running and _running[-1] is top:
            _running.pop()


def current_region() -> Region | None:
    """The region whose model part is running in this process, if any."""
    return next((each.region for each in reversed(_running) if each.call is None), None)


def is_stack_running() -> bool:
    """Whether a part of a model that may be shared is running, shared or not."""
    return any(each.call is None for each in _running)


def begin_task_head(owner: object, call: TaskHeadCall) -> None:
    """The head ``owner`` starts."""
    top = _entry(owner)
    top.call = call
    _running.append(top)


def end_task_head(owner: object) -> TaskHeadCall | None:
    """The head ``owner`` has ended; None if it failed before it started."""
    return _running.pop().call if _running and _running[-1].owner is owner else None


def current_task_head() -> TaskHeadCall | None:
    """The innermost running head."""
    return next((each.call for each in reversed(_running) if each.call is not None), None)
