"""State after a forward, after an interrupted forward and after a failed attachment: nothing is left."""

import gc
import weakref

import pytest
import torch

from harness import batches, models, oracle, subject, vision
from harness.batches import BatchSpec
from harness.models import ModelSpec
from harness.oracle import truth

LLAMA = ModelSpec("llama")
DENSE = BatchSpec("dense", 1, 37)
RING = {"size": 2, "method": "ring"}


def interrupt(model, inputs):
    """One forward that is interrupted in its second layer, after it has drawn random numbers that differ by rank."""

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
def test_an_interrupted_forward_changes_no_later_one(workers, frames):
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


@pytest.mark.parametrize("name", ["llama", "paligemma"])  # paligemma creates its mask before the decoder runs
def test_a_finished_forward_leaves_no_reference_cycle(workers, name):
    def leaves():
        import ds_cp
        from ds_cp.patches.transformers import decoder_stacks

        if name == "llama":
            model, inputs = subject.changed_model(LLAMA, RING).train(), batches.make(DENSE).inputs
        else:
            model, inputs = vision.build(name, torch.float32), vision.batch(name)
            inputs = {n: v.float() if v.is_floating_point() else v for n, v in inputs.items()}
            ds_cp.context_parallel(model, RING)
        regions, make = [], decoder_stacks.Region
        decoder_stacks.Region = lambda *args, **kwargs: (
            regions.append(weakref.ref(region := make(*args, **kwargs))) or region
        )
        gc.collect()
        gc.disable()
        model(**inputs).loss.backward()
        return [region() is None for region in regions]

    assert workers(2).run(leaves) == [[True], [True]]


def test_a_failed_attachment_is_undone(workers):
    def attached_at_the_second_attempt():
        import ds_cp
        from ds_cp import patches
        from ds_cp.patches.transformers.memory import chunked_mlp

        def fail(*args):
            raise ValueError("this model is no good")

        model = models.build(LLAMA).train()
        attach, chunked_mlp.attach = chunked_mlp.attach, fail
        with pytest.raises(ValueError, match="no good"):
            ds_cp.context_parallel(model, RING)
        chunked_mlp.attach = attach
        changed = [name for name, module in model.named_modules() if "forward" in vars(module) or module._forward_hooks]
        listed = [patch.target for patch in patches.installed() if patch.target.startswith("model ")]
        left = changed, listed, model.config._attn_implementation
        ds_cp.context_parallel(model, RING)
        loss = model(**batches.make(DENSE).inputs).loss
        loss.backward()
        return (loss.item(), oracle.gradients_of(model)), left

    before = models.build(LLAMA).config._attn_implementation
    results = workers(2).run(attached_at_the_second_attempt)
    assert all(left == ([], [], before) for _, left in results)
    subject.check([result for result, _ in results], truth(LLAMA, DENSE))
