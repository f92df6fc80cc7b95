"""Hooks on a model's head: may its hidden states stay local, and what becomes of its logits."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ds_cp.agreement import BatchError
from ds_cp.forward.head_call import HeadCall, LocalLogits
from ds_cp.forward.running import enter_head, leave_head
from ds_cp.patches import trl
from ds_cp.patches.transformers import batch as batches
from ds_cp.patches.transformers.losses import causal_lm, smoothing
from ds_cp.tiled.deferred import DeferredLogits

LOGITS_LIMIT = 16 << 30
"""Bytes of whole-sequence logits that a rank may hold."""


def hook(head: torch.nn.Module, vocab: int) -> list[Any]:
    """Register the hooks; returns their handles.

    Args:
        vocab: the size of the vocabulary; 0 where it is not known.
    """
    return [
        head.register_forward_pre_hook(_before_head(vocab, inspect.signature(head.forward)), with_kwargs=True),
        head.register_forward_hook(_after_head, always_call=True),
    ]


def _before_head(vocab: int, signature: inspect.Signature):
    @torch.compiler.disable
    def before_head(head: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        given = batches.named(signature, args, kwargs)
        if not any(isinstance(given.get(name), torch.Tensor) for name in ("input_ids", "inputs_embeds")):
            enter_head(head, HeadCall())  # another function runs in its place (TRL redirects forwards): no known loss
            return
        keeps = given.get("logits_to_keep")
        everything = not isinstance(keeps, torch.Tensor) and not keeps
        call = _call(head, given) if everything else HeadCall(False, given.get("labels"))
        if call.keeps_local and not call.loss_outside:
            _tell_targets(call, head, given)
        call.told, call.input_ids = batches.facts(given), given.get("input_ids")
        if not (call.loss_outside or smoothing.loss_only() or (head.training and torch.is_grad_enabled())):
            call.limit = LOGITS_LIMIT
        enter_head(head, call)
        generating = given.get("use_cache") or batches.cache_of(given) is not None
        if everything and not call.keeps_local and not generating and "logits_to_keep" in signature.parameters:
            _refuse_huge_logits(vocab, *batches.shape_of(given))

    return before_head


def _call(head: torch.nn.Module, given: dict[str, Any]) -> HeadCall:
    """Which known loss takes what this call leaves local, if any."""
    labels = given.get("labels")
    if given.get("fused_lm_head"):
        return HeadCall(trl.is_fused(head), labels)
    if labels is not None:
        return HeadCall(causal_lm.keeps_local(head), labels)
    comes_later = smoothing.expects(head)
    return HeadCall(comes_later, None, loss_outside=comes_later)


def _tell_targets(call: HeadCall, head: torch.nn.Module, given: dict[str, Any]) -> None:
    """What the loss will look up, for the stack's hook to check: the label of a row's first token is never asked for."""
    shifted, labels = given.get("shift_labels"), given.get("labels")
    call.targets = shifted if shifted is not None or not isinstance(labels, torch.Tensor) else labels[..., 1:]
    call.vocab = vocabulary(head)
    call.ignore_index = given.get("ignore_index", call.ignore_index)


def vocabulary(head: torch.nn.Module) -> int:
    """How many logits a token has; 0 where that is not known."""
    projection = head.get_output_embeddings() if hasattr(head, "get_output_embeddings") else None
    return getattr(projection, "out_features", 0)


def _refuse_huge_logits(vocab: int, batch: int, seq_len: int) -> None:
    size = batch * seq_len * vocab * 4
    if size > LOGITS_LIMIT:
        raise BatchError(
            f"the model is called without labels, so each rank would hold the logits of all {batch} x {seq_len} tokens "
            f"({size / 2**30:.0f} GiB in fp32, the limit is {LOGITS_LIMIT >> 30} GiB). Pass labels, so that the loss is "
            "computed on local tokens, or logits_to_keep."
        )


@torch.compiler.disable
def _after_head(head: torch.nn.Module, args: tuple, output: Any) -> Any:
    call = leave_head(head)
    if call is None or call.region is None or output is None:
        return None
    if not call.consumed and not call.loss_outside:
        raise BatchError(
            f"{type(head).__name__} kept its hidden states local for a loss that it then did not call; what it returned "
            "belongs to one shard only."
        )
    return _with_logits(output, call)


def _with_logits(output: Any, call: HeadCall) -> Any:
    """The head's output with logits that nobody can mistake for whole ones: gathered, or out of reach where a known
    loss has them or will have them, and where there are too many."""

    def honest(logits: torch.Tensor | DeferredLogits | None) -> Any:
        if logits is None:
            return None
        deferred = isinstance(logits, DeferredLogits)
        # the loss has computed those that are returned: to call the projection here, in some groups of the world only,
        # would hang under ZeRO-3
        if not (logits.returned if deferred else call.returns_whole(logits)):
            return LocalLogits(logits, call.region, call.limit)
        return call.region.gather(logits.computed() if deferred else logits)

    index = 0 if call.loss_outside else 1  # (loss, logits, ...), or no loss
    if isinstance(output, tuple):
        return (*output[:index], honest(output[index]), *output[index + 1 :])
    if "logits" in output:
        output["logits"] = honest(output["logits"])
    return output
