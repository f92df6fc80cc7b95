"""Evaluation and prediction with the key: losses, predictions and metrics equal those of a run without it."""

import numpy as np
import pytest
import torch

from harness import engine, models, training
from harness.models import ModelSpec

LLAMA = ModelSpec("llama")
RATE = 0.02  # learning rate; with a larger one, training of the classifier amplifies rounding errors


class Labelled(training.RowDataset):
    """Rows with one class each, as reward models and classifiers read them."""

    def __getitem__(self, index):
        return {"input_ids": super().__getitem__(index), "labels": index % 3}


def pad_labelled(rows):
    batch = training.pad_right([row["input_ids"] for row in rows])
    return batch | {"labels": torch.tensor([row["labels"] for row in rows])}


def causal_lm():
    return models.build(LLAMA)


def classifier():
    from transformers import AutoModelForSequenceClassification

    config = causal_lm().config
    config.num_labels, config.pad_token_id = 3, 0
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)


KINDS = {
    "causal lm": (causal_lm, training.RowDataset, training.pad_right),
    "classifier": (classifier, Labelled, pad_labelled),
}


def translator():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(
        vocab_size=models.VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    ))  # fmt: skip


def generated_in_evaluation(folder, ds_config):
    """Predictions, labels and metrics of Seq2SeqTrainer after one step."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    engine.activate()
    model = translator()
    args = training.arguments(
        folder, ds_config, Seq2SeqTrainingArguments, max_steps=1, per_device_eval_batch_size=3, learning_rate=RATE,
        predict_with_generate=True, generation_max_length=6,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model=model, args=args, train_dataset=training.RowDataset(8), data_collator=training.pad_right,
        compute_metrics=lambda prediction: {"checksum": float(np.abs(prediction.predictions).sum())},
    )  # fmt: skip
    trainer.train()
    predicted = trainer.predict(training.RowDataset(7))
    kept = ("test_loss", "test_checksum")
    return predicted.predictions.tolist(), predicted.label_ids.tolist(), [predicted.metrics[name] for name in kept]


def only_evaluated(folder, ds_config, samples):
    """Predictions of a model that is not trained: ZeRO-3 without an optimizer."""
    from transformers import Trainer

    engine.activate()
    model = models.build(LLAMA)
    args = training.arguments(folder, ds_config, per_device_eval_batch_size=3, learning_rate=RATE)
    trainer = Trainer(model=model, args=args, data_collator=training.pad_right)
    predicted = trainer.predict(training.RowDataset(samples))
    return predicted.predictions, predicted.metrics["test_loss"], _regions_opened(model)


def everything(folder, ds_config, kind, samples):
    """Train with evaluation between the steps, predict and generate; everything that is returned."""
    from transformers import Trainer

    engine.activate()
    build, rows, collator = KINDS[kind]
    model = build()
    args = training.arguments(
        folder, ds_config, per_device_eval_batch_size=3, max_steps=2, include_for_metrics=["inputs", "loss"],
        eval_strategy="steps", eval_steps=1, learning_rate=RATE,
    )  # fmt: skip
    seen = []

    def compute_metrics(prediction):
        seen.append({
            "predictions": prediction.predictions, "labels": prediction.label_ids,
            "inputs": prediction.inputs, "losses": np.asarray(prediction.losses),
        })  # fmt: skip
        return {"samples": len(prediction.label_ids)}

    trainer = Trainer(
        model=model, args=args, train_dataset=rows(8), eval_dataset=rows(samples), data_collator=collator,
        compute_metrics=compute_metrics,
    )  # fmt: skip
    trainer.train()
    during = [log for log in trainer.state.log_history if "eval_loss" in log]
    predicted = trainer.predict(rows(samples))
    trainer.args.prediction_loss_only = True
    loss_only = trainer.evaluate()
    shared = _regions_opened(model)
    generated = None
    if kind == "causal lm":
        prompt = training.RowDataset(1)[0][None, :5]
        generated = trainer.model.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True).tolist()
    figures = [*during, predicted.metrics, loss_only]
    timing = ("runtime", "per_second", "preparation_time")
    return {
        "figures": [{k: v for k, v in each.items() if not k.endswith(timing)} for each in figures],
        "steps": [_steps(each) for each in (predicted.metrics, loss_only)],
        "seen": seen, "predictions": predicted.predictions, "labels": predicted.label_ids, "generated": generated,
    }, shared  # fmt: skip


def _steps(metrics):
    prefix = "test" if "test_loss" in metrics else "eval"
    return round(metrics[f"{prefix}_steps_per_second"] * metrics[f"{prefix}_runtime"], 1)


def _regions_opened(model):
    from ds_cp.patches.transformers.attach import attachment

    state = attachment(model)
    return state.forwards if state else 0


def assert_same(got, want, where=""):
    if isinstance(want, dict):
        assert set(got) == set(want), where
        for name in want:
            assert_same(got[name], want[name], f"{where}.{name}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), where
        for index, pair in enumerate(zip(got, want)):
            assert_same(*pair, f"{where}[{index}]")
    elif isinstance(want, (np.ndarray, float)):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=where)
    else:
        assert got == want, where


@pytest.mark.parametrize(
    "kind, ranks, cp, stage, samples",
    [
        ("causal lm", 2, {"size": 2, "method": "ring"}, 2, 7),
        ("causal lm", 4, {"size": 2}, 3, 7),  # dp 2: 4 + 3 samples in batches of 3, the last of which is padded
        ("classifier", 4, {"size": 2, "method": "ring"}, 2, 10),
        ("classifier", 2, {"size": 2}, 3, 7),
    ],
)
def test_losses_predictions_and_metrics_equal_a_run_without_the_key(workers, tmp_path, kind, ranks, cp, stage, samples):
    def run(world, key):
        return workers(world, timeout=110).run(everything, tmp_path, config_of(key, stage), kind, samples)

    want = run(ranks // 2, None)[0][0]
    assert len(want["labels"]) == samples
    for got, regions in run(ranks, cp):
        assert_same(got, want)
        assert regions > 0


def config_of(key, stage):
    return training.json_for(key, stage, optimizer={"type": "SGD", "params": {"lr": RATE}})


def test_evaluation_generates_what_it_generates_without_the_key(workers, tmp_path):
    want = workers(1).run(generated_in_evaluation, tmp_path, config_of(None, 2))[0]
    for got in workers(2).run(generated_in_evaluation, tmp_path, config_of({"size": 2, "method": "ring"}, 2)):
        assert_same(got, want)


def test_a_model_that_is_only_evaluated_is_sharded(workers, tmp_path):
    predictions, loss, _ = workers(1).run(only_evaluated, tmp_path, config_of(None, 3), 5)[0]
    for got, got_loss, regions in workers(2).run(
        only_evaluated, tmp_path, config_of({"size": 2, "method": "ring"}, 3), 5
    ):
        assert regions > 0
        assert got_loss == pytest.approx(loss, rel=1e-5)
        assert_same(got, predictions)
