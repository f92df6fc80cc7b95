"""Encoder-decoders: both stacks share their sequence, cross attention sees all of the encoder, generation is unchanged."""

import pytest
import torch

from harness import engine, heads, models, oracle

RING = {"size": 2, "method": "ring"}
WAYS = {
    "ring": RING,
    "ulysses": RING | {"method": "ulysses"},
    "contiguous": RING | {"layout": "contiguous"},
    "ring 4": RING | {"size": 4},
    "hybrid": RING | {"size": 4, "method": "hybrid", "ulysses_size": 2},
}
SOURCE = 37


def source(padded=True):
    mask = heads.padding("right", length=SOURCE)
    ids = heads.tokens(length=SOURCE)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask} if padded else {"input_ids": ids}


def pairs(target=23, padded=True):
    """A batch of a source and a target; labels hide the end of the second target."""
    labels = heads.tokens(length=target, seed=5)
    if padded:
        labels[1, target - 6 :] = -100
    return source(padded) | {"labels": labels}


def pads_by_id():
    given = of_ones()
    given["labels"][0, 7] = 0  # becomes a pad of the decoder
    return given


def of_ones():
    return pairs(padded=False) | {"attention_mask": torch.ones(2, SOURCE, dtype=torch.long)}


def per_row():
    ids = source()["input_ids"]
    ids[0, -1] = ids[1, 23] = 2  # bart pools the last end of sentence
    return {"input_ids": ids, "attention_mask": source()["attention_mask"], "labels": torch.tensor([1, 2])}


def spans():
    return source() | {"start_positions": torch.tensor([3, 20]), "end_positions": torch.tensor([17, 22])}


def hidden():
    return source() | {"decoder_input_ids": heads.tokens(length=23, seed=5), "output_hidden_states": True}


def embeddings():
    width = 64
    generator = torch.Generator().manual_seed(7)
    make = lambda n: torch.randn(2, n, width, generator=generator, dtype=torch.float64)  # noqa: E731
    return {"inputs_embeds": make(SOURCE), "decoder_inputs_embeds": make(23), "output_hidden_states": True}


# class, model type, batch, way
CASES = [
    ("T5ForConditionalGeneration", "t5", pairs(), "ring"),
    ("T5ForConditionalGeneration", "t5", pairs(SOURCE), "ulysses"),
    ("T5ForConditionalGeneration", "t5", pairs(SOURCE, padded=False), "hybrid"),
    ("T5ForConditionalGeneration", "t5", pairs(9), "ring 4"),
    ("T5Model", "t5", hidden(), "ring"),
    ("T5ForQuestionAnswering", "t5", spans(), "contiguous"),
    ("MT5ForConditionalGeneration", "mt5", pairs(), "contiguous"),
    ("UMT5ForConditionalGeneration", "umt5", pairs(), "ring 4"),
    ("UMT5ForConditionalGeneration", "umt5", pairs(SOURCE), "ulysses"),
    ("BartForConditionalGeneration", "bart", pairs(), "ring"),
    ("BartForConditionalGeneration", "bart", pairs(SOURCE, padded=False), "hybrid"),
    ("BartForSequenceClassification", "bart", per_row(), "ring"),
    ("BartForQuestionAnswering", "bart", spans(), "ulysses"),
    ("BartModel", "bart", embeddings(), "ring"),
    ("MBartForConditionalGeneration", "mbart", pairs(), "ring 4"),
    ("PegasusForConditionalGeneration", "pegasus", pairs(), "ring"),
    ("MarianMTModel", "marian", pairs(), "ulysses"),
    ("M2M100ForConditionalGeneration", "m2m_100", pairs(), "ring"),
    ("BlenderbotForConditionalGeneration", "blenderbot", pairs(), "ring"),
    ("BlenderbotSmallForConditionalGeneration", "blenderbot-small", pairs(), "ring"),
    ("PLBartForConditionalGeneration", "plbart", pairs(), "ring"),
    ("T5GemmaForConditionalGeneration", "t5gemma", pairs(), "ring"),
    ("T5GemmaForConditionalGeneration", "t5gemma", pads_by_id(), "ulysses"),  # its decoder's mask comes from the ids
    ("T5GemmaForConditionalGeneration", "t5gemma", of_ones(), "hybrid"),  # cross attention with a softcap
]  # fmt: skip


WINDOWED = {"t5gemma"}  # padding far from any token sees no key: what it holds is not defined
IN_SINGLE_PRECISION = {"m2m_100"}  # its sinusoids are made in fp32 when they are needed


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
    """Greedy tokens of both rows and the scores of each step, with a cache and, twice, with beams."""
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
    own_error = max(oracle.gradient_errors(single, want).values())  # one process in fp32 is no better than this
    tolerance = max(oracle.TOLERANCE[torch.float32], 1.5 * own_error)
    assert tolerance < 1e-4
    for losses, gradients, updates in workers(2).run(
        trained, class_name, model_type, engine.json_config(RING, stage, rows=2)
    ):
        oracle.assert_close_loss(losses[0], loss, 1e-6)
        oracle.assert_close_gradients(gradients, want, tolerance)
        assert oracle.total_error(updates, want) < 1e-4  # rounded with the weights that took them


def test_t5gemma_without_a_mask_is_refused(workers):
    def without_mask():
        import ds_cp

        model = maker("T5GemmaForConditionalGeneration", "t5gemma")(dtype=torch.float32)
        ds_cp.context_parallel(model, RING)
        model(**pairs(padded=False))

    workers(2).run_expecting_error(without_mask, "T5Gemma's encoder got no attention_mask")


def test_every_type_that_start_up_lets_through_is_compared_here():
    from ds_cp.patches.transformers import verified

    assert verified.ENCODER_DECODERS <= {model_type for _, model_type, *_ in CASES}
