"""The memory estimate of ``ds_cp plan``, compared with a real step and with the numbers of the ZeRO paper."""

import pytest
import torch

from ds_cp.cli import memory, meta_model
from ds_cp.config import read
from ds_cp.planner import ModelFacts, resolve
from harness import models
from harness.cases import config_of
from harness.memory import per_token
from harness.models import ModelSpec

LLAMA = ModelSpec("llama", layers=3)
GIB = 2**30

PAPER = [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)]  # GB for 7.5e9 parameters on 64 ranks, figure 1 of the ZeRO paper


@pytest.mark.parametrize("stage, gigabytes", PAPER)
def test_model_states_are_those_of_the_zero_paper(stage, gigabytes):
    device, host = memory.model_states(7_500_000_000, {"stage": stage}, 64, 2)
    assert device / 1e9 == pytest.approx(gigabytes, rel=3e-3) and host == 0


def test_what_is_offloaded_moves_to_the_host():
    numbers, cpu = 1000, {"device": "cpu"}
    for stage, away in [(1, 12 / 4), (2, 14 / 4), (3, 14 / 4)]:
        device, host = memory.model_states(numbers, {"stage": stage, "offload_optimizer": cpu}, 4, 2)
        assert host == numbers * away
        assert device + host == memory.model_states(numbers, {"stage": stage}, 4, 2)[0]
    everything = {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    assert memory.model_states(numbers, everything, 4, 2) == (0, numbers * 4)


def job_of(config, checkpointing, ranks):
    shape = models.build(LLAMA).config
    plan = resolve(
        read(config), ModelFacts("M", ((shape.num_attention_heads, shape.num_key_value_heads),)), ranks, "cpu"
    )
    return memory.Job(shape, plan, {"stage": 0}, ranks, torch.float32, checkpointing=checkpointing)


@pytest.mark.parametrize(
    "method, checkpointing, more",
    [
        ("ring", True, {}),
        ("ring", False, {"tiled_mlp": True}),
        ("ulysses", True, {"recompute_attention": True}),
        ("ulysses", False, {}),
    ],
    ids=str,
)
def test_layers_hold_the_memory_that_the_plan_predicts(workers, method, checkpointing, more):
    config = config_of(method, 2) | more
    kind = "non-reentrant" if checkpointing else None
    real = workers(2).run(per_token, LLAMA, config, kind, (512, 1024))[0]
    few, many = (memory.estimate(job_of(config, checkpointing, 2), 2 * tokens) for tokens in (4096, 8192))
    assert (many.saved + many.largest_layer - few.saved - few.largest_layer) / 4096 == pytest.approx(real, rel=0.1)


def test_the_longest_sequence_fits_and_a_longer_one_does_not():
    job = job_of({"size": 8, "method": "ring"}, True, 8)
    found = memory.longest(job, GIB, 4096)
    assert memory.estimate(job, found).total <= GIB < memory.estimate(job, int(found * 1.05)).total
    assert memory.longest(job, 1 << 20, 4096) == 0


def test_each_kind_of_layer_is_counted_as_often_as_it_occurs():
    """DeepSeek's first layers are dense, the others have experts."""
    from transformers import DeepseekV3Config

    model = meta_model.MetaModel(DeepseekV3Config(num_hidden_layers=5, first_k_dense_replace=3), torch.bfloat16)
    assert model.layer_kinds == [(0, 3), (3, 2)]


def test_the_estimate_leaves_nothing_registered_in_transformers():
    from transformers.modeling_utils import AttentionInterface

    memory.estimate(job_of({"size": 2, "method": "ring"}, True, 2), 4096)
    assert meta_model.ATTENTION_NAME not in AttentionInterface._global_mapping
