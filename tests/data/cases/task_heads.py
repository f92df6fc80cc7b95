"""Classes of models with a task head, and what each is called with."""

import torch

from harness.heads import LENGTH, ROWS, padding, tokens


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


# (class, model type, arguments, padding side, method)
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
