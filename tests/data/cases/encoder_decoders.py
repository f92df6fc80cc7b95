"""Encoder-decoder models, and batches of a source and a target."""

import torch

from harness import heads

SOURCE = 37


def source(padded=True):
    mask = heads.padding("right", length=SOURCE)
    ids = heads.tokens(length=SOURCE)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask} if padded else {"input_ids": ids}


def pairs(target=23, padded=True):
    """A batch of a source and a target. The labels ignore the end of the second target."""
    labels = heads.tokens(length=target, seed=5)
    if padded:
        labels[1, target - 6 :] = -100
    return source(padded) | {"labels": labels}


def pads_by_id():
    given = of_ones()
    given["labels"][0, 7] = 0  # becomes padding of the decoder
    return given


def of_ones():
    return pairs(padded=False) | {"attention_mask": torch.ones(2, SOURCE, dtype=torch.long)}


def per_row():
    ids = source()["input_ids"]
    ids[0, -1] = ids[1, 23] = 2  # bart pools the last end-of-sentence token
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


# (class, model type, batch, method)
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
    ("T5GemmaForConditionalGeneration", "t5gemma", pads_by_id(), "ulysses"),  # the mask of its decoder is computed from the ids
    ("T5GemmaForConditionalGeneration", "t5gemma", of_ones(), "hybrid"),  # cross attention with a softcap
]  # fmt: skip
