"""Inkling: a bias that each query mixes from learned profiles over the distance, and a sink per query."""

import pytest
import torch

from harness import engine, oracle, subject
from harness.batches import BatchSpec
from harness.cases import config_of
from harness.models import ModelSpec
from harness.oracle import truth

PACKED = BatchSpec("packed", 3, 53)
LEFT, RIGHT = BatchSpec("left_pad", 3, 37), BatchSpec("right_pad", 3, 37)


CASES = [
    ("inkling_text", ("ring", 3), PACKED),
    ("inkling_text", ("ulysses", 2), LEFT),
    pytest.param("inkling2_text", ("hybrid", 4), PACKED, marks=pytest.mark.slow),
    ("inkling2_loop_text", ("ring", 2), RIGHT),
]


@pytest.mark.parametrize("model_type, way, batch", CASES)
def test_gradients_equal_each_document_alone(workers, model_type, way, batch):
    model = ModelSpec(model_type)
    results = workers(way[1]).run(subject.loss_and_gradients, model, config_of(*way), [batch], torch.float64)
    subject.check(results, truth(model, batch), torch.float64)


@pytest.mark.parametrize("model_type, kind", [("inkling_text", "reentrant"), ("inkling2_text", "non-reentrant")])
def test_a_recomputed_layer_adds_the_same_bias(workers, model_type, kind):
    arguments = ModelSpec(model_type), config_of("ulysses", 2), [PACKED, BatchSpec("dense", 2, 64)]
    plain = workers(2).run(subject.loss_and_gradients_of_two_forwards, *arguments)
    again = workers(2).run(subject.loss_and_gradients_of_two_forwards, *arguments, kind)
    for got, want in zip(again, plain, strict=True):
        assert got[0] == want[0]
        oracle.assert_close_gradients(got[1], want[1], 1e-6)  # a reentrant checkpoint accumulates in another order


@pytest.mark.slow
def test_zero_3_takes_the_same_step(workers):
    """The groups have different numbers of documents."""
    model = ModelSpec("inkling2_text")
    groups = [[BatchSpec("packed", 1, 53)], [BatchSpec("dense", 1, 37)]]
    config = engine.json_config(config_of("ring", 2), 3, 1, 1, 2)
    results = workers(4).run(engine.train_one_step, model, config, groups)
    losses = [[truth(model, batch).loss for batch in group] for group in groups]
    engine.check(results, truth(model, *(batch for group in groups for batch in group)), losses)


@pytest.mark.parametrize("model_type", ["inkling_text", "inkling2_text"])
def test_calls_with_a_cache_are_those_of_one_process(workers, model_type):
    def differences():
        import ds_cp
        from harness import families

        model = families.build(model_type).eval()
        ids = torch.randint(5, 100, (2, 29), generator=torch.Generator().manual_seed(4))
        with torch.no_grad():
            want = model(input_ids=ids).logits
            ds_cp.context_parallel(model, config_of("ring", 2))
            return (model(input_ids=ids, use_cache=True).logits - want).abs().max().item()

    assert workers(2).run(differences)[0] < 1e-5
