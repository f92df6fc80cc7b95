"""Attaches a model: checks it, decides the plan, builds the process groups, and changes the model in place.

The model's stacks get hooks that open and close regions (:mod:`.decoder_stacks`), its task head gets hooks that decide
whether hidden states stay local (:mod:`.task_head`), and single modules get replacements (:mod:`.models`, :mod:`.losses`,
:mod:`.memory`). All changes of one model are undone together.
"""

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
from ds_cp.planner import ModelFacts, Plan
from ds_cp.report import log_start


@dataclass(eq=False)
class Attachment:
    """What the hooks of one model share.

    Attributes:
        stacks: The model's stacks, in the order in which they run.
        vocab: Size of the vocabulary; 0 if the config does not name it.
        implementations: (config, name of its attention implementation before it was attached).
    """

    plan: Plan
    mesh: Mesh
    stacks: list[Stack]
    vocab: int
    implementations: list[tuple[Any, str]]

    @property
    def layers(self) -> int:
        """Number of calls of attention or recurrent layers in a forward pass that share the sequence."""
        return sum(stack.layers for stack in self.stacks)

    @property
    def forwards(self) -> int:
        """Number of regions opened so far."""
        return sum(stack.forwards for stack in self.stacks)


_attached: "weakref.WeakKeyDictionary[torch.nn.Module, Attachment]" = weakref.WeakKeyDictionary()
"""Attachments by the model's decoder."""


def attachment(model: torch.nn.Module) -> Attachment | None:
    """The attachment of a model, or of the model inside a wrapper; None if there is none."""
    return next((_attached[module] for module in model.modules() if module in _attached), None)


def attach(model: torch.nn.Module, requested: key.ContextParallelConfig) -> Attachment:
    """Shard the sequences of a model over the ranks, in place. A second call with the same key changes nothing.

    Args:
        model: A transformers model, possibly inside a wrapper such as PEFT's.
        requested: The checked key, with an explicit size above 1.

    Raises:
        ConfigError: The model cannot be shared exactly, or is attached with another key, or ranks disagree on the plan.
        GroupError: A rank does not attach the model.
    """
    pretrained = structure.find_model(model)
    support.refuse_adapters(model)
    decoder = structure.find_decoder(pretrained)
    facts = support.check_model(pretrained, requested.unverified)
    plan = _resolve_plan(requested, facts)
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
    stacks = decoder_stacks.find(pretrained)
    if plan.offload_kv:
        chunked_layers.check(stacks)
    agree_on_plan(plan, plan.timeout)
    others = [(split.ring, split.ulysses) for split in plan.splits[1:]]
    mesh = meshes.build(plan.ring, plan.ulysses, plan.timeout, others)
    patches.install()
    liger.install()
    config = pretrained.config.get_text_config(decoder=True)
    vocab = getattr(config, "vocab_size", 0)
    attached = Attachment(plan, mesh, list(stacks.values()), vocab, _attention_implementations(config, stacks))
    _change_model(pretrained, decoder, stacks, attached, facts.name)
    log_start(plan, mesh, facts, attached.layers, recurrent.count_layers(stacks))
    return attached


def _resolve_plan(requested: key.ContextParallelConfig, facts: ModelFacts) -> Plan:
    device = get_accelerator().device_name()
    try:
        return planner.resolve(requested, facts, _ranks_per_node(device), device)
    except key.ConfigError as problem:
        if torch.distributed.is_initialized():
            agree_on_plan(str(problem), requested.timeout)  # other nodes may have a plan, and must learn of the problem
        raise


def _ranks_per_node(device: str) -> int:
    # LOCAL_SIZE is the DeepSpeed launcher's. accelerate sets LOCAL_WORLD_SIZE to 1 on CPUs, however many ranks run.
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 0) or (
        torch.distributed.get_world_size()
        if device == "cpu"
        else min(get_accelerator().device_count(), torch.distributed.get_world_size())
    )


def _attention_implementations(config: Any, stacks: dict[PreTrainedModel, Stack]) -> list[tuple[Any, str]]:
    """Each config of the model, once, with its attention implementation before any model with this config was attached."""
    configs = {id(each): each for each in (config, *(module.config for module in stacks))}.values()
    original_names = {id(each): name for other in _attached.values() for each, name in other.implementations}
    return [(each, original_names.get(id(each), each._attn_implementation)) for each in configs]


def _change_model(
    pretrained: PreTrainedModel,
    decoder: PreTrainedModel,
    stacks: dict[PreTrainedModel, Stack],
    attached: Attachment,
    name: str,
) -> None:
    """Apply all changes to a model, or none, and list them as one patch. The patch ends with the decoder's life."""
    with ExitStack() as changes:
        for undo_change in _changes(pretrained, stacks, attached):
            changes.callback(undo_change)
        _attached[decoder] = attached
        changes.callback(_forget, weakref.ref(decoder))
        undo = changes.pop_all().close  # newest first
    patch = patches.record(patches.Patch(f"model {name}", "its decoder runs on this rank's tokens", undo))
    weakref.finalize(decoder, patches.remove, patch).atexit = False


def _changes(
    pretrained: PreTrainedModel, stacks: dict[PreTrainedModel, Stack], attached: Attachment
) -> Iterator[Callable[[], None]]:
    """Change the model step by step, and yield a function that undoes each step.

    These functions hold only weak references to modules, so that a listed patch does not keep the model alive.
    """
    plan = attached.plan
    yield partial(_restore_implementations, attached.implementations)
    for config, _ in attached.implementations:
        config._attn_implementation = attention.NAME
    for module, stack in stacks.items():
        yield from (handle.remove for handle in decoder_stacks.hook(module, stack, plan, attached.mesh))
    if pretrained not in stacks:  # it has a task head
        yield from (handle.remove for handle in task_head.hook(pretrained, attached.vocab))
    yield from (change.attach(pretrained) for change in (fused_head, causal_lm, projection))
    for module in stacks:
        yield from (change.attach(module) for change in (registry, rope, recurrent))
        if plan.offload_activations:
            layers_are_checkpoints = bool(plan.offload_kv) and chunked_layers.runs_all_layers(module)
            yield offload_activations.attach(module, without_checkpointing=layers_are_checkpoints)
        if plan.offload_kv:
            yield chunked_layers.attach(module, plan)
        yield chunked_mlp.attach(module, plan)
        yield recompute.attach(module, saves_attention=not plan.recompute_attention, offloads=plan.offload_activations)


def _restore_implementations(implementations: list[tuple[Any, str]]) -> None:
    still_attached = {id(config) for other in _attached.values() for config, _ in other.implementations}
    for config, name in implementations:
        if config._attn_implementation == attention.NAME and id(config) not in still_attached:
            config._attn_implementation = name


def _forget(decoder_ref: "weakref.ref[PreTrainedModel]") -> None:
    decoder = decoder_ref()
    if decoder is not None:
        _attached.pop(decoder, None)
