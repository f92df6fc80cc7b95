"""DeepSpeed engines: losses, gradients and updated weights equal those of one process under every ZeRO stage."""

import statistics

import pytest
import torch

from harness import batches, engine, models, oracle, subject
from harness.batches import BatchSpec
from harness.cases import config_of, name_of
from harness.models import ModelSpec
from harness.oracle import truth
from harness.pairwise import covering

FACTORS = {
    "stage": [0, 1, 2, 3],
    "way": [("ring", 2), ("ulysses", 2), ("allgather", 2),
            ("ring", 4), ("ulysses", 4), ("hybrid", 4), ("allgather", 4)],
    "kind": ["dense", "packed", "right_pad", "left_pad"],
    "accumulation": [1, 3],
    "dp": [1, 2],
    "type": ["llama", "gpt2", "qwen3"],  # gpt2 has tied embeddings
    "rows": [1, 3],
    "reduce_scatter": [True, False],
    "checkpointing": [None, "reentrant", "non-reentrant"],
}  # fmt: skip
CONSTRAINTS = [(("way", "dp"), lambda way, dp: way[1] * dp <= 4)]  # at most four ranks, for a machine with two cores

LENGTHS = [53, 37, 40]  # of the micro-batches
LABELS = ["all", "first_eighth", "middle"]


def batches_of_groups(kind, rows, dp, accumulation):
    """The micro-batches of each data-parallel group, with different lengths and different numbers of valid tokens."""
    return [
        [
            BatchSpec(kind, rows, LENGTHS[(i + g) % 3], LABELS[(i + 2 * g) % 3], seed=10 * g + i)
            for i in range(accumulation)
        ]
        for g in range(dp)
    ]


def check(results, model, groups):
    """Compare with the mean over groups and micro-batches of the loss of each batch."""
    losses = [[truth(model, batch).loss for batch in group] for group in groups]
    engine.check(results, truth(model, *(batch for group in groups for batch in group)), losses)


@pytest.mark.parametrize("case", covering(FACTORS, CONSTRAINTS), ids=name_of)
def test_losses_gradients_and_updated_weights_equal_those_of_one_process(workers, case):
    (method, size), dp = case["way"], case["dp"]
    model = ModelSpec(case["type"])
    groups = batches_of_groups(case["kind"], case["rows"], dp, case["accumulation"])
    config = engine.json_config(
        config_of(method, size),
        case["stage"],
        case["rows"],
        case["accumulation"],
        dp,
        zero_optimization={"reduce_scatter": case["reduce_scatter"]},
    )
    results = workers(size * dp).run(engine.train_one_step, model, config, groups, case["checkpointing"])
    check(results, model, groups)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cpu_offload_of_the_optimizer_takes_the_same_step(workers, stage):
    model, groups = ModelSpec("llama"), batches_of_groups("packed", 1, 1, 3)
    config = engine.json_config(
        config_of("ring", 2), stage, 1, 3, zero_optimization=OFFLOAD, zero_force_ds_cpu_optimizer=False
    )
    check(workers(2).run(engine.train_one_step, model, config, groups), model, groups)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cpu_offload_with_adam_reduces_the_same_gradients(workers, stage):
    model, groups = ModelSpec("llama"), batches_of_groups("dense", 3, 2, 1)
    adam = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0, "torch_adam": True}}
    config = engine.json_config(
        config_of("ulysses", 2), stage, 3, 1, 2,
        optimizer=adam, zero_optimization=OFFLOAD, zero_force_ds_cpu_optimizer=False,
    )  # fmt: skip
    want = truth(model, *(batch for group in groups for batch in group))
    for _, gradients, updates in workers(4).run(engine.train_one_step, model, config, groups):
        oracle.assert_close_gradients(gradients, want.gradients, oracle.TOLERANCE[torch.float32])
        # Adam's first step is lr * sign of the gradient wherever the gradient is not tiny.
        moved = {name: update * engine.LEARNING_RATE / 1e-3 for name, update in updates.items()}
        for name, gradient in want.gradients.items():
            large = gradient.abs() > 1e-3 * gradient.abs().max()
            torch.testing.assert_close(moved[name][large], gradient[large].sign(), atol=1e-2, rtol=0)


def train_from_pretrained(folder, config, groups):
    from deepspeed.comm import get_world_size
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    engine.activate()
    keep_alive = HfDeepSpeedConfig(config)  # from_pretrained runs inside zero.Init of this config
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(p.ds_tensor.numel() <= p.ds_numel // get_world_size() + 1 for p in model.parameters())
    made = [batches.make(spec).inputs for spec in groups[subject.data_parallel_rank(2)]]
    result = engine.step(engine.initialize(config, model), made)
    del keep_alive
    return result


def test_zero_3_builds_its_parameters_in_shards_from_a_checkpoint(workers, tmp_path):
    model, groups = ModelSpec("llama"), batches_of_groups("packed", 1, 2, 1)
    models.build(model).save_pretrained(tmp_path)
    config = engine.json_config(config_of("ring", 2), 3, 1, 1, 2)
    check(workers(4).run(train_from_pretrained, tmp_path, config, groups), model, groups)


def steps_of_engines(model_spec, configs, batch_specs):
    """Steps of several engines in one process, one after the other."""
    engines = [engine.initialize(config, models.build(model_spec)) for config in configs]
    return [engine.step(each, [batches.make(spec).inputs]) for each, spec in zip(engines, batch_specs, strict=True)]


@pytest.mark.parametrize("stage", [1, 3])
def test_engines_with_different_keys_live_in_one_process(workers, stage):
    """Two engines with different methods, and one without the key on two data-parallel ranks."""
    model = ModelSpec("llama")
    specs = [BatchSpec("packed", 1, 53), BatchSpec("dense", 1, 37), BatchSpec("left_pad", 1, 40)]
    configs = [
        engine.json_config(config_of("ring", 2), stage),
        engine.json_config(config_of("ulysses", 2), stage),
        engine.json_config(None, stage, dp=2),
    ]
    by_rank = workers(2).run(steps_of_engines, model, configs, specs)
    for index, spec in enumerate(specs):
        want = truth(model, spec)
        engine.check([results[index] for results in by_rank], want, [[want.loss]])


# ---- bf16: at most 1.5 times the error of one process in bf16, median of five seeds -------------------------

SEEDS = range(5)
ALLOWED = 1.5


def errors_of_one_process_in_bf16(specs, batch):
    errors = []
    for spec in specs:
        model = models.build(spec, torch.bfloat16)
        made = batches.make(batch)
        oracle.loss_of(oracle.logits_of_documents_alone(model, made).float(), made).backward()
        errors.append(
            oracle.total_error(oracle.gradients_of(model), truth(spec, batch, weights=torch.bfloat16).gradients)
        )
    return errors


def gradients_of_seeds(specs, config, batch):
    return [subject.loss_and_gradients(spec, config, [batch], torch.bfloat16)[1] for spec in specs]


def reduced_gradients_of_seeds(specs, config, batch):
    return [engine.train_one_step(spec, config, [[batch]], dtype=torch.bfloat16)[1] for spec in specs]


def assert_as_good_as_one_process(gradients_by_seed, specs, batch):
    wants = [truth(spec, batch, weights=torch.bfloat16).gradients for spec in specs]
    errors = [oracle.total_error(got, want) for got, want in zip(gradients_by_seed, wants, strict=True)]
    own = errors_of_one_process_in_bf16(specs, batch)
    assert statistics.median(errors) <= ALLOWED * statistics.median(own), f"errors {errors}, one process {own}"


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("way", [("ring", 4), ("ulysses", 4), ("hybrid", 4), ("allgather", 4)], ids=str)
def test_bf16_is_as_exact_as_one_process(workers, way, kind):
    specs, batch = [ModelSpec("llama", seed=seed) for seed in SEEDS], BatchSpec(kind, 3, 64)
    by_rank = workers(way[1]).run(gradients_of_seeds, specs, config_of(*way), batch)
    assert_as_good_as_one_process([oracle.mean_over_ranks(seed) for seed in zip(*by_rank, strict=True)], specs, batch)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_under_an_engine_is_as_exact_as_one_process(workers, stage):
    specs, batch = [ModelSpec("llama", seed=seed) for seed in SEEDS], BatchSpec("packed", 1, 64)
    config = engine.json_config(config_of("ring", 2), stage, bf16={"enabled": True})
    by_rank = workers(2).run(reduced_gradients_of_seeds, specs, config, batch)
    assert_as_good_as_one_process(by_rank[0], specs, batch)
