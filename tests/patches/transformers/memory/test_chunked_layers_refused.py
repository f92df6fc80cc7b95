"""Chunked layers: models and uses that are refused, and how the layers are restored."""

import pytest
import torch

from harness import batches, subject
from harness.batches import BatchSpec
from harness.cases import config_of
from harness.models import ModelSpec

RING = config_of("ring", 2) | {"offload_kv": 16}
BATCH = BatchSpec("packed", 3, 53)

REFUSED = {
    "a family that counts tokens by itself": (ModelSpec("bloom", kv_heads=8), {}, "counts tokens by itself"),
    "attention and recurrence in one layer": (ModelSpec("falcon_h1"), {}, "no layer of it only attends"),
    "dropout between layers": (
        ModelSpec("gpt2", kv_heads=8, overrides=(("resid_pdrop", 0.5),)),
        {},
        "draws random numbers",
    ),
    "what routers say": (ModelSpec("gpt_oss"), {"output_router_logits": True}, "router_logits"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_models_that_cannot_be_chunked_are_refused(workers, why):
    spec, asked, words = REFUSED[why]

    def forward():
        model = subject.changed_model(spec, RING).train()
        model(**batches.make(BATCH).inputs, **asked).loss.backward()

    workers(2).run_expecting_error(forward, words)


def test_a_hook_on_a_parameter_is_refused(workers):
    def forward():
        model = subject.changed_model(ModelSpec("llama"), RING).train()
        model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient)
        model(**batches.make(BATCH).inputs).loss.backward()

    workers(2).run_expecting_error(forward, "would see the gradient of each chunk")


def test_weights_that_change_before_the_backward_pass_are_refused(workers):
    def step():
        model = subject.changed_model(ModelSpec("llama"), RING).train()
        loss = model(**batches.make(BATCH).inputs).loss
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.add_(1)
        loss.backward()

    workers(2).run_expecting_error(step, "was changed in place")


def test_restore_unbinds_every_layer(workers):
    def detached():
        from ds_cp import patches

        model = subject.changed_model(ModelSpec("llama"), RING).train()
        patches.restore()
        assert not any({"forward", "_z3_leaf"} & {*vars(layer)} for layer in model.model.layers)

    workers(2).run(detached)
