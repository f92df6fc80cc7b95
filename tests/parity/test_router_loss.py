"""The load-balancing loss of experts is computed over the tokens of the whole context-parallel group."""

import copy

import pytest
import torch

from ds_cp.cli.sizes import VOCAB
from harness import oracle, subject
from harness.families import build
from harness.pairwise import covering

LENGTH = 37
TYPES = ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "phimoe", "ernie4_5_moe"]
OTHER_TYPES = ["qwen2_moe", "flex_olmo", "granitemoeshared", "minimax_m2", "mellum", "laguna"]
WAYS = [("ring", 2), ("ulysses", 2)]


def batch(kind):
    generator = torch.Generator().manual_seed(1)
    rows = 1 if kind == "packed" else 2
    ids = torch.randint(5, VOCAB - 10, (rows, LENGTH), generator=generator)
    inputs = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}  # with a cache, transformers ignores packing
    if kind == "padded":
        inputs["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [22]])).long()
        inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    if kind == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in (9, 1, 14, 13)])[None]
        inputs["labels"] = inputs["labels"].masked_fill(inputs["position_ids"] == 0, -100)
    return inputs


def run(model, inputs, asked_by, checkpointing=None):
    """Loss, auxiliary loss and gradients."""
    subject.enable_checkpointing(model, checkpointing)
    if asked_by == "config":
        model.config.output_router_logits = True
    else:
        inputs = inputs | {"output_router_logits": True}
    out = model(**inputs)
    out.loss.backward()
    logits = [each.detach() for each in out.router_logits if each is not None]
    return out.loss.item(), float(out.aux_loss), oracle.gradients_of(model), logits


def fp64(type_):
    model = build(type_)
    model.config.router_aux_loss_coef = 0.5  # large, so that it matters in the gradient
    if hasattr(model, "router_aux_loss_coef"):
        model.router_aux_loss_coef = 0.5
    return model.double()


def shared(type_, config, *args):
    import ds_cp

    model = fp64(type_)
    ds_cp.context_parallel(model, config | {"unverified": "allow"})
    return run(model, *args)


def check(workers, type_, way, *args):
    method, size = way
    loss, aux, gradients, logits = run(fp64(type_), *copy.deepcopy(args))
    assert aux > 0
    ranks = workers(size).run(shared, type_, {"size": size, "method": method}, *args)
    for got_loss, got_aux, _, got_logits in ranks:
        oracle.assert_close_loss(got_loss, loss, 1e-6)
        oracle.assert_close_loss(got_aux, aux, 1e-6)
        for got, want in zip(got_logits, logits, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    oracle.assert_close_gradients(oracle.mean_over_ranks([rank[2] for rank in ranks]), gradients, 1e-5)


FACTORS = {"type": TYPES, "way": WAYS, "kind": ["dense", "padded", "packed"], "asked_by": ["config", "call"]}
# gpt_oss does not pass positions to its masks, so packed documents see each other in one process
CONSTRAINTS = [(("type", "kind"), lambda type, kind: type != "gpt_oss" or kind != "packed")]


@pytest.mark.parametrize("case", covering(FACTORS, CONSTRAINTS), ids=lambda case: "-".join(map(str, case.values())))
def test_loss_and_gradients_equal_those_of_one_process(workers, case):
    check(workers, case["type"], case["way"], batch(case["kind"]), case["asked_by"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", FACTORS["kind"])
@pytest.mark.parametrize("type_", OTHER_TYPES)
def test_other_types(workers, type_, kind):
    check(workers, type_, ("ring", 2), batch(kind), "call")


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_gradient_checkpointing_changes_nothing(workers, checkpointing):
    check(workers, "mixtral", ("ring", 2), batch("padded"), "config", checkpointing)


def test_four_ranks(workers):
    check(workers, "qwen3_moe", ("ring", 4), batch("padded"), "call")
