"""accelerate with the key: custom training loops, the launcher, and conflicts with accelerate's own sequence parallelism."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

from ds_cp import patches
from ds_cp.config import ConfigError
from harness import engine, models, training
from harness.models import ModelSpec
from harness.paths import DATA
from harness.training import ROWS, RowDataset, json_for, pad_right

LLAMA = ModelSpec("llama")
SAMPLES = 11


def config_for(key, stage=2):
    schedule = {name: "auto" for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")}
    return training.json_for(
        key, stage, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2,
        scheduler={"type": "WarmupDecayLR", "params": schedule},
    )  # fmt: skip


def accelerator_for(ds_config):
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from accelerate.utils import set_seed

    engine.activate()
    PartialState(cpu=True)
    set_seed(3)
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config), gradient_accumulation_steps=2)


def loop(folder, ds_config):
    """Two epochs with accumulation and two schedulers, then the state saved between them is loaded."""
    from accelerate.utils import DummyOptim, DummyScheduler
    from torch.utils.data import DataLoader

    accelerator, model = accelerator_for(ds_config), models.build(LLAMA)
    loader = DataLoader(RowDataset(16), batch_size=2, collate_fn=pad_right, shuffle=True, generator=torch.Generator())
    held_out = DataLoader(RowDataset(SAMPLES), batch_size=2, collate_fn=pad_right)
    optimizer = DummyOptim(model.parameters())
    schedule = DummyScheduler(
        optimizer, total_num_steps=20, warmup_num_steps=1
    )  # counted in batches of all data-parallel workers
    model, optimizer, loader, held_out, _ = accelerator.prepare(model, optimizer, loader, held_out, schedule)
    steps = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), lambda step: step)
    counted = accelerator.prepare_scheduler(steps)

    def epoch():
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                counted.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
        return losses

    first = epoch()
    accelerator.save_state(str(folder / "state"))
    order = loader.synchronized_generator.get_state() if loader.synchronized_generator else None
    second, weights = epoch(), engine.full_weights(model.module)
    rates = counted.get_last_lr() + model.get_lr()
    accelerator.load_state(str(folder / "state"))
    if order is not None:
        loader.synchronized_generator.set_state(order)
    again = engine.full_weights(model.module)
    model.eval()
    seen = [accelerator.gather_for_metrics(batch["input_ids"][:, 0]).tolist() for batch in held_out]
    names = accelerator.gather_for_metrics([accelerator.process_index], use_gather_object=True)
    names += accelerator.gather_for_metrics(["an object", "another"])  # accelerate detects that these are no tensors
    total = accelerator.reduce(torch.ones(()), "mean").item()
    return (
        {"losses": first + second, "seen": sum(seen, []), "names": len(names), "mean": total, "rates": rates},
        weights,
        again,
    )


def test_a_loop_with_accumulation_metrics_and_saved_state_equals_a_run_without_the_key(workers, tmp_path):
    want, want_weights, want_again = workers(2, timeout=110).run(loop, tmp_path, config_for(None))[0]
    assert len(want["seen"]) == SAMPLES
    for got, weights, again in workers(4, timeout=110).run(loop, tmp_path, config_for({"size": 2, "method": "ring"})):
        assert got["losses"] == pytest.approx(want["losses"], rel=2e-5)
        assert {k: v for k, v in got.items() if k != "losses"} == {k: v for k, v in want.items() if k != "losses"}
        for name in weights:
            assert (weights[name] - want_weights[name]).norm() <= 1e-5 * want_weights[name].norm(), name
            assert (again[name] - want_again[name]).norm() <= 1e-5 * want_again[name].norm(), name


def test_an_accelerator_that_does_not_use_deepspeed_is_refused(workers):
    """It would train with DistributedDataParallel and ignore the key."""

    def on_cpu():
        from accelerate import Accelerator, DeepSpeedPlugin

        engine.activate()
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config_for({"size": 2})))

    workers(2).run_expecting_error(on_cpu, "runs MULTI_CPU instead of DeepSpeed.* leave that argument out")


TWO_WAYS = {
    "cp_size": (lambda: dict(cp_size=2), {}),
    "sp_size": (lambda: dict(sp_size=2, sp_backend="deepspeed"), {}),
    "environment": (None, {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2"}),
}


@pytest.mark.parametrize("way", TWO_WAYS)
def test_accelerates_own_sequence_parallelism_is_refused(workers, way):
    def both():
        from accelerate import Accelerator, DeepSpeedPlugin, PartialState
        from accelerate.parallelism_config import ParallelismConfig

        engine.activate()
        PartialState(cpu=True)
        make, environment = TWO_WAYS[way]
        os.environ.update(environment)
        plugin = DeepSpeedPlugin(hf_ds_config=config_for({"size": 2}))
        Accelerator(deepspeed_plugin=plugin, parallelism_config=ParallelismConfig(**make()) if make else None)

    sentence = r'"context_parallel" \(size 2\) in the DeepSpeed config and [cs]p_size = 2 in accelerate.*Leave one'
    workers(2).run_expecting_error(both, sentence)


@pytest.mark.parametrize("name", ["context_parallel", "contextparallel"])
def test_the_key_in_accelerates_own_config_is_refused(tmp_path, name):
    """`accelerate launch` passes on known fields and drops others without a message."""
    patches.on_import("accelerate.commands.config.config_args")
    file = tmp_path / "accelerate.yaml"
    fields = f"  zero_stage: 2\n  {name}:\n    size: 2\n"
    file.write_text(
        f"distributed_type: DEEPSPEED\nmixed_precision: 'no'\nuse_cpu: true\ndebug: false\ndeepspeed_config:\n{fields}"
    )
    with pytest.raises(
        ConfigError, match=f'"{name}" under deepspeed_config .* name that file there as deepspeed_config_file'
    ):
        load_config_from_file(str(file))


PROGRAMS = DATA / "programs"


def one_process():
    made, losses = runpy.run_path(str(PROGRAMS / "tiny_llama.py")), []
    optimizer = torch.optim.SGD(made["model"].parameters(), lr=0.5)
    for ids in made["data"]:
        loss = made["model"](input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_accelerate_launch_shares_the_sequences(tmp_path):
    """The real launcher in new processes. The entry point activates ds_cp, and the config is given by its path."""
    config = training.json_for({"size": 2}, 1, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    (tmp_path / "ds.json").write_text(json.dumps(config))
    command = [
        Path(sys.executable).with_name("accelerate"), "launch", "--use_deepspeed", "--num_processes=2",
        f"--deepspeed_config_file={tmp_path / 'ds.json'}", PROGRAMS / "train_with_accelerate.py", tmp_path / "rank",
    ]  # fmt: skip
    subprocess.run(list(map(str, command)), check=True, timeout=170, env=os.environ | {"ACCELERATE_USE_CPU": "false"})
    for rank in range(2):
        losses, attention = json.loads((tmp_path / f"rank{rank}").read_text())
        assert attention == "ds_cp"
        assert losses == pytest.approx(one_process(), rel=1e-5)


def test_accelerate_gives_the_ranks_of_a_group_the_same_batches(workers):
    def batches_seen():
        from accelerate import Accelerator, DeepSpeedPlugin, PartialState
        from torch.utils.data import DataLoader

        engine.activate()
        PartialState(cpu=True)
        plugin = DeepSpeedPlugin(hf_ds_config=json_for({"size": 2}, 2, train_micro_batch_size_per_gpu=2,
                                                       gradient_accumulation_steps=1))  # fmt: skip
        accelerator = Accelerator(deepspeed_plugin=plugin)
        model = models.build(LLAMA)
        loader = DataLoader(RowDataset(), batch_size=2, collate_fn=pad_right)
        model, loader = accelerator.prepare(model, loader)
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(loss.item())
        return losses, model.train_batch_size()

    results = workers(4, timeout=110).run(batches_seen)
    assert results[0] == results[1] and results[2] == results[3]
    assert results[0][0] != results[2][0]
    assert len(results[0][0]) == ROWS // 2 // 2
    assert results[0][1] == 2 * 2
