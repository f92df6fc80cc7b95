"""Offloading of the inputs of checkpointed layers. On CPU nothing is copied, so the test counts what would be."""

import pytest
import torch

from harness import batches, oracle, subject
from harness.batches import BatchSpec
from harness.models import HEAD_DIM, ModelSpec
from harness.oracle import truth

LLAMA = ModelSpec("llama", layers=3)
RING = {"size": 2, "method": "ring", "offload_activations": True}
BATCH = BatchSpec("packed", 3, 53)


def counted(checkpointing):
    """`subject.loss_and_gradients` with real copies; the shapes that were offloaded, and the number that was restored."""
    from ds_cp.patches.transformers.memory import offload_activations

    left, back = [], []

    def to_host(tensor):
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        left.append(tuple(tensor.shape))
        return tensor.device, tensor.clone()

    def from_host(packed, original=offload_activations.from_host):
        back.append(isinstance(packed, tuple))
        return original(packed)

    offload_activations.to_host, offload_activations.from_host = to_host, from_host
    result = subject.loss_and_gradients(LLAMA, RING, [BATCH], checkpointing=checkpointing)
    return result, left, sum(back)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_the_input_of_each_layer_is_offloaded_and_restored(workers, checkpointing):
    results = workers(2).run(counted, checkpointing)
    subject.check([result for result, _, _ in results], truth(LLAMA, BATCH))
    hidden = (3, 27, LLAMA.heads * HEAD_DIM)  # 53 tokens on two ranks, padded
    for _, left, back in results:
        assert left.count(hidden) >= LLAMA.layers
        assert len(left) <= 3 * LLAMA.layers + 6, "more than layer inputs left"
        assert back == len(left)


def test_on_a_cpu_nothing_is_copied(workers):
    results = workers(2).run(subject.loss_and_gradients, LLAMA, RING, [BATCH], checkpointing="non-reentrant")
    subject.check(results, truth(LLAMA, BATCH))


def test_without_checkpointing_it_is_refused(workers):
    def without():
        subject.changed_model(LLAMA, RING).train()(**batches.make(BATCH).inputs)

    workers(2).run_expecting_error(without, "checkpointing is off")


def test_evaluation_needs_no_checkpointing(workers):
    def evaluated():
        with torch.no_grad():
            return subject.changed_model(LLAMA, RING).eval()(**batches.make(BATCH).inputs).loss.item()

    for loss in workers(2).run(evaluated):
        oracle.assert_close_loss(loss, truth(LLAMA, BATCH).loss, 1e-6)


def test_an_interrupted_forward_leaves_no_hook_behind(workers):
    """torch runs no forward hook after a KeyboardInterrupt, so the saved-tensor hooks could stay active."""

    def interrupted():
        from ds_cp.patches.transformers.memory import offload_activations

        left, to_host = [], offload_activations.to_host
        offload_activations.to_host = lambda tensor: left.append(1) or to_host(tensor)
        model = subject.changed_model(LLAMA, RING).train()
        subject.enable_checkpointing(model, "non-reentrant")
        inputs = batches.make(BATCH).inputs

        def stop(*_):
            handle.remove()
            raise KeyboardInterrupt

        handle = model.model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(**inputs)
        loss = model(**inputs).loss
        before = len(left)
        x = torch.ones(3, requires_grad=True)
        (x.exp() * x).sum().backward()
        loss.backward()
        return len(left) - before

    assert workers(2).run(interrupted) == [0, 0]
