"""Liger's loss on local tokens. The released package needs Triton, so a stand-in has its names and signatures."""

import functools
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from harness import batches, models, oracle, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec

LLAMA = ModelSpec("llama")
RING = {"size": 2, "method": "ring"}
PACKED = BatchSpec("packed", 1, 53)


# ---- Liger: a stand-in with the released package's names and signatures, for its kernels need Triton ------


def liger_loss(
    hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
    final_logit_softcapping=None, return_token_accuracy=False, return_predicted_tokens=False, **kwargs,
):  # fmt: skip
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    logits = hidden_states.view(-1, hidden_size) @ lm_head_weight.t()
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits, shift_labels.view(-1), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


LIGERS_FORWARD = '''
def lce_forward(self, input_ids=None, labels=None, skip_logits=None, **kwargs):
    hidden = self.model(input_ids=input_ids, **{k: v for k, v in kwargs.items() if k not in ("shift_labels", "num_items_in_batch")})[0]
    kwargs = {k: kwargs[k] for k in ("shift_labels", "num_items_in_batch") if k in kwargs}
    if self.training if skip_logits is None else skip_logits:
        loss = LigerForCausalLMLoss(hidden_states=hidden, lm_head_weight=self.lm_head.weight, labels=labels,
                                    hidden_size=self.config.hidden_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=None)
    logits = self.lm_head(hidden)
    loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits)
'''  # fmt: skip


def apply_liger(model):
    """As ``_apply_liger_kernel_to_instance`` leaves a model: with a forward of a module of Liger's."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    module = types.ModuleType("liger_kernel.transformers.model.llama")
    module.LigerForCausalLMLoss, module.CausalLMOutputWithPast = liger_loss, CausalLMOutputWithPast
    exec(LIGERS_FORWARD, module.__dict__)
    sys.modules[module.__name__] = module
    model.forward = types.MethodType(module.lce_forward, model)


def with_liger(batch):
    import ds_cp

    model = models.build(LLAMA).train()
    apply_liger(model)
    ds_cp.context_parallel(model, RING)
    inputs = batches.make(batch).inputs
    output = model(**inputs)
    output.loss.backward()
    sent = subject.gathered_bytes()
    with torch.no_grad():
        evaluated = model.eval()(**inputs).loss.item()
    return (output.loss.item(), oracle.gradients_of(model)), evaluated, sent


@pytest.mark.parametrize("batch", [PACKED, BatchSpec("dense", 3, 38, extras=("num_items_in_batch",)),
                                   BatchSpec("dense", 1, 37, extras=("shift_labels",)),
                                   BatchSpec("dense", 2, 37, "first_eighth")], ids=str)  # fmt: skip
def test_ligers_loss_runs_on_local_tokens_and_is_summed_over_the_group(workers, batch):
    results = workers(2).run(with_liger, batch)
    want = oracle.truth(LLAMA, batch)
    subject.check([result for result, _, _ in results], want)
    for _, evaluated, sent in results:
        oracle.assert_close_loss(evaluated, want.loss, 1e-6)
        assert sent == 0


def asks_for_accuracy():
    import ds_cp

    model = models.build(LLAMA).train()
    apply_liger(model)
    ds_cp.context_parallel(model, RING)
    llama = sys.modules["liger_kernel.transformers.model.llama"]
    llama.LigerForCausalLMLoss = functools.partial(llama.LigerForCausalLMLoss, return_token_accuracy=True)
    model(**batches.make(PACKED).inputs)


def test_metrics_of_a_shard_are_refused(workers):
    workers(2).run_expecting_error(asks_for_accuracy, "return_token_accuracy")
