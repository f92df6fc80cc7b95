"""Hooks on a model with a task head: they decide whether its hidden states stay local, and replace or gather its logits.

If the loss is one that ds_cp computes on local tokens, the decoder leaves its hidden states local. Otherwise they are
gathered after the decoder, which is right for any task head.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable

import torch

from ds_cp.agreement import BatchError
from ds_cp.patches.transformers import batch as batches
from ds_cp.patches.transformers.ambient import begin_task_head, end_task_head
from ds_cp.patches.transformers.host_copies import original
from ds_cp.patches.transformers.losses import causal_lm, label_smoothing
from ds_cp.patches.transformers.losses.deferred_logits import DeferredLogits
from ds_cp.patches.transformers.losses.local_logits import LocalLogits
from ds_cp.patches.transformers.losses.task_head_call import TaskHeadCall
from ds_cp.patches.trl import fused_head
from ds_cp.region import Region

LOGITS_LIMIT = 16 << 30
"""Bytes of gathered logits that a rank may hold, in fp32."""


def hook(model: torch.nn.Module, vocab: int) -> list[Any]:
    """Register the hooks. Returns their handles.

    Args:
        vocab: Size of the vocabulary; 0 if it is unknown.
    """
    signature = inspect.signature(model.forward)
    return [
        model.register_forward_pre_hook(_before_task_head(vocab, signature), with_kwargs=True),
        model.register_forward_hook(_after_task_head, always_call=True),
    ]


# ---- before a task head ------------------------------------------------------------------------------------------


def _before_task_head(vocab: int, signature: inspect.Signature) -> Callable:
    @torch.compiler.disable
    def before_task_head(model: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        arguments = batches.arguments_by_name(signature, args, kwargs)
        if not any(isinstance(arguments.get(name), torch.Tensor) for name in ("input_ids", "inputs_embeds")):
            # Another function runs in place of the forward (TRL redirects forwards), so the loss is unknown.
            begin_task_head(model, TaskHeadCall())
            return
        logits_to_keep = arguments.get("logits_to_keep")
        keeps_all_logits = not isinstance(logits_to_keep, torch.Tensor) and not logits_to_keep
        call = _new_call(model, arguments, keeps_all_logits)
        begin_task_head(model, call)
        is_generating = arguments.get("use_cache") or batches.cache_of(arguments) is not None
        returns_all_logits = keeps_all_logits and not call.keeps_local and "logits_to_keep" in signature.parameters
        if returns_all_logits and not is_generating:
            _refuse_huge_logits(vocab, *batches.shape_of(arguments))

    return before_task_head


def _new_call(model: torch.nn.Module, arguments: dict[str, Any], keeps_all_logits: bool) -> TaskHeadCall:
    """Decide whether hidden states stay local, and record what the stack's hook checks on behalf of the loss."""
    labels: Any = arguments.get("labels")
    shift_labels = arguments.get("shift_labels")
    call = TaskHeadCall(
        labels=labels,
        input_ids=arguments.get("input_ids"),
        batch_facts=batches.document_arguments(arguments),
    )
    if not keeps_all_logits:
        call.keeps_local = False
    elif arguments.get("fused_lm_head"):
        call.keeps_local = fused_head.is_fused(model)
    elif labels is not None:
        call.keeps_local = causal_lm.keeps_local(model)
    else:
        call.keeps_local = call.loss_after_head = label_smoothing.expects(model)
    if call.keeps_local and not call.loss_after_head:
        # The loss shifts labels to the left, so it never uses the label of a row's first token.
        is_shifted = shift_labels is not None or not isinstance(labels, torch.Tensor)
        targets = shift_labels if is_shifted else labels
        if isinstance(targets, torch.Tensor):
            call.targets = original(targets) if is_shifted else original(targets)[..., 1:]
        call.vocab = _vocab_size(model)
        call.ignore_index = arguments.get("ignore_index", call.ignore_index)
    is_training = model.training and torch.is_grad_enabled()
    if not (call.loss_after_head or label_smoothing.loss_only() or is_training):
        call.logits_limit = LOGITS_LIMIT
    return call


def _vocab_size(model: Any) -> int:
    """Number of logits per token; 0 if it is unknown."""
    projection = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return getattr(projection, "out_features", 0)


def _refuse_huge_logits(vocab: int, batch: int, seq_len: int) -> None:
    size = batch * seq_len * vocab * 4
    if size > LOGITS_LIMIT:
        raise BatchError(
            f"the model is called without labels, so each rank would hold the logits of all {batch} x {seq_len} tokens "
            f"({size / 2**30:.0f} GiB in fp32, the limit is {LOGITS_LIMIT >> 30} GiB). Pass labels, so that the loss is "
            "computed on local tokens, or logits_to_keep."
        )


# ---- after a task head -------------------------------------------------------------------------------------------


@torch.compiler.disable
def _after_task_head(model: torch.nn.Module, args: tuple, output: Any) -> Any:
    call = end_task_head(model)
    if call is None or call.region is None or output is None:
        return None
    if not call.consumed and not call.loss_after_head:
        raise BatchError(
            f"{type(model).__name__} left its hidden states local for a loss that it then did not call; its outputs "
            "are those of one shard only."
        )
    index = 0 if call.loss_after_head else 1  # (logits, ...) without a loss, else (loss, logits, ...)
    if isinstance(output, tuple):
        return (*output[:index], _returned_logits(output[index], call, call.region), *output[index + 1 :])
    if "logits" in output:
        output["logits"] = _returned_logits(output["logits"], call, call.region)
    return output


def _returned_logits(logits: torch.Tensor | DeferredLogits | None, call: TaskHeadCall, region: Region) -> Any:
    """The logits that the caller gets in place of local ones: gathered, or an object that raises if used as a tensor.

    They are an object in training, where the loss takes deferred logits later, and where gathered ones would exceed the
    limit.
    """
    if logits is None:
        return None
    if isinstance(logits, DeferredLogits):
        # The loss has computed them if they are returned. To call the projection here would deadlock under ZeRO-3, where
        # other groups of the world may not call it.
        return region.gather(logits.computed()) if logits.returned else LocalLogits(logits, region, call.logits_limit)
    return (
        region.gather(logits) if call.returns_whole_logits(logits) else LocalLogits(logits, region, call.logits_limit)
    )
