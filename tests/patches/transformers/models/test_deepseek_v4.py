"""DeepSeek V4: queries attend to a window of tokens and to compressed KV, each entry of which pools many tokens of a document."""

from dataclasses import replace

import pytest
import torch

from ds_cp.cli import compare
from ds_cp.cli.sizes import VOCAB
from harness import engine, families, oracle, subject
from harness.batches import BatchSpec
from harness.cases import config_of
from harness.models import ModelSpec
from harness.oracle import truth

V4 = ModelSpec("deepseek_v4")
PACKED = BatchSpec("packed", 3, 53)
RIGHT = BatchSpec("right_pad", 3, 37)
SHORT = BatchSpec("packed", 1, 12, documents=(3, 2, 3, 4))  # at most one complete window, of the shorter kind

CASES = [
    (("ring", 3), PACKED),
    (("ulysses", 2), PACKED),
    pytest.param(("hybrid", 4), RIGHT, marks=pytest.mark.slow),
    (("ring", 2), SHORT),
]


@pytest.mark.parametrize("way, batch", CASES)
def test_gradients_equal_each_document_alone(workers, way, batch):
    results = workers(way[1]).run(subject.loss_and_gradients, V4, config_of(*way), [batch], torch.float64)
    subject.check(results, truth(V4, batch), torch.float64)


@pytest.mark.parametrize("model_type", ["deepseek_v4", pytest.param("minimax_m3_vl_text", marks=pytest.mark.slow)])
def test_left_padding_does_not_shift_windows_that_start_with_the_document(workers, model_type):
    """transformers counts windows and blocks from the first position of a row, even if it is padding."""

    def compared():
        import ds_cp

        model = families.build(model_type)
        ids = torch.randint(5, VOCAB - 10, (2, 29), generator=torch.Generator().manual_seed(3))
        mask = (torch.arange(29) >= torch.tensor([[6], [0]])).long()
        labels = ids.masked_fill(mask == 0, -100)
        labels[0, 6] = -100
        alone = tuple(({"input_ids": x, "labels": x}, x.size(1) - 1) for x in (ids[:1, 6:], ids[1:]))
        batch = compare.Batch("padded", {"input_ids": ids, "labels": labels, "attention_mask": mask}, alone)
        want = compare.reference(model, batch, families.in_double)
        ds_cp.context_parallel(model, config_of("ring", 2))
        return compare.errors(*compare.context_parallel(model, batch), want).worst, want.tolerance

    error, tolerance = workers(2).run(compared)[0]
    assert error <= tolerance


@pytest.mark.parametrize("kind", [pytest.param("reentrant", marks=pytest.mark.slow), "non-reentrant"])
def test_a_recomputed_layer_pools_the_same_keys(workers, kind):
    """Two forwards with sequences of different lengths precede the backward pass, so that a wrong region raises."""
    arguments = V4, config_of("ring", 2), [PACKED, BatchSpec("dense", 2, 64)]
    plain = workers(2).run(subject.loss_and_gradients_of_two_forwards, *arguments)
    again = workers(2).run(subject.loss_and_gradients_of_two_forwards, *arguments, kind)
    for got, want in zip(again, plain, strict=True):
        assert got[0] == want[0]
        oracle.assert_close_gradients(got[1], want[1], 1e-6)  # a reentrant checkpoint accumulates in another order


def test_zero_3_takes_the_same_step(workers):
    """One group pools documents in several calls; the other has no complete window."""
    groups = [[BatchSpec("packed", 1, 53)], [BatchSpec("dense", 1, 3, seed=1)]]
    config = engine.json_config(config_of("ring", 2), 3, 1, 1, 2)
    results = workers(4).run(engine.train_one_step, V4, config, groups)
    losses, batches = [[truth(V4, batch).loss for batch in group] for group in groups], sum(groups, [])
    # terms of the gradients of its hyper-connection scales cancel
    engine.check(results, truth(V4, *batches), losses, oracle.rounding(V4, *batches))


def test_calls_with_a_cache_are_those_of_one_process(workers):
    def differences():
        import ds_cp

        model = families.build("deepseek_v4").eval()
        ids = torch.randint(5, 100, (2, 29), generator=torch.Generator().manual_seed(4))
        with torch.no_grad():
            want = model(input_ids=ids, use_cache=True).logits
            ds_cp.context_parallel(model, config_of("ring", 2))
            return (model(input_ids=ids, use_cache=True).logits - want).abs().max().item()

    assert workers(2).run(differences)[0] < 1e-5


def test_a_mask_of_the_users_own_is_refused(workers):
    def own_mask():
        model = subject.changed_model(V4, config_of("ring", 2))
        ids = torch.full((1, 8), 7)
        model(input_ids=ids, labels=ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool).tril())

    workers(2).run_expecting_error(
        own_mask, "pools windows of neighbouring tokens, which a mask of your own does not cut"
    )


def compressed_kv_of_other_documents_is_seen(patch):
    from ds_cp.attention.compressed_kv import CompressedKV

    bias = CompressedKV.bias

    def bias_of_any_document(self, *rest):
        if self.selected:
            return bias(self, *rest)
        first_document = replace(self, document_start=self.document_start.clamp(max=0), origin=self.origin * 0)
        return bias(first_document, *rest)

    patch(CompressedKV, "bias", bias_of_any_document)


def test_the_parity_check_detects_a_fault(workers):
    def broken(*arguments):
        compressed_kv_of_other_documents_is_seen(setattr)
        return subject.loss_and_gradients(*arguments)

    results = workers(2).run(broken, V4, config_of("ring", 2), [PACKED], torch.float64)
    with pytest.raises(AssertionError):
        subject.check(results, truth(V4, PACKED), torch.float64)
