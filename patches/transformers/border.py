"""The border: hooks on the text decoder that open and close the region, and on the head that may keep it local."""

from __future__ import annotations

import inspect
import os
import weakref
from dataclasses import dataclass
from typing import Any, Mapping

import torch
from deepspeed.accelerator import get_accelerator
from ds_cp.patches.transformers import attention, families, loss, rope, support

from ds_cp import balance, patches, planner
from ds_cp import config as key
from ds_cp import mesh as meshes
from ds_cp.documents import Documents
from ds_cp.mesh import Mesh
from ds_cp.planner import Plan
from ds_cp.region import (
    BatchError,
    LocalExit,
    Region,
    agree,
    current_exit,
    digest_of,
    enter,
    leave,
    pop_exit,
    push_exit,
)  # fmt: skip
from ds_cp.rules import Rule

LOGITS_LIMIT = 16 << 30
"""Bytes of whole-sequence logits that a rank may hold for a loss that ds_cp does not know."""

FLASH_FACTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


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
        given = _named(signature, args, kwargs)
        if given.get("cache") is not None or given.get("past_key_values") is not None or given.get("use_cache"):
            enter(decoder, None)  # generation: every rank runs the whole, at most one new token is computed
            return args, kwargs
        wish = current_exit()
        region = _open(state, given, wish.labels if wish else None)
        state.forwards += 1
        local = _localise(region, given, _shape(given))
        if "use_cache" in signature.parameters:
            local["use_cache"] = False  # a cache of one shard's keys is of no use to anyone
        enter(decoder, region)
        return (), local

    return before_decoder


def _open(state: Attachment, given: Mapping[str, Any], labels: torch.Tensor | None) -> Region:
    """Read the batch's facts, agree on them with the group, and make the region. Fails on all ranks or on none."""
    error, documents, shape, digest = None, None, (0, 0), 0
    try:
        shape = _shape(given)
        documents = _documents(given, *shape)
        checks = state.plan.checks
        if checks == "every_step" or (checks == "first_step" and state.forwards == 0):
            digest = digest_of([*(given.get(n) for n in ("input_ids", "position_ids", "attention_mask")), labels])
    except (BatchError, ValueError) as problem:
        error = str(problem)
    agree(state.mesh.control, error, shape, digest, state.forwards)
    assert documents is not None
    plan = state.plan
    layout = balance.choose(
        shape[1], plan.ring, plan.ulysses, plan.layout, plan.packed_layout, documents, state.rules
    )
    return Region(plan, state.mesh, layout, documents, whole_mask=_whole_mask(given, *shape))


def _shape(given: Mapping[str, Any]) -> tuple[int, int]:
    """(B, S) of the batch."""
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if tokens is None:
        raise BatchError("the decoder got neither input_ids nor inputs_embeds, so there is no sequence to share.")
    return tokens.shape[0], tokens.shape[1]


def _documents(given: Mapping[str, Any], batch: int, seq_len: int) -> Documents:
    """Documents and padding from positions, 2-D mask, ``cu_seq_lens_q`` and ``seq_idx``."""
    mask = given.get("attention_mask")
    if _whole_mask(given, batch, seq_len) is not None:
        return Documents.find(batch, seq_len)  # it says everything, as in transformers: packing and padding too
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        shape = f" of shape {tuple(mask.shape)}" if hasattr(mask, "shape") else ""
        raise BatchError(
            f"attention_mask is a {type(mask).__name__}{shape}: that is not the whole mask of this batch, so it cannot be "
            f"cut exactly, and ignoring it would let tokens see what you hid. Pass the 2-D mask {[batch, seq_len]}, packed "
            f"rows with position_ids that restart, or a mask {[batch, 1, seq_len, seq_len]} of bool or of what is added."
        )
    if mask is not None and tuple(mask.shape) != (batch, seq_len):
        raise BatchError(f"attention_mask has shape {tuple(mask.shape)} for a batch of {batch} x {seq_len} tokens.")
    if given.get("output_attentions"):
        raise BatchError("output_attentions asks for the S x S matrix that no rank holds; leave it out.")
    positions = given.get("position_ids")
    if positions is not None and positions.dim() == 3:
        positions = positions[0] if positions.size(0) == 4 else None
    boundaries = given.get("cu_seq_lens_q")
    keys = given.get("cu_seq_lens_k")
    if boundaries is not None and keys is not None and not torch.equal(boundaries, keys):
        raise BatchError("cu_seq_lens_q and cu_seq_lens_k differ; a decoder's queries and keys are the same tokens.")
    return Documents.find(
        batch,
        seq_len,
        positions=_numpy(positions),
        unmasked=None if mask is None else _numpy(mask) != 0,
        boundaries=_numpy(boundaries),
        seq_idx=_numpy(given.get("seq_idx")),
    )


def _whole_mask(given: Mapping[str, Any], batch: int, seq_len: int) -> torch.Tensor | None:
    """A mask [B or 1, H or 1, S, S] that the user made; every rank holds it whole and cuts it per tile."""
    mask = given.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or tuple(mask.shape[2:]) != (seq_len, seq_len):
        return None
    if mask.requires_grad:
        raise BatchError(
            "attention_mask is a whole mask that asks for a gradient, which ds_cp does not compute: what made it would "
            "silently not train. Detach it."
        )
    kind = mask.dtype == torch.bool or mask.is_floating_point()
    return mask if kind and mask.size(0) in (1, batch) else None


def _localise(region: Region, given: Mapping[str, Any], shape: tuple[int, int]) -> dict[str, Any]:
    """The decoder's arguments for this rank's tokens."""
    batch, seq_len = shape
    local: dict[str, Any] = {}
    positions = given.get("position_ids")
    region.last_position = torch.tensor(seq_len - 1) if positions is None else positions.max()
    for name, value in given.items():
        if name in FLASH_FACTS:
            continue
        if name == "position_ids" and value is not None:
            local[name] = region.shard(value, dim=-1)
        elif isinstance(value, torch.Tensor) and value.shape[:2] == (batch, seq_len):
            local[name] = region.shard(value)
        elif isinstance(value, torch.Tensor) and value.dim() == 1 and name == "cache_position":
            local[name] = region.shard(value, dim=0)
        else:
            local[name] = value
    tokens = local.get("input_ids") if local.get("input_ids") is not None else local["inputs_embeds"]
    if local.get("position_ids") is None:
        everyone = torch.arange(seq_len, device=tokens.device).unsqueeze(0)
        local["position_ids"] = region.shard(everyone)
    # All ones: the region knows the padding, and local positions must not be searched for documents.
    local["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    return local


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
        wish = current_exit()
        if wish is not None:
            wish.region = region
        return _closed(region, output, keep_last_local=wish is not None)

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
        given = _named(signature, args, kwargs)
        labels = given.get("labels")
        keeps = given.get("logits_to_keep")
        everything = not isinstance(keeps, torch.Tensor) and not keeps
        if labels is not None and everything and loss.keeps_local(head):
            push_exit(LocalExit(labels))
            return
        push_exit(None)
        generating = given.get("use_cache") or given.get("cache") is not None
        if everything and not generating and "logits_to_keep" in signature.parameters:
            _refuse_huge_logits(state, *_shape(given))

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
    wish = pop_exit()
    if wish is None or wish.region is None or output is None:
        return None
    if not wish.consumed:
        raise BatchError(
            f"{type(head).__name__} kept its hidden states local for a loss that it then did not call; what it returned "
            "belongs to one shard only."
        )
    if not torch.is_grad_enabled() and getattr(output, "logits", None) is not None:
        region, logits = wish.region, output.logits
        small = logits.size(0) * region.layout.seq_len * logits.size(-1) * 4 <= LOGITS_LIMIT
        output["logits"] = region.gather(logits) if small else None
    return output


def _named(signature: inspect.Signature, args: tuple, kwargs: dict) -> dict[str, Any]:
    """All arguments by name."""
    bound = signature.bind_partial(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return dict(bound)


def _numpy(tensor: torch.Tensor | None):
    return None if tensor is None else tensor.detach().cpu().numpy()
