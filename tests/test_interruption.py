"""What a forward leaves behind: nothing, neither when it ends nor when the user interrupts it."""

import gc
import weakref

import pytest
import torch

from harness import batches, oracle, subject, vision
from harness.batches import BatchSpec
from harness.models import ModelSpec
from harness.oracle import truth

LLAMA = ModelSpec("llama")
DENSE = BatchSpec("dense", 1, 37)
RING = {"size": 2, "method": "ring"}


def interrupt(model, inputs):
    """One forward that ends in its second layer, after random numbers that differ by rank."""

    def stop(*args):
        torch.rand(1 + torch.distributed.get_rank())
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(**inputs)
    handle.remove()


def deeper(frames, call):
    return deeper(frames - 1, call) if frames else call()


@pytest.mark.parametrize("frames", [0, 20])
def test_after_an_interruption_everything_is_as_before(workers, frames):
    def interrupted():
        model = subject.changed_model(LLAMA, RING).train()
        inputs = batches.make(DENSE).inputs
        interrupt(model, inputs)
        hidden = deeper(frames, lambda: model.model(inputs["input_ids"])).last_hidden_state
        random = torch.rand(1).item()
        interrupt(model, inputs)
        loss = deeper(frames, lambda: model(**inputs)).loss
        loss.backward()
        torch.manual_seed(3)
        seeded = torch.rand(1).item()
        interrupt(model, inputs)
        torch.manual_seed(3)
        deeper(frames, lambda: model(**inputs))
        return (loss.item(), oracle.gradients_of(model)), hidden.shape[1], random, torch.rand(1).item() == seeded

    results = workers(2).run(interrupted)
    subject.check([result for result, *_ in results], truth(LLAMA, DENSE))
    assert all(length == 37 and kept_seed for _, length, _, kept_seed in results)
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("name", ["llama", "llava"])  # llava makes its mask before its decoder runs
def test_a_forward_that_is_over_leaves_no_cycle(workers, name):
    def leaves():
        import ds_cp
        from ds_cp.patches.transformers import stacks

        if name == "llama":
            model, inputs = subject.changed_model(LLAMA, RING).train(), batches.make(DENSE).inputs
        else:
            model, inputs = vision.build(name, torch.float32), vision.batch(name)
            inputs = {n: v.float() if v.is_floating_point() else v for n, v in inputs.items()}
            ds_cp.context_parallel(model, RING)
        regions, make = [], stacks.Region
        stacks.Region = lambda *args, **kwargs: regions.append(weakref.ref(region := make(*args, **kwargs))) or region
        gc.collect()
        gc.disable()
        model(**inputs).loss.backward()
        return [region() is None for region in regions]

    assert workers(2).run(leaves) == [[True], [True]]
