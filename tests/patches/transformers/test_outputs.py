"""Outputs of a model have the fields and types of those of one process, as a dict and as a tuple."""

import contextlib
import copy
import io
import itertools

import pytest
import torch

from ds_cp.cli import compare
from ds_cp.cli.sizes import VOCAB
from harness import families

STANDS_FOR = {"LocalLogits": "Tensor", "NoCache": "DynamicCache", "EncoderDecoderCache": "DynamicCache"}
ASKED = {
    "return_dict": (True, False),
    "use_cache": (None, True),
    "labels": (True, False),
    "trains": (True, False),
    "output_hidden_states": (None, True),
}


def kinds(output):
    """(key or index, type) of each returned value."""
    items = output.items() if hasattr(output, "items") else enumerate(output)
    return [(key, STANDS_FOR.get(type(value).__name__, type(value).__name__)) for key, value in items]


def attached(model_type):
    import ds_cp

    model = families.build(model_type)
    model.config.use_cache = True
    dense, _ = compare.causal_lm_batches(model, VOCAB)
    shared = copy.deepcopy(model)
    with contextlib.redirect_stdout(io.StringIO()):
        ds_cp.context_parallel(shared, {"size": 2, "method": "ring"})
    return model, shared, dense.inputs


def differences(model_type):
    model, shared, inputs = attached(model_type)
    found = []
    for values in itertools.product(*ASKED.values()):
        asked = dict(zip(ASKED, values))
        given = inputs | {name: value for name, value in asked.items() if name not in ("labels", "trains")}
        if not asked["labels"]:
            given = {name: value for name, value in given.items() if name != "labels"}
        with torch.set_grad_enabled(asked["trains"]):
            one, two = (kinds(each.train(asked["trains"])(**given)) for each in (model, shared))
        if one != two:
            found.append((asked, one, two))
    return found


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "bart"])
def test_outputs_have_the_fields_and_types_of_one_process(workers, model_type):
    assert workers(2).run(differences, model_type) == [[], []]


def test_outputs_of_a_bare_decoder_have_the_fields_and_types_of_one_process(workers):
    def of_decoder():
        model, shared, inputs = attached("llama")
        ids = inputs["input_ids"]
        asked = itertools.product((True, False), (None, True))
        return [
            (kinds(model.model(ids, return_dict=d, output_hidden_states=h)), kinds(shared.model(ids, return_dict=d, output_hidden_states=h)))
            for d, h in asked
        ]  # fmt: skip

    for one, two in workers(2).run(of_decoder)[0]:
        assert one == two


def test_using_the_cache_of_a_shared_forward_raises_with_the_reason(workers):
    def used(decode):
        _, shared, inputs = attached("llama")
        with torch.no_grad():
            cache = shared.eval()(inputs["input_ids"]).cache
            assert cache is not None and not hasattr(cache, "dtype") and copy.deepcopy(cache) is not None
            decode(shared, cache)

    message = "a forward with labels, with gradients or without use_cache=True was shared, and no rank holds the keys"
    decoding = [
        lambda model, cache: model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache),
        lambda model, cache: len(cache),
        lambda model, cache: cache[0],
    ]
    for decode in decoding:
        workers(2).run_expecting_error(used, message, decode)
