"""Ambient state: which decoder or encoder stacks and which task heads of a model run now.

transformers calls many functions and modules without an argument that could carry a context. They look up here what they
need:

The region of the innermost running stack (:func:`current_region`):

- recurrent functions (scans, short convolutions), which a layer calls by a name in its module's globals;
- position embeddings, rotary embeddings and masks that a model computes from the tokens that it sees;
- indexers and compressors of sparse attention, which get hidden states and a cache;
- poolers inside a stack, and NEFTune's hook on the embedding;
- the mask function registered with transformers, which gets sizes and a padding mask;
- checkpoint functions, which get a layer and its arguments.

The call of the innermost running task head (:func:`current_task_head`):

- the loss function, which gets logits and labels, and the projection to the vocabulary, which gets hidden states;
- the hook of the stack that the task head calls, which must know whether hidden states may stay local.

Attention needs none of this: the mask that a layer passes to it is a
:class:`~ds_cp.patches.transformers.mask_descriptor.MaskDescriptor`, which carries the layer's
:class:`~ds_cp.region.LayerCall`. A recomputed layer has no running stack around it, so the checkpoint function opens its
region again with :func:`running_layer`.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Iterator

from ds_cp.patches.transformers.losses.task_head_call import TaskHeadCall
from ds_cp.region import Region
from ds_cp.rng import ForkedRng


@dataclass(eq=False, kw_only=True)
class _RunningModule:
    """A module whose forward has begun and not ended.

    Attributes:
        module: The module, or the layer's function that a checkpoint calls.
        call_depth: Number of frames on Python's call stack when it began.
        thread: Identifier of the thread that it runs in.
    """

    module: object
    call_depth: int
    thread: int = field(default_factory=threading.get_ident)


@dataclass(eq=False, kw_only=True)
class _RunningStack(_RunningModule):
    """A running stack of layers, or a checkpointed layer of one.

    Attributes:
        region: The region that it runs in; None if its sequence is not shared.
        rng: The random state of that region, if it was forked here.
    """

    region: Region | None
    rng: ForkedRng | None = None


@dataclass(eq=False, kw_only=True)
class _RunningTaskHead(_RunningModule):
    """A running model with a task head.

    Attributes:
        call: What the head's loss needs, and what the stack has left for it.
    """

    call: TaskHeadCall


_running: list[_RunningStack | _RunningTaskHead] = []
"""Modules that run now, the innermost last."""


def current_region() -> Region | None:
    """The region of the innermost running stack; None if no stack runs or if its sequence is not shared."""
    return next((running.region for running in reversed(_running) if isinstance(running, _RunningStack)), None)


def is_stack_running() -> bool:
    """Whether any stack runs, in a region or not."""
    return any(isinstance(running, _RunningStack) for running in _running)


def current_task_head() -> TaskHeadCall | None:
    """The call of the innermost running task head; None if none runs."""
    return next((running.call for running in reversed(_running) if isinstance(running, _RunningTaskHead)), None)


def begin_stack(module: object, region: Region | None) -> None:
    """Make ``region`` current until :func:`end_stack`, and fork the random state for it.

    With None no region is current, even if this stack runs inside another one.
    """
    running = _RunningStack(module=module, call_depth=_call_depth(), region=region)
    _close_interrupted(running)
    if region is not None:
        running.rng = ForkedRng(region.mesh.cp_group.rank)
        region.seed_base = running.rng.outer_seed
    _running.append(running)


def end_stack(module: object) -> Region | None:
    """End a stack, restore the outer random state, and return the region; None if the stack never began."""
    running = _pop(module)
    if not isinstance(running, _RunningStack):
        return None
    if running.rng is not None and running.region is not None:
        running.rng.close(drawn=running.region.group_seed is not None)
    return running.region


@contextmanager
def running_layer(layer: object, region: Region | None) -> Iterator[None]:
    """Make ``region`` current while a checkpointed layer runs: in the forward pass and, when the region's stack has ended,
    in the backward pass, which recomputes the layer."""
    running = _RunningStack(module=layer, call_depth=_call_depth(), region=region)
    _close_interrupted(running)
    _running.append(running)
    try:
        yield
    finally:
        if _running and _running[-1] is running:
            _running.pop()


def begin_task_head(module: object, call: TaskHeadCall) -> None:
    """Make ``call`` current until :func:`end_task_head`."""
    running = _RunningTaskHead(module=module, call_depth=_call_depth(), call=call)
    _close_interrupted(running)
    _running.append(running)


def end_task_head(module: object) -> TaskHeadCall | None:
    """End a task head and return its call; None if the task head never began."""
    running = _pop(module)
    return running.call if isinstance(running, _RunningTaskHead) else None


def _pop(module: object) -> _RunningStack | _RunningTaskHead | None:
    """Remove and return the innermost running module, if it is this one."""
    return _running.pop() if _running and _running[-1].module is module else None


def _call_depth() -> int:
    """Number of frames on Python's call stack up to the function that calls this."""
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def _close_interrupted(beginning: _RunningModule) -> None:
    """Remove what an exception has interrupted without torch running a forward hook, as after KeyboardInterrupt.

    A module does not run inside itself, and a module that runs inside another one has a larger call depth. If a listed
    module contradicts this, it was interrupted, and so were the modules around it.
    """
    if any(
        running.module is beginning.module
        or (running.thread == beginning.thread and running.call_depth >= beginning.call_depth)
        for running in _running
    ):
        while _running:
            interrupted = _running.pop()
            if isinstance(interrupted, _RunningStack) and interrupted.rng is not None:
                interrupted.rng.close_interrupted()
