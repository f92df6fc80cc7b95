"""Hugging Face Trainer with the key: losses, weights, token counts, steps and resuming equal those of a run without it."""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from harness import engine, models
from harness.models import ModelSpec
from harness.training import RowDataset, arguments, assert_same_training, json_for, pad_right, trained

LLAMA = ModelSpec("llama")


class RandomPadder:
    """A collator that draws random numbers, as masked-language-model collators do."""

    def __call__(self, rows):
        batch = pad_right(rows)
        hidden = torch.rand(batch["labels"].shape) < 0.2
        batch["labels"] = batch["labels"].masked_fill(hidden, -100)
        return batch


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


_plain = {}


def plain(workers, folder, ranks, **more):
    """The run without the key on `ranks` data-parallel ranks, cached because several cases use it."""
    name = json.dumps([ranks, more], default=str)
    if name not in _plain:
        _plain[name] = workers(ranks).run(trained, folder, json_for(None, 1), **more)[0]
    return _plain[name]


CASES = [
    # (ranks, key, stage, arguments)
    (2, {"size": 2}, 2, {}),
    (2, {"size": "auto", "method": "ring"}, 3, {"gradient_accumulation_steps": 3}),
    (4, {"size": 2, "method": "ring"}, 2, {"gradient_accumulation_steps": 2}),
    (4, {"size": 2, "offload_kv": 8}, 3, {}),
    (2, {"size": 2}, 1, {"gradient_checkpointing": True, "num_train_epochs": 1, "max_steps": -1}),
]


@pytest.mark.parametrize("ranks, cp, stage, more", CASES)
def test_logged_losses_tokens_and_weights_equal_a_run_without_the_key(workers, folder, ranks, cp, stage, more):
    want = plain(workers, folder, ranks // 2, **more)
    results = workers(ranks, timeout=110).run(trained, folder, json_for(cp, stage), **more)
    for result in results:
        assert_same_training(result, want)


def test_random_collators_in_loader_workers_agree_inside_a_group(workers, folder):
    more = dict(dataloader_num_workers=2, collator=RandomPadder())
    every_step = {"size": 2, "checks": "every_step"}
    for result in workers(4, timeout=110).run(trained, folder, json_for(every_step, 2), **more):
        assert len(result["logs"]) == 3


def test_training_resumes_from_its_checkpoint(workers, folder):
    def interrupted():
        own = folder / "resumed"
        config = json_for({"size": 2, "method": "ring"}, 2)
        whole = trained(own, config, max_steps=4, save_strategy="steps", save_steps=2)
        again = trained(own, config, max_steps=4, resume=str(own / "checkpoint-2"))
        return whole, again, json.loads((own / "checkpoint-2" / "config.json").read_text())

    for whole, again, saved in workers(2, timeout=110).run(interrupted):
        assert [log["step"] for log in again["logs"]][-2:] == [3, 4]
        for name, weight in whole["weights"].items():
            assert torch.allclose(again["weights"][name], weight, rtol=1e-6, atol=1e-8), name
        assert "ds_cp" not in json.dumps(saved)


def test_from_pretrained_inside_zero_init_holds_a_shard_of_each_parameter(workers, folder):
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    saved = folder / "saved"
    models.build(LLAMA).save_pretrained(saved)
    unset_hf_deepspeed_config()

    def zero_init():
        from transformers import AutoModelForCausalLM, Trainer

        engine.activate()
        args = arguments(folder, json_for({"size": 2}, 3))
        model = AutoModelForCausalLM.from_pretrained(saved)
        parts = {p.ds_tensor.numel() / p.ds_numel for p in model.parameters()}
        trainer = Trainer(model=model, args=args, train_dataset=RowDataset(), data_collator=pad_right)
        trainer.train()
        return max(parts), [log["loss"] for log in trainer.state.log_history if "loss" in log]

    want = plain(workers, folder, 1)
    for largest_part, losses in workers(2, timeout=110).run(zero_init):
        assert largest_part < 0.6
        assert losses == pytest.approx([log["loss"] for log in want["logs"]], rel=2e-5)
