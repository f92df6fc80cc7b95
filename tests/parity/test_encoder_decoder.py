"""Encoder-decoder models: both stacks are sharded, cross attention sees the whole encoder output, generation is unchanged."""

import pytest
import torch

from data.cases.encoder_decoders import CASES, pairs, source
from harness import engine, heads, models, oracle

RING = {"size": 2, "method": "ring"}
WAYS = {
    "ring": RING,
    "ulysses": RING | {"method": "ulysses"},
    "contiguous": RING | {"layout": "contiguous"},
    "ring 4": RING | {"size": 4},
    "hybrid": RING | {"size": 4, "method": "hybrid", "ulysses_size": 2},
}


WINDOWED = {"t5gemma"}  # padding outside of every window sees no key, so its hidden states are undefined
IN_SINGLE_PRECISION = {"m2m_100"}  # it computes its sinusoids in fp32


def maker(class_name, model_type):
    extra = {"num_labels": 3} if class_name.endswith("SequenceClassification") else {}
    if "QuestionAnswering" in class_name:
        extra = {"num_labels": 2}
    start = {"decoder_start_token_id": 1} | ({"num_decoder_layers": 2} if "t5" in model_type else {})
    return lambda **more: heads.build(class_name, model_type, **extra, **start, **more)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_loss_outputs_and_gradients_equal_those_of_one_process(workers, case):
    class_name, model_type, inputs, way = case
    tolerance = 1e-6 if model_type in IN_SINGLE_PRECISION else 1e-9
    seen = inputs["attention_mask"].bool() if model_type in WINDOWED else None
    heads.check(workers, maker(class_name, model_type), WAYS[way], inputs, seen=seen, tolerance=tolerance)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("class_name, model_type", [CASES[0][:2], CASES[9][:2]])
def test_gradient_checkpointing_changes_nothing(workers, class_name, model_type, checkpointing):
    config = RING
    heads.check(workers, maker(class_name, model_type), config, pairs(), checkpointing)


def generated(class_name, model_type, config):
    """Greedy tokens and their scores, and tokens of beam search."""
    model = maker(class_name, model_type)().eval()
    if config:
        import ds_cp

        ds_cp.context_parallel(model, config)
    settings = dict(max_new_tokens=8, min_new_tokens=8, return_dict_in_generate=True, output_logits=True)
    greedy = model.generate(**source(), do_sample=False, **settings)
    beams = model.generate(**source(), num_beams=2, do_sample=False, **settings)
    return greedy.sequences, torch.stack(greedy.logits), beams.sequences


@pytest.mark.parametrize(
    "class_name, model_type", [CASES[0][:2], CASES[7][:2], CASES[9][:2], ("MarianMTModel", "marian")]
)
def test_generation_gives_the_same_tokens(workers, class_name, model_type):
    want = workers(1).run(generated, class_name, model_type, None)[0]
    for got in workers(2).run(generated, class_name, model_type, RING):
        assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
        assert (got[1] - want[1]).abs().max() < 1e-5 * want[1].abs().max()


def trained(class_name, model_type, config):
    """One step of SGD with an engine."""
    started = engine.initialize(config, maker(class_name, model_type)(dtype=torch.float32))
    return engine.step(started, [pairs()])


@pytest.mark.parametrize(
    "class_name, model_type, stage",
    [
        ("T5ForConditionalGeneration", "t5", 3),
        ("BartForConditionalGeneration", "bart", 2),
        ("BartForConditionalGeneration", "bart", 3),
    ],
)
def test_an_engine_takes_the_step_of_one_process(workers, class_name, model_type, stage):
    with models.TransformersInDouble():
        loss, _, want = heads.outputs(maker(class_name, model_type)(), pairs())
    _, _, single = heads.outputs(maker(class_name, model_type)(dtype=torch.float32), pairs())
    own_error = max(oracle.gradient_errors(single, want).values())  # the error of one process in fp32
    tolerance = max(oracle.TOLERANCE[torch.float32], 1.5 * own_error)
    assert tolerance < 1e-4
    for losses, gradients, updates in workers(2).run(
        trained, class_name, model_type, engine.json_config(RING, stage, rows=2)
    ):
        oracle.assert_close_loss(losses[0], loss, 1e-6)
        oracle.assert_close_gradients(gradients, want, tolerance)
        assert oracle.total_error(updates, want) < 1e-4  # differences of rounded weights


def test_t5gemma_without_a_mask_is_refused(workers):
    def without_mask():
        import ds_cp

        model = maker("T5GemmaForConditionalGeneration", "t5gemma")(dtype=torch.float32)
        ds_cp.context_parallel(model, RING)
        model(**pairs(padded=False))

    workers(2).run_expecting_error(without_mask, "T5Gemma's encoder got no attention_mask")


def test_every_accepted_type_is_compared_here():
    from ds_cp.patches.transformers import verified

    assert verified.ENCODER_DECODERS <= {model_type for _, model_type, *_ in CASES}
