"""Indices that are out of range for an embedding table. All ranks of a group raise, not only the rank that holds the token."""

import re
import time

import pytest
import torch

from ds_cp.cli.shrink import tiny_config
from ds_cp.cli.sizes import VOCAB
from harness import families

LENGTH = 24
FIRST = (0, 1)  # a token of rank 0 and one of rank 1, under zigzag over two ranks
MIDDLE = (0, 12)


def call(model_type, change, overrides, **more):
    """A forward with labels on a batch in which one index is wrong."""
    import ds_cp

    model = families.build(model_type, tiny_config(model_type, **overrides))
    key = {"size": 2, "method": "ring", "unverified": "allow", "timeout": 5}
    ds_cp.context_parallel(model, key | more)
    ids = torch.randint(5, VOCAB - 10, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    change(inputs)
    return model(**inputs).loss.item()


def with_number(name, place, number, like=0):
    """Set one element of the argument `name`; a missing argument is created with the value `like`."""

    def change(inputs):
        if name not in inputs:
            inputs[name] = torch.full((1, LENGTH), like)
        inputs[name][place] = number

    return change


def with_positions(last):
    def change(inputs):
        inputs["position_ids"] = torch.arange(last + 1 - LENGTH, last + 1)[None]

    return change


def nothing(inputs):
    pass


CASES = [
    ("llama", with_number("input_ids", FIRST, VOCAB), {}, "input_ids holds 128, but the vocabulary goes from 0 to 127"),
    ("llama", with_number("input_ids", MIDDLE, -1), {}, "input_ids holds -1, but the vocabulary"),
    ("llama", with_number("labels", FIRST, VOCAB), {}, "labels holds 128, but the vocabulary goes from 0 to 127"),
    ("llama", with_number("labels", MIDDLE, -1), {}, "labels holds -1, but the vocabulary"),
    ("llama", with_number("shift_labels", MIDDLE, 999), {}, "labels holds 999"),
    ("gpt2", with_positions(LENGTH), {"n_positions": LENGTH}, "position_ids holds 24, but wpe goes from 0 to 23"),
    ("gpt2", nothing, {"n_positions": LENGTH - 1}, "the count of its positions holds 23, but wpe goes from 0 to 22"),
    ("gpt2", with_number("token_type_ids", MIDDLE, VOCAB), {}, "token_type_ids holds 128, but the vocabulary"),
    ("openai-gpt", nothing, {"n_positions": LENGTH - 1}, "but positions_embed goes from 0 to 22"),
    ("opt", nothing, {"max_position_embeddings": LENGTH - 1}, "positions holds 23, but embed_positions goes from -2 to 22"),
    ("bart", nothing, {"max_position_embeddings": LENGTH - 1}, "positions holds 23, but embed_positions goes from -2 to 22"),
    ("roberta", nothing, {"max_position_embeddings": LENGTH}, "positions holds 24, but embeddings.position_embeddings goes"),
    ("bert", with_number("token_type_ids", MIDDLE, 2), {"type_vocab_size": 2}, "token_type_embeddings goes from 0 to 1"),
    ("gptj", with_positions(300), {}, "position_ids holds 300, but rotary_emb.embed_positions goes from -256 to 255"),
    ("ctrl", with_positions(300), {}, "position_ids holds 300, but pos_encoding goes"),
    ("gemma4_text", with_number("input_ids", MIDDLE, 100), {"vocab_size_per_layer_input": 90}, "embed_tokens_per_layer"),
    ("xlm", with_number("langs", MIDDLE, 3), {"n_langs": 3}, "langs holds 3, but lang_embeddings goes from 0 to 2"),
]  # fmt: skip


@pytest.mark.parametrize("model_type, change, overrides, message", CASES, ids=[f"{c[0]}: {c[3]}" for c in CASES])
def test_an_index_out_of_range_raises_on_all_ranks(workers, model_type, change, overrides, message):
    def timed():
        start = time.monotonic()
        try:
            call(model_type, change, overrides)
        finally:
            assert time.monotonic() - start < 5

    workers(2).run_expecting_error(timed, re.escape(message))


HARMLESS = [
    ("llama", with_number("labels", (0, 0), 999), {}),  # the first token is not predicted
    ("llama", with_number("labels", MIDDLE, -100), {}),
    ("gpt2", nothing, {"n_positions": LENGTH}),
    ("roberta", nothing, {"max_position_embeddings": LENGTH + 1}),
    ("opt", nothing, {"max_position_embeddings": LENGTH}),
]


@pytest.mark.parametrize("model_type, change, overrides", HARMLESS)
def test_indices_that_one_process_accepts_are_accepted(workers, model_type, change, overrides):
    assert torch.isfinite(torch.tensor(workers(2).run(call, model_type, change, overrides))).all()


def test_token_types_of_one_row_apply_to_every_row(workers):
    """gpt2 reshapes token types to rows of the length that it runs on, so a row of 24 would become two rows of 12."""

    def losses():
        import ds_cp

        model = ds_cp.context_parallel(families.build("gpt2", tiny_config("gpt2")), {"size": 2, "method": "ring"})
        ids = torch.randint(5, VOCAB - 10, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        types = torch.arange(LENGTH)[None]
        return [
            model(input_ids=ids, labels=ids, token_type_ids=each).loss.item() for each in (types, types.expand(2, -1))
        ]

    for once, for_each in workers(2).run(losses):
        assert once == for_each
