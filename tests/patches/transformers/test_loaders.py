"""Data loaders, samplers and losses of the Trainer: steps, losses and weights equal those of a run without the key."""

import pytest
import torch

from harness import engine, models
from harness.training import LLAMA, RowDataset, arguments, assert_same_training, json_for, pad_right, trained

RING, ULYSSES = {"size": 2, "method": "ring"}, {"size": 2, "method": "ulysses"}


class Stream(torch.utils.data.IterableDataset):
    """An iterable data set without a length."""

    def __init__(self, rows):
        self.rows = RowDataset(rows)

    def __iter__(self):
        return (self.rows[index] for index in range(len(self.rows)))


class Dicts(RowDataset):
    """Rows as dicts of lists, which samplers by length and flattening collators require."""

    def __getitem__(self, index):
        return {"input_ids": super().__getitem__(index).tolist()}


def pad_to_24(rows):
    """Dispatched batches are concatenated, so they need one length."""
    return pad_right([torch.nn.functional.pad(row, (0, 24 - len(row))) for row in rows])


def pad_dicts(rows):
    return pad_right([torch.tensor(row["input_ids"]) for row in rows])


def flatten(rows):
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening()(rows)


def short_of_memory(rows):
    if len(rows) > 2:
        raise RuntimeError("CUDA out of memory.")
    return pad_right(rows)


def mean_of_rows(outputs, labels, num_items_in_batch=None):
    """A custom loss function of the logits of the whole sequence."""
    logits = outputs["logits"][:, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return 0.5 * losses / num_items_in_batch


def by_length(strategy, rows, **more):
    return (
        dict(per_device_eval_batch_size=2, data=Dicts(rows), collator=pad_dicts, train_sampling_strategy=strategy)
        | more
    )


CASES = {
    # name: (ranks, key, stage, arguments)
    "stream": (4, RING, 2, dict(data=Stream(40), collator=pad_to_24, gradient_accumulation_steps=2)),
    "stream, every rank reads": (4, ULYSSES, 2, dict(
        data=Stream(11), max_steps=4, accelerator_config={"dispatch_batches": False})),
    "stream, split batches": (4, RING, 1, dict(
        data=Stream(40), collator=pad_to_24, per_device_train_batch_size=2, accelerator_config={"split_batches": True})),
    "dispatched": (2, RING, 2, dict(collator=pad_to_24, accelerator_config={"dispatch_batches": True})),
    "dispatched to groups": (4, RING, 3, dict(collator=pad_to_24, accelerator_config={"dispatch_batches": True})),
    "grouped by length": (4, RING, 2, by_length(
        "group_by_length", 30, per_device_train_batch_size=1, gradient_accumulation_steps=8, dataloader_drop_last=True)),
    "balanced by length": (4, ULYSSES, 3, by_length("batch_rebalance", 24, gradient_accumulation_steps=2)),
    "uneven epochs": (4, RING, 2, dict(
        data=RowDataset(11), num_train_epochs=2, max_steps=-1, lr_scheduler_type="linear", warmup_steps=1,
        train_sampling_strategy="sequential", average_tokens_across_devices=False)),
    "loss of the user": (4, RING, 2, dict(loss=mean_of_rows, gradient_accumulation_steps=2)),
    "smoothed": (4, ULYSSES, 2, dict(label_smoothing_factor=0.2, gradient_accumulation_steps=3)),
    "flattened": (2, RING, 2, dict(data=Dicts(), collator=flatten, auto_find_batch_size=True,
        include_num_input_tokens_seen="all")),
    "smaller batches": (4, RING, 2, dict(
        collator=short_of_memory, auto_find_batch_size=True, per_device_train_batch_size=4, per_device_eval_batch_size=2)),
    "compiled": (2, ULYSSES, 2, dict(torch_compile=True, torch_compile_backend="eager")),
}  # fmt: skip


SLOW = ("stream, split batches", "dispatched", "smaller batches", "compiled")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_training_equals_a_run_without_the_key(workers, tmp_path, name):
    ranks, cp, stage, more = CASES[name]
    want = workers(ranks // 2, timeout=110).run(trained, tmp_path, json_for(None, stage), **more)[0]
    for got in workers(ranks, timeout=110).run(trained, tmp_path, json_for(cp, stage), **more):
        assert_same_training(got, want)
        assert got["flos"] == want["flos"]


def test_a_stream_resumes_from_its_checkpoint(workers, tmp_path):
    """The dispatching loader of the resumed run skips the batches that were trained on."""

    def interrupted(key):
        ds_config = json_for(key, 2)
        more = dict(data=Stream(40), collator=pad_to_24, max_steps=4, save_strategy="steps", save_steps=2)
        whole = trained(tmp_path, ds_config, **more)
        return whole, trained(tmp_path, ds_config, resume=str(tmp_path / "checkpoint-2"), **more)

    want = workers(2, timeout=110).run(lambda: trained(
        tmp_path, json_for(None, 2), data=Stream(40), collator=pad_to_24, max_steps=4))[0]  # fmt: skip
    for whole, resumed in workers(4, timeout=110).run(interrupted, RING):
        assert_same_training(whole, want)
        for name, weight in want["weights"].items():
            assert (resumed["weights"][name] - weight).norm() <= 1e-5 * weight.norm(), name


ALPHA = 5.0


def embedding_noise(folder):
    """The noise of this rank in one step, and the length and hidden size of the whole sequence."""
    from transformers import Trainer, TrainerCallback

    engine.activate()
    model, seen = models.build(LLAMA), {}

    class Watch(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):  # Trainer has registered its noise on the embedding before
            table = model.get_input_embeddings()
            table.register_forward_hook(lambda _, args, out: seen.update(noise=out - table.weight[args[0]]))

    args = arguments(folder, json_for(RING, 2), max_steps=1, per_device_train_batch_size=4, neftune_noise_alpha=ALPHA)
    trainer = Trainer(
        model=model, args=args, train_dataset=RowDataset(), data_collator=pad_to_96, callbacks=[Watch()]
    )  # fmt: skip
    trainer.train()
    return seen["noise"].detach().double(), 96, model.config.hidden_size


def pad_to_96(rows):
    return pad_right([torch.nn.functional.pad(row, (0, 96 - len(row)), value=1) for row in rows])


def test_neftune_noise_is_scaled_by_the_length_of_the_whole_sequence(workers, tmp_path):
    noises = workers(2).run(embedding_noise, tmp_path)
    for noise, length, hidden in noises:
        bound = ALPHA / (length * hidden) ** 0.5
        assert noise.shape[1] == length // 2
        assert 0.99 * bound < noise.abs().max() <= 1.0001 * bound
        assert noise.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
    assert not torch.allclose(noises[0][0], noises[1][0])
