"""The chunked loss of whole models: exact, and no tensor [tokens, vocabulary] is allocated."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_cp.agreement import BatchError
from ds_cp.patches.transformers.losses.local_logits import LocalLogits
from harness import batches, engine, models, oracle, subject
from harness.batches import BatchSpec
from harness.models import VOCAB, ModelSpec
from harness.oracle import truth
from harness.tiles import small_tiles

TYPES = {
    "llama": ModelSpec("llama"),
    "tied": ModelSpec("gpt2"),
    "softcap": ModelSpec("gemma2"),
    "logit_scale": ModelSpec("cohere2"),
    "bias": ModelSpec("phi"),
    "logits_scaling": ModelSpec("granite"),
}
RING = {"size": 2, "method": "ring"}


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor over the vocabulary that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and VOCAB in tensor.shape:
                self.elements = max(self.elements, tensor.numel())
        return made


def measured(spec, config, batch, dtype=torch.float32, compiled=False, prepare=None):
    """(loss, gradients) with small chunks, and the size of the largest tensor over the vocabulary."""
    model = subject.changed_model(spec, config, dtype).train()
    if prepare:
        prepare(model)
    run = torch.compile(model, backend="eager") if compiled else model
    made = batches.make(batch)
    with small_tiles(), Largest() as largest, subject.in_full_precision(dtype):
        output = run(**made.inputs)
        output.loss.backward()
    assert isinstance(output.logits, LocalLogits)
    return (output.loss.item(), oracle.gradients_of(model)), largest.elements


LONG = BatchSpec("packed", 3, 150)  # [L, vocab] is larger than any activation or weight


@pytest.mark.parametrize("switch", ["auto", False])
@pytest.mark.parametrize("name", TYPES)
def test_a_model_is_exact_and_allocates_its_logits_only_without_chunks(workers, name, switch):
    spec = TYPES[name]
    results = workers(2).run(measured, spec, RING | {"tiled_loss": switch}, LONG, torch.float64)
    subject.check([result for result, _ in results], truth(spec, LONG), torch.float64)
    local = 3 * 75 * VOCAB
    assert all((elements >= local) == (switch is False) for _, elements in results), results[0][1]


EXTRAS = [
    BatchSpec("dense", 2, 37, "first_eighth"),  # one rank has ignored labels only
    BatchSpec("dense", 1, 37, "none"),
    BatchSpec("left_pad", 3, 37, extras=("num_items_in_batch",)),
    BatchSpec("packed", 1, 53, extras=("shift_labels", "num_items_in_batch as a tensor")),
]


@pytest.mark.parametrize("batch", EXTRAS, ids=str)
def test_labels_of_every_kind_are_exact(workers, batch):
    results = workers(2).run(measured, TYPES["llama"], RING, batch)
    subject.check([result for result, _ in results], truth(TYPES["llama"], batch))


@pytest.mark.parametrize("name", ["llama", "softcap"])
def test_a_compiled_model_is_exact(workers, name):
    results = workers(2).run(measured, TYPES[name], RING, LONG, compiled=True)
    subject.check([result for result, _ in results], truth(TYPES[name], LONG))
    assert all(elements < 3 * 75 * VOCAB for _, elements in results)


def freeze_head(model):
    model.lm_head.weight.requires_grad_(False)


def test_with_a_frozen_head_the_layers_have_exact_gradients(workers):
    results = workers(2).run(measured, TYPES["llama"], RING, LONG, prepare=freeze_head)
    want = truth(TYPES["llama"], LONG)
    for (_, gradients), _ in results:
        assert (gradients.pop("lm_head.weight") == 0).all()
    gradients = {name: value for name, value in want.gradients.items() if name != "lm_head.weight"}
    got = oracle.mean_over_ranks([gradients for (_, gradients), _ in results])
    oracle.assert_close_gradients(got, gradients, oracle.TOLERANCE[torch.float32])


def test_a_copy_projects_with_its_own_weights(workers):
    def copied():
        model = subject.changed_model(TYPES["llama"], RING).train()
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.lm_head.weight.mul_(3)
        inputs = batches.make(LONG).inputs
        with small_tiles():
            return model(**inputs).loss.item(), twin(**inputs).loss.item()

    model, inputs = models.build(TYPES["llama"]), batches.make(BatchSpec("dense", 3, 150)).inputs
    for own, scaled in workers(2).run(copied):
        oracle.assert_close_loss(own, truth(TYPES["llama"], LONG).loss, 1e-6)
        assert abs(scaled - own) > 0.1 * own
    assert model(**inputs).loss is not None


def steps_under_an_engine(spec, config, groups):
    with small_tiles():
        return engine.train_one_step(spec, config, groups)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "tied"])
def test_every_zero_stage_is_exact_with_different_numbers_of_chunks_per_rank(workers, name, stage):
    """The two data-parallel groups have sequences of different lengths, so their ranks run different numbers of chunks."""
    spec, groups = TYPES[name], [[BatchSpec("packed", 1, 23), BatchSpec("dense", 1, 37)],
                                 [BatchSpec("dense", 1, 150, "middle"), BatchSpec("packed", 1, 53)]]  # fmt: skip
    config = engine.json_config(RING, stage, 1, 2, 2)
    results = workers(4).run(steps_under_an_engine, spec, config, groups)
    losses = [[truth(spec, batch).loss for batch in group] for group in groups]
    engine.check(results, truth(spec, *(batch for group in groups for batch in group)), losses)


def evaluated():
    model = subject.changed_model(TYPES["llama"], RING).eval()
    with small_tiles(), torch.no_grad(), Largest() as largest:
        output = model(**batches.make(LONG).inputs)
    return output.loss.item(), output.logits, largest.elements


def test_evaluation_with_labels_returns_whole_logits(workers):
    want = truth(TYPES["llama"], LONG)
    for loss, logits, _ in workers(2).run(evaluated):
        oracle.assert_close_loss(loss, want.loss, 1e-6)
        oracle.assert_close_logits(logits, want.logits[0], 1e-5)


def evaluated_beyond_the_limit():
    from ds_cp.patches.transformers import task_head

    task_head.LOGITS_LIMIT = 1
    loss, logits, elements = evaluated()
    assert isinstance(logits, LocalLogits)
    with pytest.raises(BatchError, match="those of the whole sequence take more than .* prediction_loss_only"):
        logits.argmax(-1)
    return loss, "limited", elements


def test_evaluation_of_the_loss_only_allocates_no_logits(workers):
    for loss, logits, elements in workers(2).run(evaluated_beyond_the_limit):
        oracle.assert_close_loss(loss, truth(TYPES["llama"], LONG).loss, 1e-6)
        assert logits == "limited" and elements < 3 * 75 * VOCAB


def evaluated_by_zero_3(specs, config, limit):
    """Loss of this group's batch, type of its logits, and the logits if they are whole."""
    from ds_cp.patches.transformers import task_head

    task_head.LOGITS_LIMIT = limit
    model = engine.initialize(config, models.build(TYPES["llama"]))
    model.eval()
    with small_tiles(), torch.no_grad():
        output = model(**batches.make(specs[subject.data_parallel_rank(2)]).inputs)
    kind = type(output.logits).__name__
    return output.loss.item(), kind, output.logits if kind == "Tensor" else None


def test_groups_below_and_above_the_logits_limit_gather_the_same_weights(workers):
    specs = [BatchSpec("dense", 1, 37), BatchSpec("packed", 1, 53)]
    config = engine.json_config(RING, 3, 1, 1, 2)
    results = workers(4).run(evaluated_by_zero_3, specs, config, 40 * VOCAB * 4)
    for rank, (loss, kind, logits) in enumerate(results):
        want = truth(TYPES["llama"], specs[rank // 2])
        oracle.assert_close_loss(loss, want.loss, 1e-6)
        assert kind == ("Tensor" if rank < 2 else "LocalLogits")
        if logits is not None:
            oracle.assert_close_logits(logits, want.logits[0], 1e-5)


# ---- heads that PEFT changed, and autocast -----------------------------------------------------------------

ADAPTED = {
    "an adapter on the head": dict(target_modules=["q_proj", "lm_head"]),  # its logits are computed immediately
    "a head trained whole beside adapters": dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
}


def adapted(config, settings):
    import peft

    import ds_cp

    torch.manual_seed(0)
    model = peft.get_peft_model(models.build(TYPES["llama"]), peft.LoraConfig(r=4, init_lora_weights=False, **settings))
    if config:
        ds_cp.context_parallel(model, config)
    with small_tiles(), Largest() as largest:
        loss = model.train()(**batches.make(BatchSpec("dense", 3, 150)).inputs).loss
        loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    return (loss.item(), gradients), largest.elements


@pytest.mark.parametrize("name", ADAPTED)
def test_heads_changed_by_peft_are_exact(workers, name):
    (loss, gradients), _ = workers(1).run(adapted, None, ADAPTED[name])[0]
    results = workers(2).run(adapted, RING, ADAPTED[name])
    for (got, _), elements in results:
        oracle.assert_close_loss(got, loss, 1e-6)
        assert (elements < 3 * 75 * VOCAB) == ("modules_to_save" in ADAPTED[name])
    got = oracle.mean_over_ranks([found for (_, found), _ in results])
    oracle.assert_close_gradients(got, gradients, 1e-5)
