"""Properties of a sharded model: causality, logits, the meaning of labels and counts, unusual calls, refused batches."""

import os
import signal

import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid

from harness import batches, models, oracle, subject
from harness.attention import KERNELS
from harness.batches import BatchSpec
from harness.cases import config_of
from harness.models import ModelSpec
from harness.oracle import truth

LLAMA = ModelSpec("llama")
WAYS = [
    ("ring", 2, "zigzag"),
    ("ring", 3, "contiguous"),
    ("ulysses", 2, "contiguous"),
    ("hybrid", 4, "zigzag"),
    ("allgather", 4, "zigzag"),
]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way)))


# ---- causality: a token influences exactly the later tokens of its document --------------------------------


def logits_with_changed_tokens(config, spec, changes):
    model = subject.changed_model(LLAMA, config).eval()
    batch = batches.make(spec)
    inputs = subject.inputs_without_labels(batch)
    with torch.no_grad():
        before = model(**inputs).logits
        moved = []
        for row, token in changes:
            ids = inputs["input_ids"].clone()
            ids[row, token] = (ids[row, token] + 1) % models.VOCAB
            after = model(**inputs | {"input_ids": ids}).logits
            moved.append((after != before).any(-1))
    return moved


def tokens_that_may_move(batch, row, token):
    """The tokens of the document from the changed one on; none if padding was changed."""
    expected = torch.zeros_like(batch.targets, dtype=torch.bool)
    for document in batch.documents:
        if document.row == row and document.start <= token < document.stop:
            expected[row, token : document.stop] = True
    return expected


def tokens_of_documents(batch):
    inside = torch.zeros_like(batch.targets, dtype=torch.bool)
    for document in batch.documents:
        inside[document.row, document.start : document.stop] = True
    return inside


@every_way
@pytest.mark.parametrize(
    "kind", ["dense", "packed", "packed_with_ones_mask", "packed_by_seq_idx", "right_pad", "left_pad"]
)
def test_a_changed_token_moves_the_rest_of_its_document_and_nothing_else(workers, way, kind):
    spec = BatchSpec(kind, 3, 53)
    batch = batches.make(spec)
    changes = [(0, t) for t in (0, 1, 10, 11, 13, 14, 17, 26, 27, 32, 33, 40, 52)] + [(2, 5), (2, 51)]
    for moved_on_rank in workers(way[1]).run(logits_with_changed_tokens, config_of(*way), spec, changes):
        for (row, token), moved in zip(changes, moved_on_rank, strict=True):
            wrong = (moved != tokens_that_may_move(batch, row, token)) & tokens_of_documents(batch)
            assert not wrong.any(), f"token {token} of row {row} changed; wrong at {wrong.nonzero().tolist()}"


# ---- logits: every token, shard borders included -----------------------------------------------------------


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_evaluation_returns_the_logits_of_the_whole_batch_on_every_rank(workers, way, dtype):
    specs = [
        BatchSpec("dense", 3, 37),
        BatchSpec("packed", 1, 53),
        BatchSpec("left_pad", 3, 64),
        BatchSpec("dense", 1, 1),
    ]
    want = truth(LLAMA, *specs).logits
    config = config_of(*way, kernel="reference" if dtype == torch.float64 else "torch")
    for logits_on_rank in workers(way[1]).run(subject.full_logits, LLAMA, config, *specs, dtype=dtype):
        for got, logits in zip(logits_on_rank, want, strict=True):
            oracle.assert_close_logits(got, logits, oracle.TOLERANCE[dtype])


def loss_and_logits(config, spec):
    model = subject.changed_model(LLAMA, config).eval()
    with torch.no_grad():
        output = model(**batches.make(spec).inputs)
    return output.loss.item(), output.logits


@every_way
def test_evaluation_with_labels_returns_the_loss_and_all_logits(workers, way):
    spec = BatchSpec("packed", 3, 53)
    want = truth(LLAMA, spec)
    for loss, logits in workers(way[1]).run(loss_and_logits, config_of(*way), spec):
        oracle.assert_close_loss(loss, want.loss, 1e-6)
        oracle.assert_close_logits(logits, want.logits[0], 1e-5)


def preference_loss(logits, batch):
    """A preference loss of the log-probabilities of whole rows."""
    valid = batch.targets != batches.IGNORE
    targets = batch.targets.clamp(min=0)
    tokens = -cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    rows = torch.where(valid, tokens, 0).sum(1)
    return -logsigmoid((rows[0] - rows[1]) / 50) - logsigmoid((rows[0] - rows[2]) / 50)


def preference_gradients(config, spec):
    model = subject.changed_model(LLAMA, config).train()
    batch = batches.make(spec)
    loss = preference_loss(model(**subject.inputs_without_labels(batch)).logits, batch)
    loss.backward()
    return loss.item(), oracle.gradients_of(model)


@every_way
def test_a_loss_that_the_user_computes_from_the_logits_is_exact(workers, way):
    spec = BatchSpec("right_pad", 3, 53)
    batch, model = batches.make(spec), models.build(LLAMA, attention="eager").double()
    with models.TransformersInDouble():
        loss = preference_loss(oracle.logits_of_documents_alone(model, batch).nan_to_num(0), batch)
    loss.backward()
    want = oracle.Truth(loss.item(), oracle.gradients_of(model), [])
    subject.check(workers(way[1]).run(preference_gradients, config_of(*way), spec), want)


# ---- what labels and counts mean ---------------------------------------------------------------------------

OBEYED = [
    ("shift_labels",),
    ("num_items_in_batch",),
    ("num_items_in_batch as a tensor",),
    ("shift_labels", "num_items_in_batch"),
]


@every_way
@pytest.mark.parametrize("extras", OBEYED, ids=" and ".join)
def test_shift_labels_and_num_items_in_batch_are_used(workers, way, extras):
    spec, plain = BatchSpec("packed", 3, 37, extras=extras), BatchSpec("packed", 3, 37)
    assert (
        abs(truth(LLAMA, spec).loss / truth(LLAMA, plain).loss - 1) > 1e-4
    )  # otherwise the test could not detect that it is ignored
    subject.check(workers(way[1]).run(subject.loss_and_gradients, LLAMA, config_of(*way), [spec]), truth(LLAMA, spec))


@every_way
@pytest.mark.parametrize("extras", [(), ("num_items_in_batch",), ("shift_labels",), ("no items",)], ids=str)
def test_a_batch_without_a_valid_label_gives_the_loss_of_transformers_and_zero_gradients(workers, way, extras):
    spec = BatchSpec("packed", 3, 37, labels="none", extras=extras)
    for loss, gradients in workers(way[1]).run(subject.loss_and_gradients, LLAMA, config_of(*way), [spec]):
        oracle.assert_close_loss(loss, truth(LLAMA, spec).loss, 0.0)
        assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients.values())


def test_a_group_without_a_valid_label_does_not_affect_the_other_group(workers):
    specs = [BatchSpec("dense", 1, 37), BatchSpec("packed", 1, 53, labels="none")]
    losses = [truth(LLAMA, spec).loss for spec in specs for _ in range(2)]
    results = workers(4).run(subject.loss_and_gradients, LLAMA, config_of("ring", 2), specs)
    subject.check(results, truth(LLAMA, *specs), losses=losses)


def label_smoothing(logits, labels, vocab_size, num_items_in_batch=None, **_):
    """A custom loss that shifts the labels itself."""
    logits, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, targets, label_smoothing=0.3)


def gradients_with_own_loss(config, spec):
    model = subject.changed_model(LLAMA, config).train()
    model.loss_function = label_smoothing
    loss = model(**batches.make(spec).inputs).loss
    loss.backward()
    return loss.item(), oracle.gradients_of(model)


@every_way
def test_a_loss_function_set_on_the_model_is_used(workers, way):
    spec = BatchSpec("right_pad", 3, 53, labels="middle")
    batch, model = batches.make(spec), models.build(LLAMA, attention="eager").double()
    with models.TransformersInDouble():
        logits = oracle.logits_of_documents_alone(model, batch).nan_to_num(0)
    loss = label_smoothing(logits, batch.inputs["labels"], models.VOCAB)
    loss.backward()
    want = oracle.Truth(loss.item(), oracle.gradients_of(model), [])
    subject.check(workers(way[1]).run(gradients_with_own_loss, config_of(*way), spec), want)


# ---- unusual calls -----------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_rows_shorter_than_the_group_are_exact(workers, way, length, kernel):
    """In fp64, since the gradients of q and k are zero for a query with one key, and fp32 leaves a rounding error."""
    spec = BatchSpec("dense", 3, length)
    arguments = (LLAMA, config_of(*way, kernel), [spec], torch.float64)
    subject.check(workers(way[1]).run(subject.loss_and_gradients, *arguments), truth(LLAMA, spec), torch.float64)


@every_way
@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_whose_exponentials_overflow_are_exact(workers, way, kernel):
    """All scores are shifted by hundreds, so that their exponentials overflow or underflow even in fp64."""
    model, spec = ModelSpec("gpt2", kv_heads=8, score_offset=500.0), BatchSpec("packed", 3, 53)
    arguments = (model, config_of(*way, kernel), [spec], torch.float64)
    subject.check(workers(way[1]).run(subject.loss_and_gradients, *arguments), truth(model, spec), torch.float64)


@every_way
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
def test_two_forwards_may_precede_one_backward(workers, way, checkpointing):
    specs = [BatchSpec("dense", 3, 37), BatchSpec("packed", 1, 53)]
    arguments = (LLAMA, config_of(*way), specs, checkpointing)
    subject.check(workers(way[1]).run(subject.loss_and_gradients_of_two_forwards, *arguments), truth(LLAMA, *specs))


def run_twice(config, spec):
    return [subject.loss_and_gradients(LLAMA, config, [spec]) for _ in range(2)]


@every_way
def test_the_same_step_twice_is_bitwise_equal(workers, way):
    for first, second in workers(way[1]).run(run_twice, config_of(*way), BatchSpec("packed", 3, 53)):
        assert first[0] == second[0]
        assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def generate(config, ids):
    model = models.build(LLAMA) if config is None else subject.changed_model(LLAMA, config)
    return model.eval().generate(ids, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))


@every_way
def test_generate_continues_as_one_process_does(workers, way):
    ids = batches.make(BatchSpec("dense", 3, 11)).inputs["input_ids"]
    want = generate(None, ids)
    assert all(torch.equal(got, want) for got in workers(way[1]).run(generate, config_of(*way), ids))


def gradients_from_embeddings(config, spec):
    model = subject.changed_model(LLAMA, config).train()
    inputs = dict(batches.make(spec).inputs)
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
    loss = model(inputs_embeds=embeddings, **inputs).loss
    loss.backward()
    return loss.item(), oracle.gradients_of(model)


@every_way
def test_inputs_embeds_receive_exact_gradients(workers, way):
    spec = BatchSpec("packed", 3, 53)
    subject.check(workers(way[1]).run(gradients_from_embeddings, config_of(*way), spec), truth(LLAMA, spec))


# ---- what is refused, on every rank, with one message ------------------------------------------------------


def train_with_own_batch(config, specs):
    subject.loss_and_gradients(LLAMA, config, [specs[torch.distributed.get_rank()]])


@every_way
@pytest.mark.parametrize("other", ["tokens", "length", "documents"])
def test_a_batch_that_differs_inside_a_group_is_refused_on_every_rank(workers, way, other):
    odd = {"tokens": BatchSpec(seed=1), "length": BatchSpec(length=40), "documents": BatchSpec("packed")}[other]
    specs = [BatchSpec()] * (way[1] - 1) + [odd]
    workers(way[1]).run_expecting_error(train_with_own_batch, "(?i)batch", config_of(*way), specs)


def leave_after_a_step(config, how):
    """The last rank takes one step with the others, then dies or raises."""
    model = subject.changed_model(LLAMA, config).train()
    inputs = batches.make(BatchSpec()).inputs
    model(**inputs).loss.backward()
    if torch.distributed.get_rank() == config["size"] - 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("this rank stays away")  # the harness keeps the process and its sockets open
    model(**inputs).loss.backward()


@every_way
@pytest.mark.parametrize("how", ["dies", "stays away"])
def test_ranks_raise_when_a_member_of_their_group_is_missing(workers, way, how):
    last = way[1] - 1
    config = config_of(*way) | {"timeout": 3}
    dying = (last,) if how == "dies" else ()
    messages = workers(way[1]).run_expecting_error(leave_after_a_step, "rank", config, how, dying=dying)
    assert all("context" in message for message in messages[:last]), messages
