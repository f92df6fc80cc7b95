"""Trainer's label smoothing runs on local logits. A custom loss function gets whole logits."""

import pytest
import torch.nn.functional as F

from harness import engine, models, subject
from harness.models import ModelSpec
from harness.training import RowDataset, arguments, json_for, pad_right

LLAMA = ModelSpec("llama")
RING = {"size": 2, "method": "ring"}


def squared(outputs, labels, num_items_in_batch=None):
    """A custom loss that depends on all logits of a row."""
    logits = outputs["logits"].float()
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = loss + logits.logsumexp(-1).square().mean(1).sum()
    return loss / (num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum())


LOSSES = {
    "label smoothing": dict(label_smoothing_factor=0.2),
    "smoothed, accumulated": dict(label_smoothing_factor=0.2, gradient_accumulation_steps=2),
    "a function of the user's own": dict(compute_loss_func=squared),
}
TAKEN_LOCALLY = {"label smoothing", "smoothed, accumulated"}


def trained(folder, ds_config, name):
    from transformers import Trainer

    engine.activate()
    model = models.build(LLAMA)
    settings = dict(LOSSES[name])
    own = {"compute_loss_func": settings.pop("compute_loss_func", None)}
    args = arguments(folder, ds_config, max_steps=2, **settings)
    trainer = Trainer(
        model=model, args=args, train_dataset=RowDataset(), eval_dataset=RowDataset(4), data_collator=pad_right, **own
    )
    trainer.train()
    sent = subject.gathered_bytes()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.args.prediction_loss_only = True
    loss_only = trainer.evaluate()["eval_loss"]
    weights = engine.full_weights(trainer.model_wrapped.module)
    return losses, [evaluated, loss_only], weights, sent


@pytest.mark.parametrize("name, stage", zip(LOSSES, (3, 2, 3)))
def test_losses_outside_of_the_model_equal_a_run_without_the_key(workers, tmp_path, name, stage):
    want = workers(1).run(trained, tmp_path, json_for(None, 1), name)[0]
    for losses, evaluated, weights, sent in workers(2, timeout=110).run(trained, tmp_path, json_for(RING, stage), name):
        assert losses == pytest.approx(want[0], rel=2e-5)
        assert evaluated == pytest.approx(want[1], rel=2e-5)
        for key, weight in want[2].items():
            assert (weights[key] - weight).norm() <= 1e-5 * weight.norm(), key
        assert (sent == 0) == (name in TAKEN_LOCALLY)
