"""Hooks, gradient penalties and autocast around modules that ds_cp runs in chunks."""

import pytest
import torch

from harness import batches, models, oracle, subject
from harness.batches import BatchSpec
from harness.cases import config_of
from harness.models import ModelSpec

SPEC, BATCH = ModelSpec("llama"), BatchSpec("dense", 2, 37)


def halved(module, args):
    return (args[0] * 0.5, *args[1:])


HOOKS = {
    "output": lambda model: model.lm_head.register_forward_hook(lambda module, args, out: out / 4),
    "bias": lambda model: model.lm_head.register_forward_hook(
        lambda module, args, out: out + torch.arange(out.size(-1))
    ),
    "input": lambda model: model.lm_head.register_forward_pre_hook(halved),
    "gradient": lambda model: model.lm_head.register_full_backward_hook(lambda module, found, given: (found[0] * 2,)),
    "parameters": lambda model: [p.register_hook(lambda g: g * 2) for p in model.parameters()],
}


def hooked(config, hook, training=True):
    model = subject.changed_model(SPEC, config, torch.float64) if config else models.build(SPEC, torch.float64, "eager")
    HOOKS[hook](model.train(training))
    with models.TransformersInDouble():
        loss = model(**batches.make(BATCH).inputs).loss
        loss.backward()
    return loss.item(), oracle.gradients_of(model)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_the_users_own_acts_once(workers, hook, training):
    config = config_of("ring", 2) | {"tiled_mlp": True}
    results = workers(2).run(hooked, config, hook, training)
    loss, gradients = hooked(None, hook, training)
    subject.check(results, oracle.Truth(loss, gradients, []), torch.float64)


def penalised(config):
    model = subject.changed_model(SPEC, config).train()
    loss = model(**batches.make(BATCH).inputs).loss
    torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)


def test_double_backward_is_refused(workers):
    workers(2).run_expecting_error(penalised, "tiled_loss", config_of("ulysses", 2))


def in_low_precision(config):
    model = subject.changed_model(SPEC, config) if config else models.build(SPEC, attention="sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.train()(**batches.make(BATCH).inputs).loss
    loss.backward()
    return loss.item(), oracle.gradients_of(model)


@pytest.mark.parametrize("method", ["ring", "ulysses", "allgather"])
def test_autocast_is_as_exact_as_in_one_process(workers, method):
    want, own = (
        oracle.truth(SPEC, BATCH),
        oracle.total_error(in_low_precision(None)[1], oracle.truth(SPEC, BATCH).gradients),
    )
    results = workers(2).run(in_low_precision, config_of(method, 2))
    mean = oracle.mean_over_ranks([gradients for _, gradients in results])
    assert oracle.total_error(mean, want.gradients) <= 1.5 * own
