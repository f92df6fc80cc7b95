"""Stacks: the runs of layers of a model that share a sequence. Hooks open a region before each and close it behind.

A decoder-only model and an encoder have one stack; an encoder-decoder has two, with a sequence, a layout and a region
each. What a stack returns is whole again, so that whatever follows it (a head, a pooler, cross attention) may be anything.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Mapping

import torch
from transformers import PreTrainedModel

from ds_cp import balance
from ds_cp.agreement import WITH_CACHE, BatchError, agree, digest_of
from ds_cp.mask.rules import Rule
from ds_cp.mesh import Mesh
from ds_cp.patches.transformers import batch as batches
from ds_cp.patches.transformers import bounds, masks, prefill, shard_batch, structure, support
from ds_cp.patches.transformers.ambient import begin_stack, current_region, current_task_head, end_stack
from ds_cp.patches.transformers.losses.task_head_call import TaskHeadCall
from ds_cp.planner import Plan
from ds_cp.region import Region


@dataclass(eq=False)
class Stack:
    """One stack of a model.

    Attributes:
        layers: what mixes tokens in a forward: self attention, recurrent layers.
        rules: how many layers have which rule, for balance.
        feeds_head: whether the head's loss takes what this stack returns, so that it may stay local.
        tables: the names of its tables of positions.
        cache: what it calls a cache that its layers fill; None where they do not.
        lacks_cache: whether the running forward would return a cache in one process.
        forwards: regions opened so far.
        compared: the kinds of forwards whose batches were compared: (trains, a place in ``MODES``). An evaluation or a
            warm-up says nothing of the batches that are trained on.
    """

    layers: int
    rules: Mapping[Rule, int]
    feeds_head: bool
    tables: tuple[str, ...] = ()
    cache: str | None = None
    lacks_cache: bool = False
    forwards: int = 0
    compared: set[tuple[bool, int]] = field(default_factory=set)


def find(head: PreTrainedModel) -> dict[PreTrainedModel, Stack]:
    """The stacks of a model by the module that runs them, in the order in which they run."""
    *encoders, decoder = structure.find_stacks(head)
    stacks = {}
    for module in (*encoders, decoder):
        config, is_decoder = structure.stack_config(head, module), module is decoder
        layers = structure.count_token_mixers(module, config, is_decoder)
        rules, tables = structure.layer_rules(config, is_decoder), bounds.position_tables(module)
        stacks[module] = Stack(layers, rules, is_decoder, tables, prefill.cache_argument(module))
    return stacks


def hook(module: PreTrainedModel, stack: Stack, plan: Plan, mesh: Mesh) -> list[Any]:
    """Put the hooks on a stack and on its pooler; returns their handles."""
    signature = inspect.signature(module.forward)
    handles = [
        module.register_forward_pre_hook(_before(stack, plan, mesh, signature), with_kwargs=True),
        module.register_forward_hook(_after(stack), always_call=True),
    ]
    if isinstance(pooler := getattr(module, "pooler", None), torch.nn.Module):
        handles.append(pooler.register_forward_pre_hook(_before_pooler))
    return handles


def _before(stack: Stack, plan: Plan, mesh: Mesh, signature: inspect.Signature):
    @torch.compiler.disable
    def before_stack(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        arguments = batches.with_assumed_mask(module, batches.arguments_by_name(signature, args, kwargs))
        call = (current_task_head() if stack.feeds_head else None) or TaskHeadCall()
        # some heads turn the config's use_cache=True into an argument, so that alone does not tell generation from training
        fills_cache = arguments.get("use_cache") and call.labels is None and not torch.is_grad_enabled()
        cache, mode = None, int(call.keeps_local)
        if batches.cache_of(arguments) is not None or fills_cache:
            cache, mode = prefill.cache_to_fill(module, arguments) if stack.cache else None, WITH_CACHE
            if cache is None:
                if module.training and torch.is_grad_enabled():  # generation may be the affair of one rank
                    agree(mesh.control_group, None, (*batches.shape_of(arguments), mode), 0, stack.forwards)
                begin_stack(module, None)  # every rank runs the whole; in decoding that is one new token
                return masks.materialise(args), masks.materialise(kwargs)
        region = _open(stack, plan, mesh, arguments, call, module, mode)
        stack.forwards += 1
        local = shard_batch.local_arguments(region, arguments, batches.shape_of(arguments))
        if batches.ENCODER[1] not in signature.parameters:
            local.pop(batches.ENCODER[1], None)
        if cache is not None:
            local[stack.cache] = prefill.ShardedPrefillCache(cache, region)
        elif "use_cache" in signature.parameters:
            local["use_cache"] = False  # a cache of one shard's keys is of no use to anyone
        stack.lacks_cache = (
            cache is None and "use_cache" in signature.parameters and prefill.returns_cache(module, arguments)
        )
        begin_stack(module, region)
        return (), local

    before_stack.ds_cp = True
    return before_stack


def _open(
    stack: Stack,
    plan: Plan,
    mesh: Mesh,
    arguments: Mapping[str, Any],
    call: TaskHeadCall,
    module: torch.nn.Module,
    mode: int,
) -> Region:
    """Read the batch's facts, agree on them with the group, and make the region. Fails on all ranks or on none."""
    error, documents, shape, digest = None, None, (0, 0), 0
    kind = (module.training and torch.is_grad_enabled(), mode)
    first = kind not in stack.compared
    try:
        shape = batches.shape_of(arguments)
        support.refuse_call(module, arguments, call)
        batches.check_shapes(arguments, call.labels if call.keeps_local else None, *shape)
        batches.refuse_lost_facts(call.batch_facts, arguments)
        documents = batches.documents(arguments, *shape)
        if plan.checks != "off":
            bounds.check(module, stack.tables, arguments, call)
            contents = batches.contents(arguments, call) if plan.checks == "every_step" or first else []
            # layout and schedule come from the documents, and these are on the host: they are compared on each step
            digest = digest_of([*documents.ranges, *contents])
    except (BatchError, ValueError) as problem:
        error = str(problem)
    except Exception as problem:  # whatever it is, the other ranks of the group must hear of it instead of waiting
        error = f"{type(problem).__name__} while the batch was read: {problem}"
    agree(mesh.control_group, error, (*shape, mode), digest, stack.forwards)
    stack.compared.add(kind)
    assert documents is not None
    layout = balance.choose(shape[1], plan.ring, plan.ulysses, plan.layout, plan.packed_layout, documents, stack.rules)
    return Region(plan, mesh, layout, documents, dense_mask=batches.dense_mask(arguments, *shape))


def _after(stack: Stack):
    @torch.compiler.disable
    def after_stack(module: torch.nn.Module, args: tuple, output: Any) -> Any:
        region = end_stack(module)
        if region is None or output is None:
            return None
        if len(region.attended) < stack.layers:
            raise BatchError(
                f"{len(region.attended)} of {stack.layers} attention or recurrent layers went through ds_cp; the others saw their own "
                "shard only. Do not change the model's attention implementation after it was attached, and do not replace "
                "its attention layers."
            )
        call = current_task_head()
        keeps_local = stack.feeds_head and call is not None and call.keeps_local
        if keeps_local:
            if call.region is not None:
                raise BatchError(
                    "the model calls its decoder twice for one loss, which ds_cp computes on local tokens: the second call's "
                    "tokens lie elsewhere. Compute the loss outside of the model, from its logits."
                )
            call.region = region
        output = _closed(region, output, keeps_local, stack.layers)
        return prefill.with_no_cache(output) if stack.lacks_cache else output

    return after_stack


def _closed(region: Region, output: Any, keep_last_local: bool, layers: int) -> Any:
    """A stack's output with everything per token whole, except for a last hidden state that stays local."""
    if isinstance(output, tuple):
        output = tuple(
            value.done(layers) if isinstance(value, prefill.ShardedPrefillCache) else value for value in output
        )
        rest = (_whole(region, value, 3) for value in output[1:])
        return (output[0] if keep_last_local else _whole(region, output[0], 3), *rest)
    for name, value in list(output.items()):
        if isinstance(value, prefill.ShardedPrefillCache):
            output[name] = value.done(layers)
        elif not (keep_last_local and name == "last_hidden_state"):
            output[name] = _whole(region, value, 2 if "router" in name else 3)
    return output


def _whole(region: Region, value: Any, fewest_dims: int) -> Any:
    """Hidden states [B, L, d] and [k, B, L, d] and, inside tuples, what experts' routers say ([B * L, E]), of all tokens."""
    if isinstance(value, (tuple, list)):
        return type(value)(_whole(region, item, 2) for item in value)
    if not isinstance(value, torch.Tensor) or value.dim() < fewest_dims:
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
    """Poolers inside a stack take the first token of what they get, so they get all of them."""
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
