"""The border: a model is attached here. Its stacks open and close regions (:mod:`.stacks`), its head may keep one local."""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Iterator

import torch
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedModel

from ds_cp import config as key
from ds_cp import mesh as meshes
from ds_cp import patches, planner
from ds_cp.agreement import agree_on_plan
from ds_cp.mesh import Mesh
from ds_cp.patches import liger
from ds_cp.patches.transformers import attention, decoder_stacks, structure, support, task_head
from ds_cp.patches.transformers.decoder_stacks import Stack
from ds_cp.patches.transformers.losses import causal_lm, projection
from ds_cp.patches.transformers.memory import chunked_layers, chunked_mlp, offload_activations, recompute
from ds_cp.patches.transformers.models import recurrent, registry, rope
from ds_cp.patches.trl import fused_head
from ds_cp.planner import Plan
from ds_cp.report import log_start


@dataclass(eq=False)
class Attachment:
    """What the hooks of one model share."""

    plan: Plan
    mesh: Mesh
    stacks: list[Stack]
    vocab: int
    implementations: list[tuple[Any, str]]  # what each config's attention was before

    @property
    def layers(self) -> int:
        """Attention layers that are shared."""
        return sum(stack.layers for stack in self.stacks)

    @property
    def forwards(self) -> int:
        """Regions opened so far."""
        return sum(stack.forwards for stack in self.stacks)


_attached: "weakref.WeakKeyDictionary[torch.nn.Module, Attachment]" = weakref.WeakKeyDictionary()


def attach(model: torch.nn.Module, requested: key.ContextParallelConfig) -> Attachment:
    """Share the sequences of a model, in place. Attaching it again with the same key changes nothing.

    Args:
        model: a transformers model, possibly wrapped (PEFT).
        requested: the checked key with an explicit size above 1.

    Raises:
        ConfigError: the model cannot be shared exactly, or is attached with another key, or ranks disagree on the plan.
        GroupError: a rank does not attach the model.
    """
    head = structure.find_model(model)
    support.refuse_adapters(model)
    decoder = structure.find_decoder(head)
    config = head.config.get_text_config(decoder=True)
    device = get_accelerator().device_name()
    facts = support.check_model(head, decoder, requested.unverified)
    node = _ranks_per_node(device)
    try:
        plan = planner.resolve(requested, facts, node, device)
    except key.ConfigError as problem:
        if torch.distributed.is_initialized():
            agree_on_plan(str(problem), requested.timeout)  # it may be the affair of one node
        raise
    if decoder in _attached:
        if _attached[decoder].plan != plan:
            raise key.ConfigError(
                f'{facts.name} is attached already with another "context_parallel" key; its hooks would cut the sequence '
                "twice. Build a second model for the second key. Nothing was changed."
            )
        return _attached[decoder]
    if any(getattr(hook, "ds_cp", False) for hook in decoder._forward_pre_hooks.values()):
        raise key.ConfigError(
            f"{facts.name} is a copy of a model that is attached: it has that model's hooks and would cut each sequence twice. "
            "Copy a model before it is attached. Nothing was changed."
        )
    parts = decoder_stacks.find(head)
    if plan.offload_kv:
        chunked_layers.check(parts)
    agree_on_plan(plan, plan.timeout)
    mesh = meshes.build(plan.ring, plan.ulysses, plan.timeout)
    patches.install()
    liger.install()
    configs = {id(each): each for each in (config, *(module.config for module in parts))}.values()
    known = {id(each): name for other in _attached.values() for each, name in other.implementations}
    before = [(each, known.get(id(each), each._attn_implementation)) for each in configs]
    state = Attachment(plan, mesh, list(parts.values()), getattr(config, "vocab_size", 0), before)
    with ExitStack() as done:  # if a change fails, those before it are undone
        for put_back in _changes(head, parts, state):
            done.callback(put_back)
        _attached[decoder] = state
        done.callback(_forget, weakref.ref(decoder))
        undo = done.pop_all().close  # newest first
    patch = patches.record(patches.Patch(f"model {facts.name}", "its decoder runs on this rank's tokens", undo))
    weakref.finalize(decoder, patches.remove, patch).atexit = False
    log_start(plan, state.mesh, facts, state.layers, recurrent.count_layers(parts))
    return state


def _changes(head: PreTrainedModel, parts: dict[PreTrainedModel, Stack], state: Attachment) -> Iterator[Callable]:
    """Change the model, one thing after the other; each yields what undoes it, which holds neither head nor decoder, so
    that a model that nobody else holds goes."""
    yield partial(_restore_names, state.implementations)
    for each, _ in state.implementations:
        each._attn_implementation = attention.NAME
    plan = state.plan
    for part in parts.items():
        yield from (handle.remove for handle in decoder_stacks.hook(*part, plan, state.mesh))
    if head not in parts:
        yield from (handle.remove for handle in task_head.hook(head, state.vocab))
    yield from (change.attach(head) for change in (fused_head, causal_lm, projection))
    for module in parts:
        yield from (change.attach(module) for change in (registry, rope, recurrent))
        if plan.offload_activations:
            yield offload_activations.attach(
                module, checkpoints=bool(plan.offload_kv) and chunked_layers.all_in_chunks(module)
            )
        if plan.offload_kv:
            yield chunked_layers.attach(module, plan)
        yield chunked_mlp.attach(module, plan)
        yield recompute.attach(module, keeps=not plan.recompute_attention, offloads=plan.offload_activations)


def _restore_names(implementations: list[tuple[Any, str]]) -> None:
    shared = {id(each) for other in _attached.values() for each, _ in other.implementations}
    for each, name in implementations:
        if each._attn_implementation == attention.NAME and id(each) not in shared:
            each._attn_implementation = name


def _forget(decoder: weakref.ref) -> None:
    if decoder() is not None:
        _attached.pop(decoder(), None)


def attachment(model: torch.nn.Module) -> Attachment | None:
    """The attachment of a model or of what wraps it."""
    return next((_attached[module] for module in model.modules() if module in _attached), None)


def _ranks_per_node(device: str) -> int:
    # LOCAL_SIZE is the DeepSpeed launcher's; accelerate on CPU sets LOCAL_WORLD_SIZE to 1 whatever runs
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 0) or (
        torch.distributed.get_world_size()
        if device == "cpu"
        else min(get_accelerator().device_count(), torch.distributed.get_world_size())
    )
