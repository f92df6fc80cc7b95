"""Opens and closes regions around a model's stacks, by forward hooks.

A stack is a run of layers that share one sequence. A decoder-only model and an encoder have one stack; an encoder-decoder
has two, each with a sequence, a layout and a region of its own. The outputs of a stack are gathered, so that any module may
follow it (a task head, a pooler, cross attention), unless the task head's loss takes local hidden states.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping

import torch
from transformers import PreTrainedModel

from ds_cp import splits
from ds_cp.agreement import WITH_CACHE, BatchError, agree, digest_of
from ds_cp.mask.rules import Rule
from ds_cp.mesh import Mesh
from ds_cp.patches.transformers import batch as batches
from ds_cp.patches.transformers import bounds, masks, prefill, shard_batch, structure, support
from ds_cp.patches.transformers.ambient import begin_stack, current_region, current_task_head, end_stack
from ds_cp.patches.transformers.host_copies import HostCopies
from ds_cp.patches.transformers.losses.task_head_call import TaskHeadCall
from ds_cp.planner import Plan
from ds_cp.region import Region


@dataclass(eq=False)
class Stack:
    """One stack of a model.

    Attributes:
        layers: Number of modules that mix tokens in a forward pass, self attention and recurrent layers. A module that runs
            several times (ALBERT's) counts once.
        rules: Number of layers per rule, for the balanced layout.
        feeds_task_head: Whether the task head's loss takes this stack's hidden states, so that they may stay local.
        position_tables: Paths of its tables with a row per position.
        cache_argument: Name of the argument for a cache that its layers fill; None if they do not.
        replaces_cache: Whether one process would return a cache from the running forward pass, and a region has none.
        forwards: Number of regions opened so far.
        compared: Kinds of forward passes whose batches have been compared over the group: (whether it trains, index into
            ``agreement.MODES``). Equal batches in an evaluation or a warm-up prove nothing about those in training.
    """

    layers: int
    rules: Mapping[Rule, int]
    feeds_task_head: bool
    position_tables: tuple[str, ...] = ()
    cache_argument: str | None = None
    replaces_cache: bool = False
    forwards: int = 0
    compared: set[tuple[bool, int]] = field(default_factory=set)


def find(model: PreTrainedModel) -> dict[PreTrainedModel, Stack]:
    """The stacks of a model by the module that runs them, in the order in which they run."""
    *encoders, decoder = structure.find_stacks(model)
    stacks = {}
    for module in (*encoders, decoder):
        config, is_decoder = structure.stack_config(model, module), module is decoder
        stacks[module] = Stack(
            layers=structure.count_token_mixers(module, config, is_decoder),
            rules=structure.layer_rules(config, is_decoder),
            feeds_task_head=is_decoder,
            position_tables=bounds.position_tables(module),
            cache_argument=prefill.cache_argument(module),
        )
    return stacks


def hook(module: PreTrainedModel, stack: Stack, plan: Plan, mesh: Mesh) -> list[Any]:
    """Register the hooks of a stack and of its pooler. Returns their handles."""
    signature = inspect.signature(module.forward)
    handles = [
        module.register_forward_pre_hook(_before_stack(stack, plan, mesh, signature), with_kwargs=True),
        module.register_forward_hook(_after_stack(stack), always_call=True),
    ]
    if isinstance(pooler := getattr(module, "pooler", None), torch.nn.Module):
        handles.append(pooler.register_forward_pre_hook(_before_pooler))
    return handles


# ---- before a stack ----------------------------------------------------------------------------------------------


def _before_stack(stack: Stack, plan: Plan, mesh: Mesh, signature: inspect.Signature) -> Callable:
    @torch.compiler.disable
    def before_stack(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Open a region and return local arguments; or open none, if the forward pass fills a cache that no region can."""
        arguments = batches.with_padding_from_ids(module, batches.arguments_by_name(signature, args, kwargs))
        call = (current_task_head() if stack.feeds_task_head else None) or TaskHeadCall()
        uses_cache = _uses_cache(arguments, call)
        cache = prefill.cache_to_fill(module, arguments) if uses_cache and stack.cache_argument else None
        if uses_cache and cache is None:
            return _run_replicated(stack, mesh, module, arguments, args, kwargs)
        region = _open_region(
            stack, plan, mesh, module, arguments, call, WITH_CACHE if uses_cache else call.keeps_local
        )
        stack.forwards += 1
        local = shard_batch.local_arguments(region, arguments, batches.shape_of(arguments))
        if batches.ENCODER_MASK not in signature.parameters:
            local.pop(batches.ENCODER_MASK, None)
        takes_use_cache = "use_cache" in signature.parameters
        if cache is not None and stack.cache_argument is not None:
            local[stack.cache_argument] = prefill.ShardedPrefillCache(cache, region)
        elif takes_use_cache:
            local["use_cache"] = False  # it would hold the keys of one shard
        stack.replaces_cache = cache is None and takes_use_cache and prefill.returns_cache(module, arguments)
        begin_stack(module, region)
        return (), local

    before_stack.ds_cp = True
    return before_stack


def _run_replicated(
    stack: Stack, mesh: Mesh, module: torch.nn.Module, arguments: Mapping[str, Any], args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Let every rank run on all tokens, of which decoding has one; returns the arguments with their masks."""
    if module.training and torch.is_grad_enabled():
        # Only in training must all ranks of the group be here: a single rank may generate.
        agree(mesh.control_group, None, (*batches.shape_of(arguments), WITH_CACHE), 0, stack.forwards)
    begin_stack(module, None)
    return masks.materialise(args), masks.materialise(kwargs)


def _uses_cache(arguments: Mapping[str, Any], call: TaskHeadCall) -> bool:
    """Whether the caller passes a cache or wants one filled.

    Some models pass their config's ``use_cache=True`` on as an argument, also in training, so the argument alone does not
    mean generation.
    """
    if batches.cache_of(arguments) is not None:
        return True
    return bool(arguments.get("use_cache")) and call.labels is None and not torch.is_grad_enabled()


def _open_region(
    stack: Stack,
    plan: Plan,
    mesh: Mesh,
    module: torch.nn.Module,
    arguments: Mapping[str, Any],
    call: TaskHeadCall,
    mode: int,
) -> Region:
    """Check the batch, choose its split and layout, and agree on it with the context-parallel group.

    Args:
        mode: Index into ``agreement.MODES``.

    Raises:
        BatchError: On all ranks of the group, if the batch of any rank cannot be sharded or batches differ.
    """
    error, documents, shape, digest, split, layout = None, None, (0, 0), 0, None, None
    kind = (module.training and torch.is_grad_enabled(), mode)
    try:
        shape = batches.shape_of(arguments)
        support.refuse_call(module, arguments, call)
        batches.check_shapes(arguments, call.labels if call.keeps_local else None, *shape)
        batches.refuse_dropped_arguments(call.batch_facts, arguments)
        checks = plan.checks != "off"
        lookups = bounds.lookups_of(module, stack.position_tables, arguments, call) if checks else []
        compares_contents = checks and (plan.checks == "every_step" or kind not in stack.compared)
        contents = batches.tensors_to_compare(arguments, call) if compares_contents else []
        extremes = [lookup.extremes for lookup in lookups]
        host = HostCopies([*batches.document_tensors(arguments), *extremes, *contents])
        documents = batches.documents(arguments, *shape, host)
        split, layout = splits.choose(plan, shape[1], documents, stack.rules)
        bounds.refuse_out_of_range(lookups, host)
        # Split, layout and schedule follow from the documents: other ones on a rank would leave the others waiting for rows.
        digest = digest_of([*documents.ranges, *map(host.array, contents)])
    except (BatchError, ValueError) as problem:
        error = str(problem)
    except Exception as problem:  # the other ranks of the group must learn of any error, or they wait for this one
        error = f"{type(problem).__name__} while the batch was read: {problem}"
    agree(mesh.control_group, error, (*shape, mode), digest, stack.forwards)
    stack.compared.add(kind)
    assert documents is not None
    assert split is not None and layout is not None
    return Region(
        plan.with_split(split),
        mesh.with_split(split.ring, split.ulysses),
        layout,
        documents,
        dense_mask=batches.dense_mask(arguments, *shape),
    )


# ---- after a stack -----------------------------------------------------------------------------------------------


def _after_stack(stack: Stack) -> Callable:
    @torch.compiler.disable
    def after_stack(module: torch.nn.Module, args: tuple, output: Any) -> Any:
        """Close the region, check that all layers went through it, and gather the outputs."""
        region = end_stack(module)
        if region is None or output is None:
            return None
        if len(region.attended) < stack.layers:
            raise BatchError(
                f"{len(region.attended)} of {stack.layers} attention or recurrent layers went through ds_cp; the others saw their own "
                "shard only. Do not change the model's attention implementation after it was attached, and do not replace "
                "its attention layers."
            )
        call = current_task_head() if stack.feeds_task_head else None
        keeps_local = call is not None and call.keeps_local
        if call is not None and keeps_local:
            if call.region is not None:
                raise BatchError(
                    "the model calls its decoder twice for one loss, which ds_cp computes on local tokens: the second call's "
                    "tokens lie elsewhere. Compute the loss outside of the model, from its logits."
                )
            call.region = region
        output = _gathered_output(region, output, keeps_local, stack.layers)
        return prefill.with_no_cache(output) if stack.replaces_cache else output

    return after_stack


def _gathered_output(region: Region, output: Any, keeps_local: bool, layers: int) -> Any:
    """A stack's output with all per-token tensors gathered, and with the filled cache.

    Args:
        keeps_local: Whether the last hidden state stays local.
        layers: Number of layers that must have filled the cache.
    """
    if isinstance(output, tuple):
        first, *rest = (
            value.filled_cache(layers) if isinstance(value, prefill.ShardedPrefillCache) else value for value in output
        )
        first = first if keeps_local else _gathered(region, first, 3)
        return (first, *(_gathered(region, value, 3) for value in rest))
    for name, value in list(output.items()):
        if isinstance(value, prefill.ShardedPrefillCache):
            output[name] = value.filled_cache(layers)
        elif not (keeps_local and name == "last_hidden_state"):
            output[name] = _gathered(region, value, 2 if "router" in name else 3)
    return output


def _gathered(region: Region, value: Any, min_dims: int) -> Any:
    """Gather per-token tensors: hidden states [B, L, d] and [k, B, L, d], and routers' logits [B * L, E], also in tuples.

    Args:
        min_dims: Tensors with fewer dims are returned as they are.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(_gathered(region, item, 2) for item in value)
    if not isinstance(value, torch.Tensor) or value.dim() < min_dims:
        return value
    length, batch = region.layout.local_len, len(region.documents.ranges)
    if value.dim() == 4 and value.shape[1:3] == (batch, length):
        return region.gather(value, dim=2)
    if value.dim() > 2 and value.size(1) == length:
        return region.gather(value)
    if value.dim() == 2 and value.size(0) == batch * length:
        return region.gather(value.unflatten(0, (batch, length))).flatten(0, 1)
    return value


@torch.compiler.disable
def _before_pooler(pooler: torch.nn.Module, args: tuple) -> tuple | None:
    """Gather the hidden states for a pooler inside a stack, which takes the first token."""
    region = current_region()
    if region is None:
        return None
    hidden = args[0] if args else None
    if hidden is None or hidden.dim() != 3 or hidden.size(1) != region.layout.local_len:
        raise BatchError(
            f"{type(pooler).__name__} inside of the shared part got {batches.describe(hidden)} instead of hidden states: it would pool "
            "a token of this rank's shard. Build the model with add_pooling_layer=False, and pool what it returns."
        )
    return (region.gather(hidden), *args[1:])
