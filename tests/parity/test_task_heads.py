"""Heads that are no causal LMs: classifiers, taggers, question answering, masked LM, and encoders by themselves."""

import pytest
import torch

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


def per_row(kind):
    return (
        {"labels": torch.tensor([1, 2]), "num_labels": 3}
        if kind == "class"
        else {"labels": torch.tensor([[0.3], [1.2]]), "num_labels": 1}
    )


def per_token(side="right"):
    labels = tokens(seed=3) % 3
    return {"labels": labels.masked_fill(padding(side) == 0, -100), "num_labels": 3}


def spans():
    return {"start_positions": torch.tensor([3, 20]), "end_positions": torch.tensor([17, 22]), "num_labels": 2}


def masked():
    return {
        "labels": tokens(seed=3).masked_fill(
            torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(4)) < 0.7, -100
        )
    }


def pretraining():
    return masked() | {"next_sentence_label": torch.tensor([0, 1])}


def nothing():
    return {"output_hidden_states": True}


def choices():
    return {"labels": torch.tensor([1])}


# class, model type, what it is asked, padding side, way
HEADS = [
    ("LlamaForSequenceClassification", "llama", per_row("class"), "right", "ring"),
    ("LlamaForSequenceClassification", "llama", per_row("reward"), "right", "hybrid"),
    ("LlamaForSequenceClassification", "llama", per_row("class"), "left", "ulysses"),
    ("Qwen2ForSequenceClassification", "qwen2", per_row("reward"), None, "contiguous"),
    ("Gemma2ForSequenceClassification", "gemma2", per_row("class"), "right", "ring 4"),
    ("GPT2ForSequenceClassification", "gpt2", per_row("class"), "right", "ring"),
    ("LlamaForTokenClassification", "llama", per_token(), "right", "ring 4"),
    ("Qwen3ForTokenClassification", "qwen3", per_token(), "right", "ulysses"),
    ("GPT2ForTokenClassification", "gpt2", per_token(), "right", "contiguous"),
    ("LlamaForQuestionAnswering", "llama", spans(), "right", "ring"),
    ("Qwen2ForQuestionAnswering", "qwen2", spans(), None, "hybrid"),
    ("LlamaModel", "llama", nothing(), "right", "ring"),
    ("Gemma3TextModel", "gemma3_text", nothing(), "left", "ring"),
    ("LlamaForCausalLM", "llama", nothing(), "right", "ring"),
    ("BertForMaskedLM", "bert", masked(), "right", "ring"),
    ("BertForSequenceClassification", "bert", per_row("class"), "right", "ring 4"),
    ("BertForTokenClassification", "bert", per_token(), "right", "ulysses"),
    ("BertForQuestionAnswering", "bert", spans(), "right", "contiguous"),
    ("BertForNextSentencePrediction", "bert", {"labels": torch.tensor([0, 1])}, "right", "ring"),
    ("BertForPreTraining", "bert", pretraining(), "right", "hybrid"),
    ("BertForMultipleChoice", "bert", choices(), "right", "ring"),
    ("BertModel", "bert", nothing(), "right", "ring 4"),
    ("RobertaForMaskedLM", "roberta", masked(), "right", "ring"),
    ("RobertaForSequenceClassification", "roberta", per_row("class"), "right", "ring 4"),
    ("RobertaModel", "roberta", nothing(), "right", "ulysses"),
    ("XLMRobertaForTokenClassification", "xlm-roberta", per_token(), "right", "ring"),
    ("CamembertForMaskedLM", "camembert", masked(), "right", "ring"),
    ("ElectraForMaskedLM", "electra", masked(), "right", "ring"),
    ("ElectraForSequenceClassification", "electra", per_row("class"), "right", "ring"),
    ("ModernBertForMaskedLM", "modernbert", masked(), "right", "ring"),
    ("ModernBertForSequenceClassification", "modernbert", per_row("class"), "right", "ring 4"),
    ("DistilBertForMaskedLM", "distilbert", masked(), "right", "ring"),
    ("ErnieForMaskedLM", "ernie", masked(), "right", "ring"),
    ("XLMRobertaXLForMaskedLM", "xlm-roberta-xl", masked(), "right", "ring"),
    ("AlbertForMaskedLM", "albert", masked(), "right", "ring"),
    ("EuroBertForMaskedLM", "eurobert", masked(), "right", "ring"),
    ("T5ForTokenClassification", "t5", per_token(), "right", "ring"),
    ("T5EncoderModel", "t5", nothing(), "right", "ulysses"),
    ("UMT5EncoderModel", "umt5", nothing(), "right", "ring 4"),
]  # fmt: skip


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
        inputs["input_ids"] = ids.masked_fill(mask == 0, 0)  # 0 pads: pooling by the last token looks for it
    seen = mask.bool() if side and mask.dim() == 2 else None
    return lambda **more: heads.build(class_name, model_type, **overrides, **more), WAYS[way], inputs, seen


@pytest.mark.parametrize("case", HEADS, ids=lambda case: f"{case[0]}-{case[3]}-{case[4]}")
def test_loss_outputs_and_gradients_equal_those_of_one_process(workers, case):
    make, config, inputs, seen = case_of(*case)
    heads.check(workers, make, config, inputs, seen=seen)


def test_every_type_that_start_up_lets_through_is_compared_here():
    from ds_cp.patches.transformers import verified

    assert verified.ENCODERS <= {model_type for _, model_type, *_ in HEADS}


# ---- what a call may ask for -------------------------------------------------------------------------------------


def embedded(inputs, width=64):
    generator = torch.Generator().manual_seed(9)
    embeds = torch.randn(ROWS, LENGTH, width, generator=generator, dtype=torch.float64)
    return {name: value for name, value in inputs.items() if name != "input_ids"} | {"inputs_embeds": embeds}


CALLS = [
    ("LlamaForCausalLM", "llama", {"labels": tokens(), "output_hidden_states": True}, "right", "ring"),
    ("LlamaForCausalLM", "llama", {"labels": tokens(), "output_hidden_states": True, "embedded": True}, None, "ulysses"),
    ("LlamaForCausalLM", "llama", {"logits_to_keep": 5}, None, "ring"),
    ("LlamaForCausalLM", "llama", {"logits_to_keep": torch.tensor([3, 30, 36])}, None, "contiguous"),
    ("LlamaForCausalLM", "llama", {"logits_to_keep": 5, "labels": tokens()[:, -5:]}, None, "ring"),
    ("LlamaForTokenClassification", "llama", per_token() | {"embedded": True}, "right", "ring"),
    ("Qwen2ForQuestionAnswering", "qwen2", spans() | {"embedded": True}, "right", "ring"),
    ("BertForMaskedLM", "bert", masked() | {"embedded": True, "output_hidden_states": True}, "right", "ring 4"),
    ("BertForSequenceClassification", "bert", per_row("class") | {"embedded": True}, "right", "ulysses"),
    ("RobertaForTokenClassification", "roberta", per_token() | {"embedded": True}, "right", "ring"),
    ("ModernBertForMaskedLM", "modernbert", masked() | {"embedded": True}, "right", "ring"),
    ("BertForMaskedLM", "bert", masked() | {"token_type_ids": tokens() % 2}, "right", "ring"),
    ("T5EncoderModel", "t5", {"embedded": True}, "right", "ring"),
]  # fmt: skip


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
