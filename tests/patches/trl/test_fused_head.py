"""TRL's fused head runs on local hidden states."""

import pytest
import torch
import torch.nn.functional as F

from harness import batches, engine, models, oracle, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec

LLAMA = ModelSpec("llama")
RING = {"size": 2, "method": "ring"}
ULYSSES = {"size": 2, "method": "ulysses"}
PADDED = BatchSpec("left_pad", 3, 37)
PACKED = BatchSpec("packed", 1, 53)


FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask", "loss")


def of_outputs(output, weigh):
    """A loss like those of preference and policy trainers: of log-probabilities of rows, and the entropy."""
    rows = output.log_probs.sum(1)
    return -F.logsigmoid(rows * weigh).sum() + 0.1 * (output.entropy * output.label_mask).mean() + output.loss


def with_fused_head(spec, **settings):
    trl = pytest.importorskip("trl.trainer.utils")
    model = models.build(spec)
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    trl.add_fused_lm_head(model, outputs=outputs, **settings)
    return model


def weights_of_rows(batch):
    return torch.linspace(0.01, 0.02, batch.rows)


def scored(spec, config, batch, settings, shifted):
    import ds_cp

    model = with_fused_head(spec, **settings).train()
    if config:
        ds_cp.context_parallel(model, config)
    inputs = batches.make(batch).inputs
    if shifted:
        inputs["shift_labels"] = F.pad(inputs.pop("labels")[:, 1:], (0, 1), value=-100)
    output = model(**inputs, fused_lm_head=True)
    loss = of_outputs(output, weights_of_rows(batch))
    loss.backward()
    with torch.no_grad():
        again = model.eval()(**inputs, fused_lm_head=True)
    assert torch.equal(again.is_top1, output.is_top1)
    return (
        {name: getattr(output, name).detach() for name in FIELDS},
        oracle.gradients_of(model),
        subject.gathered_bytes(),
    )


TRL_CASES = [
    (LLAMA, RING, PADDED, {}, False),
    (LLAMA, ULYSSES, PADDED, {"temperature": 0.7}, True),
    (ModelSpec("gemma2"), RING, BatchSpec("dense", 3, 37, "middle"), {}, False),
    (ModelSpec("gpt2"), RING, PADDED, {"cast_lm_head_to_fp32": True}, False),
    (ModelSpec("phi"), RING, BatchSpec("dense", 1, 38, "none"), {}, False),
]


@pytest.mark.parametrize("case", TRL_CASES, ids=lambda case: f"{case[0].type} {case[1]['method']} {case[3]} {case[4]}")
def test_trls_fused_head_runs_on_local_tokens_and_returns_whole_rows(workers, case):
    spec, config, batch, settings, shifted = case
    fields, gradients, _ = workers(1).run(scored, spec, None, batch, settings, shifted)[0]
    results = workers(2).run(scored, *case)
    for got, _, sent in results:
        for name, want in fields.items():
            assert got[name].shape == want.shape and got[name].dtype == want.dtype
            torch.testing.assert_close(got[name], want, rtol=2e-4, atol=2e-5)
        assert sent < batch.rows * batch.length * spec.heads * models.HEAD_DIM * 4, "hidden states were gathered"
    oracle.assert_close_gradients(oracle.mean_over_ranks([g for _, g, _ in results]), gradients, 2e-5)


def stepped_with_fused_head(config, batch, stage):
    model = with_fused_head(LLAMA)
    started = engine.initialize(engine.json_config(config, stage, batch.rows, dp=1 if config else 1), model)
    loss = of_outputs(started(**batches.make(batch).inputs, fused_lm_head=True), weights_of_rows(batch))
    started.backward(loss)
    return engine.full_gradients(started.module)


@pytest.mark.parametrize("stage", [2, 3])
def test_trls_fused_head_under_an_engine(workers, stage):
    want = workers(1).run(scored, LLAMA, None, PADDED, {}, False)[0][1]
    for got in workers(2).run(stepped_with_fused_head, RING, PADDED, stage):
        oracle.assert_close_gradients(got, want, 2e-5)


def test_a_model_with_trls_head_keeps_its_own_loss_and_logits(workers):
    def both():
        import ds_cp

        model = with_fused_head(LLAMA).train()
        ds_cp.context_parallel(model, RING)
        inputs = batches.make(PACKED).inputs
        loss = model(**inputs).loss
        loss.backward()
        sent = subject.gathered_bytes()
        with torch.no_grad():
            return (
                (loss.item(), oracle.gradients_of(model)),
                model(**subject.inputs_without_labels(batches.make(PACKED))).logits,
                sent,
            )

    want = oracle.truth(LLAMA, PACKED)
    results = workers(2).run(both)
    subject.check([result for result, _, _ in results], want)
    for _, logits, sent in results:
        oracle.assert_close_logits(logits, want.logits[0], 1e-5)
        assert sent == 0
