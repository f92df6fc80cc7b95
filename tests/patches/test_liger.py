"""Liger's loss on local tokens. The released package needs Triton, so a stand-in has its names and signatures."""

import functools
import importlib.util
import sys
import types

import pytest
import torch

from harness import batches, models, oracle, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec
from harness.paths import DATA

LIGER = "liger_kernel.transformers.model.llama"
LLAMA = ModelSpec("llama")
RING = {"size": 2, "method": "ring"}
PACKED = BatchSpec("packed", 1, 53)


# ---- Liger: a stand-in with the released package's names and signatures, for its kernels need Triton ------


def apply_liger(model):
    """Bind Liger's forward to a model, as ``_apply_liger_kernel_to_instance`` does."""
    spec = importlib.util.spec_from_file_location(LIGER, DATA / "programs" / "liger_llama.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[LIGER] = module
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
    llama = sys.modules[LIGER]
    llama.LigerForCausalLMLoss = functools.partial(llama.LigerForCausalLMLoss, return_token_accuracy=True)
    model(**batches.make(PACKED).inputs)


def test_metrics_of_a_shard_are_refused(workers):
    workers(2).run_expecting_error(asks_for_accuracy, "return_token_accuracy")
