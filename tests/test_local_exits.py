"""Losses that ds_cp knows keep hidden states local: label smoothing, TRL's fused head, Liger; any other gets them whole."""

import functools
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from harness import batches, engine, models, oracle, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec
from harness.training import RowSlice, arguments, json_for, pad_right

LLAMA = ModelSpec("llama")
RING = {"size": 2, "method": "ring"}
ULYSSES = {"size": 2, "method": "ulysses"}
PADDED = BatchSpec("left_pad", 3, 37)
PACKED = BatchSpec("packed", 1, 53)


def gathered_bytes():
    """What this rank sent to make anything of the group's whole."""
    from ds_cp import mesh

    return sum(each.cp.sent["gather"] for each in mesh.known())


# ---- Trainer: label smoothing and a loss function of the user's own ----------------------------------------


def squared(outputs, labels, num_items_in_batch=None):
    """A loss that nobody knows: it also looks at all logits of a row together."""
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
        model=model, args=args, train_dataset=RowSlice(), eval_dataset=RowSlice(4), data_collator=pad_right, **own
    )
    trainer.train()
    sent = gathered_bytes()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.args.prediction_loss_only = True
    loss_only = trainer.evaluate()["eval_loss"]
    weights = engine.full_weights(trainer.model_wrapped.module)
    return losses, [evaluated, loss_only], weights, sent


@pytest.mark.parametrize("name, stage", zip(LOSSES, (3, 2, 3)))
def test_losses_outside_of_the_model_train_and_evaluate_as_without_the_key(workers, tmp_path, name, stage):
    want = workers(1).run(trained, tmp_path, json_for(None, 1), name)[0]
    for losses, evaluated, weights, sent in workers(2, timeout=110).run(trained, tmp_path, json_for(RING, stage), name):
        assert losses == pytest.approx(want[0], rel=2e-5)
        assert evaluated == pytest.approx(want[1], rel=2e-5)
        for key, weight in want[2].items():
            assert (weights[key] - weight).norm() <= 1e-5 * weight.norm(), key
        assert (sent == 0) == (name in TAKEN_LOCALLY)


# ---- TRL's fused head --------------------------------------------------------------------------------------

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask", "loss")


def of_outputs(output, weigh):
    """A loss as preference and policy trainers make them: of sums per row, their ratios, and the entropy."""
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
    return {name: getattr(output, name).detach() for name in FIELDS}, oracle.gradients_of(model), gathered_bytes()


TRL_CASES = [
    (LLAMA, RING, PADDED, {}, False),
    (LLAMA, ULYSSES, PADDED, {"temperature": 0.7}, True),
    (ModelSpec("gemma2"), RING, BatchSpec("dense", 3, 37, "middle"), {}, False),
    (ModelSpec("gpt2"), RING, PADDED, {"cast_lm_head_to_fp32": True}, False),
    (ModelSpec("phi"), RING, BatchSpec("dense", 1, 38, "none"), {}, False),
]


@pytest.mark.parametrize("case", TRL_CASES, ids=lambda case: f"{case[0].type} {case[1]['method']} {case[3]} {case[4]}")
def test_trls_fused_head_scores_local_tokens_and_returns_whole_rows(workers, case):
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


def test_a_model_with_trls_head_still_has_its_own_loss_and_logits(workers):
    def both():
        import ds_cp

        model = with_fused_head(LLAMA).train()
        ds_cp.context_parallel(model, RING)
        inputs = batches.make(PACKED).inputs
        loss = model(**inputs).loss
        loss.backward()
        sent = gathered_bytes()
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


# ---- Liger: a stand-in with the released package's names and signatures, for its kernels need Triton ------


def liger_loss(
    hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
    final_logit_softcapping=None, return_token_accuracy=False, return_predicted_tokens=False, **kwargs,
):  # fmt: skip
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    logits = hidden_states.view(-1, hidden_size) @ lm_head_weight.t()
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits, shift_labels.view(-1), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


LIGERS_FORWARD = '''
def lce_forward(self, input_ids=None, labels=None, skip_logits=None, **kwargs):
    hidden = self.model(input_ids=input_ids, **{k: v for k, v in kwargs.items() if k not in ("shift_labels", "num_items_in_batch")})[0]
    kwargs = {k: kwargs[k] for k in ("shift_labels", "num_items_in_batch") if k in kwargs}
    if self.training if skip_logits is None else skip_logits:
        loss = LigerForCausalLMLoss(hidden_states=hidden, lm_head_weight=self.lm_head.weight, labels=labels,
                                    hidden_size=self.config.hidden_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=None)
    logits = self.lm_head(hidden)
    loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits)
'''  # fmt: skip


def apply_liger(model):
    """As ``_apply_liger_kernel_to_instance`` leaves a model: with a forward of a module of Liger's."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    module = types.ModuleType("liger_kernel.transformers.model.llama")
    module.LigerForCausalLMLoss, module.CausalLMOutputWithPast = liger_loss, CausalLMOutputWithPast
    exec(LIGERS_FORWARD, module.__dict__)
    sys.modules[module.__name__] = module
    model.forward = types.MethodType(module.lce_forward, model)


def with_liger(batch):
    import ds_cp

    model = models.build(LLAMA).train()
    apply_liger(model)
    ds_cp.context_parallel(model, RING)
    inputs = batches.make(batch).inputs
    output = model(**inputs)
    output.loss.backward()
    sent = gathered_bytes()
    with torch.no_grad():
        evaluated = model.eval()(**inputs).loss.item()
    return (output.loss.item(), oracle.gradients_of(model)), evaluated, sent


@pytest.mark.parametrize("batch", [PACKED, BatchSpec("dense", 3, 38, extras=("num_items_in_batch",)),
                                   BatchSpec("dense", 1, 37, extras=("shift_labels",)),
                                   BatchSpec("dense", 2, 37, "first_eighth")], ids=str)  # fmt: skip
def test_ligers_loss_gets_local_tokens_and_is_summed_over_the_group(workers, batch):
    results = workers(2).run(with_liger, batch)
    want = oracle.truth(LLAMA, batch)
    subject.check([result for result, _, _ in results], want)
    for _, evaluated, sent in results:
        oracle.assert_close_loss(evaluated, want.loss, 1e-6)
        assert sent == 0


def asks_for_accuracy():
    import ds_cp

    model = models.build(LLAMA).train()
    apply_liger(model)
    ds_cp.context_parallel(model, RING)
    llama = sys.modules["liger_kernel.transformers.model.llama"]
    llama.LigerForCausalLMLoss = functools.partial(llama.LigerForCausalLMLoss, return_token_accuracy=True)
    model(**batches.make(PACKED).inputs)


def test_numbers_that_would_be_one_shards_are_refused(workers):
    workers(2).run_expecting_error(asks_for_accuracy, "return_token_accuracy")
