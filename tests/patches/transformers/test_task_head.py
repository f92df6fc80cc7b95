"""Task heads: whole logits in evaluation, local ones in training, copies of a model, custom heads."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from harness import batches, models, oracle, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec

LLAMA = ModelSpec("llama")
RING = {"size": 2, "method": "ring"}
DENSE = BatchSpec("dense", 1, 37)


def close(got, want):
    return (got - want).norm() <= 2e-6 * want.norm()


def test_logits_are_whole_in_evaluation_and_on_demand_in_training(workers):
    def all_ways():
        model = subject.changed_model(LLAMA, RING)
        inputs = batches.make(DENSE).inputs
        trained = model.train()(**inputs).logits
        with_graph = model.eval()(**inputs).logits
        with torch.no_grad():
            as_tuple = model(**inputs, return_dict=False)[1]
        return [x.detach() for x in (trained.whole(), with_graph, as_tuple)], trained.local.shape

    with torch.no_grad():
        want = models.build(LLAMA)(**batches.make(DENSE).inputs).logits
    for found, local in workers(2).run(all_ways):
        assert local[1] < want.shape[1]
        assert all(close(logits, want) for logits in found)


@pytest.mark.parametrize("type_", ["bloom", "mpt", "falcon", "llama4_text"])
def test_a_copy_of_an_attached_model_runs_on_its_own_weights(workers, type_):
    spec = ModelSpec(type_, 8, 8)

    def copied():
        model = subject.changed_model(spec, RING).eval()
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(0.7)
            inputs = subject.inputs_without_labels(batches.make(DENSE))
            return twin(**inputs).logits, model(**inputs, use_cache=True).logits

    model = models.build(spec, attention="sdpa" if type_ == "falcon" else "eager").eval()
    inputs = subject.inputs_without_labels(batches.make(DENSE))
    with torch.no_grad():
        whole = model(**inputs).logits
        for parameter in model.parameters():
            parameter.mul_(0.7)
        scaled = model(**inputs).logits
    for of_copy, with_cache in workers(2).run(copied):
        assert close(of_copy, scaled), "the copy ran on other weights"
        assert close(with_cache, whole), "a call with a cache, which is not shared, lost its mask"


class WithPenalty(LlamaForCausalLM):
    """A custom head whose loss also uses the logits."""

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return {"loss": loss + 0.1 * logits.logsumexp(-1).square().mean()}


def penalised(shared):
    model = models.build(LLAMA)
    model.__class__ = WithPenalty
    if shared:
        import ds_cp

        ds_cp.context_parallel(model, RING)
    inputs = batches.make(DENSE).inputs
    loss = model(**inputs)["loss"]
    loss.backward()
    return loss.item(), oracle.gradients_of(model)


def test_a_custom_head_gets_whole_hidden_states(workers):
    loss, gradients = workers(1).run(penalised, False)[0]
    ranks = workers(2).run(penalised, True)
    for got, _ in ranks:
        oracle.assert_close_loss(got, loss, 1e-6)
    oracle.assert_close_gradients(oracle.mean_over_ranks([g for _, g in ranks]), gradients, 1e-5)
