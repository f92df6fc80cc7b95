"""Features of the DeepSpeed engine other than ZeRO stages: exact steps, and batch sizes that count each group once."""

import json

import pytest
import torch

from harness import batches, engine, models, subject
from harness.batches import BatchSpec
from harness.cases import config_of
from harness.models import ModelSpec
from harness.oracle import truth
from harness.training import ROWS, RowDataset, pad_right

LLAMA = ModelSpec("llama")
GROUPS = [
    [BatchSpec("packed", 1, 53), BatchSpec("dense", 1, 37)],
    [BatchSpec("right_pad", 1, 40), BatchSpec("dense", 1, 53)],
]


def check(results, groups=GROUPS):
    losses = [[truth(LLAMA, batch).loss for batch in group] for group in groups]
    engine.check(results, truth(LLAMA, *(batch for group in groups for batch in group)), losses)


FEATURES = {
    # name: (stage, method, additions to the config)
    "hpZ": (3, "ring", {"zero_optimization": {"zero_hpz_partition_size": 2}}),
    "flops and clocks": (2, "ulysses", {
        "flops_profiler": {"enabled": True, "profile_step": 1, "detailed": False}, "wall_clock_breakdown": True}),
    "buckets and overlap": (2, "ring", {
        "zero_optimization": {"overlap_comm": True, "contiguous_gradients": False, "allgather_partitions": False}}),
    "prescaled": (1, "ring", {"prescale_gradients": True, "gradient_predivide_factor": 4.0}),
    "reduced in fp32": (3, "ulysses", {"communication_data_type": "fp32"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_the_step_is_exact_with(workers, name):
    stage, method, more = FEATURES[name]
    config = engine.json_config(config_of(method, 2), stage, 1, 2, 2, **more)
    check(workers(4).run(engine.train_one_step, LLAMA, config, GROUPS))


def recomputed_by_deepspeed(config):
    """One step with layers that are checkpointed by DeepSpeed's function."""
    import deepspeed

    model = models.build(LLAMA)
    subject.enable_checkpointing(model, "reentrant")
    made = engine.initialize(config, model)
    deepspeed.checkpointing.configure(None, deepspeed_config=config)
    for layer in made.module.model.layers:
        layer._gradient_checkpointing_func = lambda function, *args, **kwargs: deepspeed.checkpointing.checkpoint(
            lambda *tensors: function(*tensors, **kwargs), *args
        )
    return engine.step(made, [batches.make(spec).inputs for spec in GROUPS[0]])


def test_layers_that_deepspeed_recomputes_are_exact(workers):
    config = engine.json_config(config_of("ring", 2), 1, 1, 2) | {"activation_checkpointing": {"profile": True}}
    check(workers(2).run(recomputed_by_deepspeed, config), GROUPS[:1])


def without_sync(config, coalesced):
    """Two micro-batches whose gradients are reduced after the last one."""
    made = engine.initialize(config, models.build(LLAMA))
    before = engine.full_weights(made.module)
    inputs = [batches.make(spec).inputs for spec in GROUPS[1]]
    if coalesced:
        with made.coalesce_grad_reduction():
            for each in inputs:
                made.backward(made(**each).loss)
    else:
        with made.no_sync():
            made.backward(made(**inputs[0]).loss)
        made.backward(made(**inputs[1]).loss)
    made.step()
    after = engine.full_weights(made.module)
    return {name: (before[name] - after[name]) / engine.LEARNING_RATE for name in before}


@pytest.mark.parametrize("stage, coalesced", [(0, False), (2, True)])
def test_gradients_reduced_after_the_last_micro_batch_equal_a_run_without_the_key(workers, stage, coalesced):
    def run(world, key):
        return workers(world).run(without_sync, engine.json_config(key, stage), coalesced)

    want = run(1, None)[0]
    for got in run(2, config_of("ring", 2)):
        for name, update in want.items():
            assert (got[name] - update).norm() <= 1e-5 * update.norm().clamp(min=1e-6), name


def test_batch_sizes_of_an_engine_count_each_group_once(workers):
    def sizes():
        made = engine.initialize(engine.json_config(config_of("ring", 2), 1, 1, 2, 2), models.build(LLAMA))
        timer = made.tput_timer.batch_size
        made.set_train_batch_size(12)
        accumulation = made.gradient_accumulation_steps()
        made.set_train_micro_batch_size(3)
        return timer, accumulation, made.train_batch_size(), made.dp_world_size

    assert workers(4).run(sizes) == [(4, 6, 36, 4)] * 4


def test_a_wrong_batch_size_is_explained_by_groups(workers):
    wrong = engine.json_config(config_of("ring", 2), 1) | {"train_batch_size": 8}
    workers(4).run_expecting_error(
        engine.initialize,
        "8 != 1 .* 2 where world_size counts groups: 4 ranks / .*size.* 2 = 2",
        wrong,
        torch.nn.Linear(1, 1),
    )


def test_deepspeeds_own_loader_samples_by_group(workers):
    def samples():
        import deepspeed

        engine.activate()
        made, _, loader, _ = deepspeed.initialize(
            model=models.build(LLAMA),
            config=engine.json_config({"size": 2}, 1, dp=2),
            training_data=RowDataset(),
            collate_fn=pad_right,
        )
        return [batch["input_ids"].tolist() for batch in loader]

    first, second, third, fourth = workers(4).run(samples)
    assert first == second and third == fourth
    assert len(first) == ROWS // 2
    assert len({json.dumps(batch) for batch in first + third}) == ROWS
