"""Checkpoints resume at another cp size, including the optimizer, and load without ds_cp."""

import argparse
import json

import pytest
import torch

from harness import batches, engine, models, training
from harness.batches import BatchSpec
from harness.models import ModelSpec

LLAMA = ModelSpec("llama")
ROWS, LENGTH = 4, 38  # the same rows per step at every dp
ADAM = {"type": "Adam", "params": {"lr": 0.05, "eps": 0.01, "weight_decay": 0, "torch_adam": True}}
STEPS = 3


def rows_of_step(step):
    return batches.make(BatchSpec("dense", ROWS, LENGTH, seed=step)).inputs


def config_for(stage, cp, world, **more):
    dp = world // cp
    key = {"size": cp, "method": "ring"} if cp > 1 else None
    return engine.json_config(key, stage, ROWS // dp, 1, dp, optimizer=ADAM, **more)


def take_step(made, step, cp):
    rank, inputs = torch.distributed.get_rank() // cp, rows_of_step(step)
    rows = ROWS * cp // torch.distributed.get_world_size()
    mine = {
        name: value[rank * rows : (rank + 1) * rows] if len(value) == ROWS else value for name, value in inputs.items()
    }
    loss = made(**mine).loss
    made.backward(loss)
    made.step()


def steps_by_turns(folder, stage, sizes):
    """One step per cp size, each by a new engine that resumes from the checkpoint of the previous one."""
    for step, cp in enumerate(sizes):
        config = config_for(stage, cp, torch.distributed.get_world_size())
        made = engine.initialize(
            config, models.build(ModelSpec("llama", seed=step))
        )  # other weights until the checkpoint is loaded
        if step:
            assert made.load_checkpoint(folder / f"at-{step}")[0]
        take_step(made, step, cp)
        made.save_checkpoint(folder / f"at-{step + 1}")
    return engine.full_weights(made.module)


def one_process(steps=STEPS):
    model = models.build(LLAMA)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=0.01)
    for step in range(steps):
        model(**rows_of_step(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().double() for name, parameter in model.named_parameters()}


def assert_same_weights(got, want, tolerance=2e-5):
    assert set(got) == set(want)
    for name, weight in want.items():
        assert (got[name].double() - weight).norm() <= tolerance * weight.norm(), name


@pytest.mark.parametrize("stage, sizes", [(1, (1, 2, 4)), (2, (4, 1, 2)), (3, (2, 4, 1))])
def test_a_checkpoint_resumes_at_another_cp_size(workers, tmp_path, stage, sizes):
    for weights in workers(4).run(steps_by_turns, tmp_path, stage, sizes):
        assert_same_weights(weights, one_process())
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    consolidated = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / f"at-{STEPS}"))
    assert_same_weights({name: consolidated[name] for name in weights}, weights, 1e-7)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_universal_checkpoint_resumes_at_another_world_size(workers, tmp_path, stage):
    from deepspeed.checkpoint.ds_to_universal import main

    workers(4).run(steps_by_turns, tmp_path, stage, (2, 2))
    saved = tmp_path / "at-2"
    tag = (saved / "latest").read_text()
    main(argparse.Namespace(
        input_folder=str(saved / tag), output_folder=str(saved / "universal"), num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
    ))  # fmt: skip
    (saved / "latest_universal").write_text("universal")

    def go_on():
        config = config_for(stage, 2, 2, checkpoint={"load_universal": True})
        made = engine.initialize(config, models.build(ModelSpec("llama", seed=9)))
        assert made.load_checkpoint(saved)[0]
        take_step(made, 2, 2)
        return engine.full_weights(made.module)

    for weights in workers(2).run(go_on):
        assert_same_weights(weights, one_process())


def trained_and_saved(folder, ds_config, resume=None, **more):
    from transformers import Trainer

    engine.activate()
    model = models.build(LLAMA)
    args = training.arguments(folder, ds_config, save_strategy="steps", save_steps=2, max_steps=4, **more)
    trainer = Trainer(model=model, args=args, train_dataset=training.RowDataset(16), data_collator=training.pad_right)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "saved"))
    return engine.full_weights(trainer.model_wrapped.module), trainer.state.num_input_tokens_seen


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_resumes_at_another_cp_size_and_its_model_loads_without_ds_cp(workers, tmp_path, stage):
    from transformers import AutoModelForCausalLM

    gather = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}

    def run(key, rows, resume):
        ds_config = training.json_for(key, stage, zero_optimization=gather)
        return workers(2, timeout=110).run(
            trained_and_saved, tmp_path, ds_config, resume, per_device_train_batch_size=rows
        )

    want, tokens = run(None, 2, None)[0]
    run({"size": 2, "method": "ring"}, 4, None)
    for checkpoint in ("checkpoint-2", "saved"):
        assert "ds_cp" not in (tmp_path / checkpoint / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.config._attn_implementation == "sdpa"
    assert_same_weights(dict(loaded.named_parameters()), want)
    for weights, seen in run(None, 2, str(tmp_path / "checkpoint-2")):
        assert_same_weights(weights, want)
        assert seen == tokens


def test_a_saved_config_does_not_name_the_attention_of_ds_cp(workers, tmp_path):
    def save():
        import copy

        made = engine.initialize(engine.json_config({"size": 2}, 1), models.build(LLAMA))
        made.module.save_pretrained(tmp_path / "model")
        made.module.config.save_pretrained(tmp_path / "config")
        return copy.deepcopy(made.module.config).to_json_string(use_diff=False)

    whole = workers(2).run(save)[0]
    texts = [whole, *((tmp_path / folder / "config.json").read_text() for folder in ("model", "config"))]
    assert not any("ds_cp" in json.dumps(json.loads(text)) for text in texts)
