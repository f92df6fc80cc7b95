"""The border: hooks on the text decoder that open and close the region, and on the head that may keep it local."""

from __future__ import annotations

import inspect
import os
import weakref
from dataclasses import dataclass
from typing import Any, Mapping

import torch
from deepspeed.accelerator import get_accelerator

from ds_cp import balance, patches, planner
from ds_cp import config as key
from ds_cp import mesh as meshes
from ds_cp.agreement import BatchError, agree, digest_of
from ds_cp.mesh import Mesh
from ds_cp.patches.transformers import attention, families, loss, rope, support
from ds_cp.patches.transformers import batch as batches
from ds_cp.planner import Plan
from ds_cp.region import HeadCall, LocalLogits, Region, current_head, enter, leave, pop_head, push_head
from ds_cp.rules import Rule

LOGITS_LIMIT = 16 << 30
"""Bytes of whole-sequence logits that a rank may hold for a loss that ds_cp does not know."""


@dataclass(eq=False)
class Attachment:
    """What the hooks of one model share."""

    plan: Plan
    mesh: Mesh
    layers: int
    rules: Mapping[Rule, int]
    vocab: int
    forwards: int = 0


_attached: "weakref.WeakKeyDictionary[torch.nn.Module, Attachment]" = weakref.WeakKeyDictionary()


def attach(model: torch.nn.Module, asked: key.ContextParallelConfig) -> Attachment:
    """Share the sequences of a model, in place. Attaching it again with the same key changes nothing.

    Args:
        model: a transformers model, possibly wrapped (PEFT).
        asked: the checked key with an explicit size above 1.

    Raises:
        ConfigError: the model cannot be shared exactly, or is attached with another key.
    """
    head = support.find_model(model)
    support.refuse_adapters(model)
    decoder = support.find_decoder(head)
    config = head.config.get_text_config(decoder=True)
    device = get_accelerator().device_name()
    facts = support.examine(head, decoder, asked.unverified)
    node = _ranks_per_node(device)
    plan = planner.resolve(asked, facts, node, device)
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
    state = Attachment(
        plan,
        meshes.build(plan.ring, plan.ulysses, plan.timeout),
        support.attention_layers(config),
        support.layer_rules(config),
        getattr(config, "vocab_size", 0),
    )
    patches.install()
    before = config._attn_implementation
    config._attn_implementation = attention.NAME
    handles = [
        decoder.register_forward_pre_hook(_before_decoder(state, inspect.signature(decoder.forward)), with_kwargs=True),
        decoder.register_forward_hook(_after_decoder(state), always_call=True),
    ]
    if head is not decoder:
        handles += [
            head.register_forward_pre_hook(_before_head(state, inspect.signature(head.forward)), with_kwargs=True),
            head.register_forward_hook(_after_head, always_call=True),
        ]
    restore = [loss.attach(head), families.attach(decoder), rope.attach(decoder)]
    _attached[decoder] = state
    alive = weakref.ref(decoder)

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for put_back in restore:
            put_back()
        if config._attn_implementation == attention.NAME:
            config._attn_implementation = before
        if alive() is not None:
            _attached.pop(alive(), None)

    patches.record(patches.Patch(f"model {facts.name}", "its decoder runs on this rank's tokens", undo))
    if torch.distributed.get_rank() == 0:
        from ds_cp.report import print_start

        print_start(plan, state.mesh, facts, state.layers)
    return state


def attachment(model: torch.nn.Module) -> Attachment | None:
    """The attachment of a model or of what wraps it."""
    return next((_attached[module] for module in model.modules() if module in _attached), None)


def _ranks_per_node(device: str) -> int:
    # LOCAL_SIZE is the DeepSpeed launcher's; accelerate on CPU sets LOCAL_WORLD_SIZE to 1 whatever runs
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 0) or (
        torch.distributed.get_world_size() if device == "cpu" else get_accelerator().device_count()
    )


def _before_decoder(state: Attachment, signature: inspect.Signature):
    @torch.compiler.disable
    def before_decoder(decoder: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given = batches.named(signature, args, kwargs)
        if given.get("cache") is not None or given.get("past_key_values") is not None or given.get("use_cache"):
            enter(decoder, None)  # generation: every rank runs the whole, at most one new token is computed
            return args, kwargs
        region = _open(state, decoder, given, current_head() or HeadCall())
        state.forwards += 1
        local = batches.localise(region, given, batches.shape_of(given))
        if "use_cache" in signature.parameters:
            local["use_cache"] = False  # a cache of one shard's keys is of no use to anyone
        enter(decoder, region)
        return (), local

    before_decoder.ds_cp = True
    return before_decoder


def _open(state: Attachment, decoder: torch.nn.Module, given: Mapping[str, Any], call: HeadCall) -> Region:
    """Read the batch's facts, agree on them with the group, and make the region. Fails on all ranks or on none."""
    error, documents, shape, digest = None, None, (0, 0), 0
    try:
        shape = batches.shape_of(given)
        support.refuse_call(decoder, given, call)
        batches.check_shapes(given, call.labels if call.keeps_local else None, *shape)
        batches.refuse_lost_facts(call.told, given)
        documents = batches.documents(given, *shape)
        checks = state.plan.checks
        if checks == "every_step" or (checks == "first_step" and state.forwards == 0):
            digest = digest_of(batches.contents(given, call.labels))
    except (BatchError, ValueError) as problem:
        error = str(problem)
    except Exception as problem:  # whatever it is, the other ranks of the group must hear of it instead of waiting
        error = f"{type(problem).__name__} while the batch was read: {problem}"
    agree(state.mesh.control, error, (*shape, call.keeps_local), digest, state.forwards)
    assert documents is not None
    plan = state.plan
    layout = balance.choose(shape[1], plan.ring, plan.ulysses, plan.layout, plan.packed_layout, documents, state.rules)
    return Region(plan, state.mesh, layout, documents, whole_mask=batches.whole_mask(given, *shape))


def _after_decoder(state: Attachment):
    @torch.compiler.disable
    def after_decoder(decoder: torch.nn.Module, args: tuple, output: Any) -> Any:
        region = leave(decoder)
        if region is None or output is None:
            return None
        if len(region.attended) < state.layers:
            raise BatchError(
                f"{len(region.attended)} of {state.layers} attention layers went through ds_cp; the others saw their own "
                "shard only. Do not change the model's attention implementation after it was attached, and do not replace "
                "its attention layers."
            )
        call = current_head()
        keeps_local = call is not None and call.keeps_local
        if keeps_local:
            if call.region is not None:
                raise BatchError(
                    "the model calls its decoder twice for one loss, which ds_cp computes on local tokens: the second call's "
                    "tokens lie elsewhere. Compute the loss outside of the model, from its logits."
                )
            call.region = region
        return _closed(region, output, keeps_local)

    return after_decoder


def _closed(region: Region, output: Any, keep_last_local: bool) -> Any:
    """The decoder's output with hidden states of the whole sequence, except for a last one that stays local."""

    def whole(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(whole(item) for item in value)
        is_local = isinstance(value, torch.Tensor) and value.dim() == 3 and value.size(1) == region.layout.local_len
        return region.gather(value) if is_local else value

    if isinstance(output, tuple):
        return (output[0] if keep_last_local else whole(output[0]), *whole(output[1:]))
    for name, value in list(output.items()):
        if not (keep_last_local and name == "last_hidden_state"):
            output[name] = whole(value)
    return output


def _before_head(state: Attachment, signature: inspect.Signature):
    @torch.compiler.disable
    def before_head(head: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        given = batches.named(signature, args, kwargs)
        labels = given.get("labels")
        keeps = given.get("logits_to_keep")
        everything = not isinstance(keeps, torch.Tensor) and not keeps
        keeps_local = labels is not None and everything and loss.keeps_local(head)
        push_head(head, HeadCall(keeps_local, labels, batches.facts(given)))
        generating = given.get("use_cache") or given.get("cache") is not None
        if everything and not keeps_local and not generating and "logits_to_keep" in signature.parameters:
            _refuse_huge_logits(state, *batches.shape_of(given))

    return before_head


def _refuse_huge_logits(state: Attachment, batch: int, seq_len: int) -> None:
    size = batch * seq_len * state.vocab * 4
    if size > LOGITS_LIMIT:
        raise BatchError(
            f"the model is called without labels, so each rank would hold the logits of all {batch} x {seq_len} tokens "
            f"({size / 2**30:.0f} GiB in fp32, the limit is {LOGITS_LIMIT >> 30} GiB). Pass labels, so that the loss is "
            "computed on local tokens, or logits_to_keep."
        )


@torch.compiler.disable
def _after_head(head: torch.nn.Module, args: tuple, output: Any) -> Any:
    call = pop_head(head)
    if call is None or call.region is None or output is None:
        return None
    if not call.consumed:
        raise BatchError(
            f"{type(head).__name__} kept its hidden states local for a loss that it then did not call; what it returned "
            "belongs to one shard only."
        )
    return _with_logits(output, call.region, training=head.training and torch.is_grad_enabled())


def _with_logits(output: Any, region: Region, training: bool) -> Any:
    """The head's output with logits that nobody can mistake for whole ones: gathered, or in training out of reach."""

    def honest(logits: torch.Tensor | None) -> Any:
        if logits is None or training:
            return None if logits is None else LocalLogits(logits, region)
        small = logits.size(0) * region.layout.seq_len * logits.size(-1) * 4 <= LOGITS_LIMIT
        return region.gather(logits) if small else None

    if isinstance(output, tuple):  # (loss, logits, ...)
        return (output[0], honest(output[1]), *output[2:])
    if "logits" in output:
        output["logits"] = honest(output["logits"])
    return output
