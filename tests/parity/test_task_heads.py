"""Models with other task heads: classification, tagging, question answering, masked LM; and bare encoders."""

import pytest
import torch

from data.cases.task_heads import CALLS, HEADS
from harness import heads
from harness.heads import LENGTH, ROWS, padding, tokens

RING = {"size": 2, "method": "ring"}
WAYS = {
    "ring": RING,
    "ulysses": RING | {"method": "ulysses"},
    "contiguous": RING | {"layout": "contiguous"},
    "hybrid": RING | {"size": 4, "method": "hybrid", "ulysses_size": 2},
    "ring 4": RING | {"size": 4},
}


def case_of(class_name, model_type, asked, side, way):
    asked = dict(asked)
    overrides = {"num_labels": asked.pop("num_labels")} if "num_labels" in asked else {}
    if "Causal" not in class_name and "labels" in asked and overrides.get("num_labels") == 1:
        overrides["problem_type"] = "regression"
    if "Multiple" in class_name:
        ids, mask = tokens(2).unsqueeze(0), padding(side).unsqueeze(0)
    else:
        ids, mask = tokens(), padding(side) if side else None
    inputs = {"input_ids": ids, **asked}
    if mask is not None:
        inputs["attention_mask"] = mask
        inputs["input_ids"] = ids.masked_fill(
            mask == 0, 0
        )  # 0 is the padding id, which pooling of the last token looks for
    seen = mask.bool() if side and mask.dim() == 2 else None
    return lambda **more: heads.build(class_name, model_type, **overrides, **more), WAYS[way], inputs, seen


@pytest.mark.parametrize("case", HEADS, ids=lambda case: f"{case[0]}-{case[3]}-{case[4]}")
def test_loss_outputs_and_gradients_equal_those_of_one_process(workers, case):
    make, config, inputs, seen = case_of(*case)
    heads.check(workers, make, config, inputs, seen=seen)


def test_every_accepted_type_is_compared_here():
    from ds_cp.patches.transformers import verified

    assert verified.ENCODERS <= {model_type for _, model_type, *_ in HEADS}


# ---- further arguments of a call ---------------------------------------------------------------------------------


def embedded(inputs, width=64):
    generator = torch.Generator().manual_seed(9)
    embeds = torch.randn(ROWS, LENGTH, width, generator=generator, dtype=torch.float64)
    return {name: value for name, value in inputs.items() if name != "input_ids"} | {"inputs_embeds": embeds}


@pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case[0]}-{'-'.join(case[2])}")
def test_calls_with_more_arguments_equal_those_of_one_process(workers, case):
    class_name, model_type, asked, side, way = case
    asked = dict(asked)
    with_embeds = asked.pop("embedded", False)
    make, config, inputs, seen = case_of(class_name, model_type, asked, side, way)
    heads.check(workers, make, config, embedded(inputs) if with_embeds else inputs, seen=seen)


def asks_by_config():
    import ds_cp

    model = heads.build("BertForMaskedLM", "bert")
    model.config.output_attentions = True
    ds_cp.context_parallel(model, RING)


def asks_by_call():
    import ds_cp

    ds_cp.context_parallel(heads.build("BertForMaskedLM", "bert"), RING)(input_ids=tokens(), output_attentions=True)


@pytest.mark.parametrize("asks", [asks_by_config, asks_by_call])
def test_output_attentions_is_refused(workers, asks):
    workers(2).run_expecting_error(asks, "output_attentions .* the S x S matrix that no rank holds")
