"""Hooks on a model's head: may its hidden states stay local, and what becomes of its logits."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ds_cp.agreement import BatchError
from ds_cp.patches.transformers import batch as batches
from ds_cp.patches.transformers.ambient import begin_task_head, end_task_head
from ds_cp.patches.transformers.losses import causal_lm, label_smoothing
from ds_cp.patches.transformers.losses.deferred_logits import DeferredLogits
from ds_cp.patches.transformers.losses.local_logits import LocalLogits
from ds_cp.patches.transformers.losses.task_head_call import TaskHeadCall
from ds_cp.patches.trl import fused_head

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
        arguments = batches.arguments_by_name(signature, args, kwargs)
        if not any(isinstance(arguments.get(name), torch.Tensor) for name in ("input_ids", "inputs_embeds")):
            begin_task_head(
                head, TaskHeadCall()
            )  # another function runs in its place (TRL redirects forwards): no known loss
            return
        keeps = arguments.get("logits_to_keep")
        everything = not isinstance(keeps, torch.Tensor) and not keeps
        call = _call(head, arguments) if everything else TaskHeadCall(False, arguments.get("labels"))
        if call.keeps_local and not call.loss_after_head:
            _tell_targets(call, head, arguments)
        call.batch_facts, call.input_ids = batches.facts(arguments), arguments.get("input_ids")
        if not (call.loss_after_head or label_smoothing.loss_only() or (head.training and torch.is_grad_enabled())):
            call.logits_limit = LOGITS_LIMIT
        begin_task_head(head, call)
        generating = arguments.get("use_cache") or batches.cache_of(arguments) is not None
        if everything and not call.keeps_local and not generating and "logits_to_keep" in signature.parameters:
            _refuse_huge_logits(vocab, *batches.shape_of(arguments))

    return before_head


def _call(head: torch.nn.Module, arguments: dict[str, Any]) -> TaskHeadCall:
    """Which known loss takes what this call leaves local, if any."""
    labels = arguments.get("labels")
    if arguments.get("fused_lm_head"):
        return TaskHeadCall(fused_head.is_fused(head), labels)
    if labels is not None:
        return TaskHeadCall(causal_lm.keeps_local(head), labels)
    comes_later = label_smoothing.expects(head)
    return TaskHeadCall(comes_later, None, loss_after_head=comes_later)


def _tell_targets(call: TaskHeadCall, head: torch.nn.Module, arguments: dict[str, Any]) -> None:
    """What the loss will look up, for the stack's hook to check: the label of a row's first token is never asked for."""
    shifted, labels = arguments.get("shift_labels"), arguments.get("labels")
    call.targets = shifted if shifted is not None or not isinstance(labels, torch.Tensor) else labels[..., 1:]
    call.vocab = vocabulary(head)
    call.ignore_index = arguments.get("ignore_index", call.ignore_index)


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
    call = end_task_head(head)
    if call is None or call.region is None or output is None:
        return None
    if not call.consumed and not call.loss_after_head:
        raise BatchError(
            f"{type(head).__name__} kept its hidden states local for a loss that it then did not call; what it returned "
            "belongs to one shard only."
        )
    return _with_logits(output, call)


def _with_logits(output: Any, call: TaskHeadCall) -> Any:
    """The head's output with logits that nobody can mistake for whole ones: gathered, or out of reach where a known
    loss has them or will have them, and where there are too many."""

    def honest(logits: torch.Tensor | DeferredLogits | None) -> Any:
        if logits is None:
            return None
        deferred = isinstance(logits, DeferredLogits)
        # the loss has computed those that are returned: to call the projection here, in some groups of the world only,
        # would hang under ZeRO-3
        if not (logits.returned if deferred else call.returns_whole_logits(logits)):
            return LocalLogits(logits, call.region, call.logits_limit)
        return call.region.gather(logits.computed() if deferred else logits)

    index = 0 if call.loss_after_head else 1  # (loss, logits, ...), or no loss
    if isinstance(output, tuple):
        return (*output[:index], honest(output[index]), *output[index + 1 :])
    if "logits" in output:
        output["logits"] = honest(output["logits"])
    return output
