"""Sparse attention: an indexer selects the keys of each query among those of its document."""

import pytest
import torch

from ds_cp.cli.shrink import tiny_config
from ds_cp.cli.sizes import VOCAB
from harness import engine, families, oracle, subject
from harness.batches import BatchSpec
from harness.cases import config_of
from harness.models import ModelSpec
from harness.oracle import truth

PACKED = BatchSpec("packed", 3, 53)
LEFT, RIGHT = BatchSpec("left_pad", 3, 37), BatchSpec("right_pad", 3, 37)

CASES = [
    # selects single keys
    ("deepseek_v32", ("ring", 2), LEFT),
    ("deepseek_v32", ("ulysses", 2), PACKED),
    # selects blocks of keys for each group of heads; under ulysses a rank computes one group
    ("minimax_m3_vl_text", ("ring", 3), PACKED),
    ("minimax_m3_vl_text", ("ulysses", 2), RIGHT),
    # selects blocks by pooled keys; the last block of a document may be incomplete
    ("qwen4_exp_text", ("ring", 3), PACKED),
    ("qwen4_exp_text", ("ulysses", 2), LEFT),
]


@pytest.mark.parametrize(
    "model_type, way, batch", CASES, ids=[f"{t}-{way[0]}{way[1]}-{batch.kind}" for t, way, batch in CASES]
)
def test_gradients_equal_each_document_alone(workers, model_type, way, batch):
    model = ModelSpec(model_type)
    results = workers(way[1]).run(subject.loss_and_gradients, model, config_of(*way), [batch], torch.float64)
    subject.check(results, truth(model, batch), torch.float64)


EVERYTHING = {
    "deepseek_v32": {"index_topk": 64},
    "minimax_m3_vl_text": {"index_topk_blocks": 64},
    "qwen4_exp_text": {"indexer_budget": 64},
}


@pytest.mark.parametrize("model_type", EVERYTHING)
def test_the_choice_of_keys_changes_the_logits_of_these_models(model_type):
    """With all keys selected, the same weights give other logits. Otherwise the cases above would prove nothing."""
    ids = torch.randint(5, VOCAB - 10, (2, 29), generator=torch.Generator().manual_seed(3))
    model = families.build(model_type).eval()
    everything = families.build(model_type, tiny_config(model_type, **EVERYTHING[model_type])).eval()
    everything.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert not torch.allclose(model(input_ids=ids).logits, everything(input_ids=ids).logits, atol=1e-2)


@pytest.mark.parametrize(
    "model_type, kind",
    [("minimax_m3_vl_text", "reentrant"), pytest.param("qwen4_exp_text", "non-reentrant", marks=pytest.mark.slow)],
)
def test_a_recomputed_layer_chooses_the_same_keys(workers, model_type, kind):
    """Two forwards with sequences of different lengths precede the backward pass, so that a wrong region raises."""
    arguments = ModelSpec(model_type), config_of("ring", 2), [PACKED, BatchSpec("dense", 2, 64)]
    plain = workers(2).run(subject.loss_and_gradients_of_two_forwards, *arguments)
    again = workers(2).run(subject.loss_and_gradients_of_two_forwards, *arguments, kind)
    for got, want in zip(again, plain, strict=True):
        assert got[0] == want[0]
        oracle.assert_close_gradients(got[1], want[1], 1e-6)  # a reentrant checkpoint accumulates in another order


def test_zero_3_gathers_an_indexer_once_for_any_number_of_chunks(workers):
    """The groups have different lengths and numbers of chunks. The gathers of ZeRO-3 must not depend on them."""

    def step(*arguments):
        from ds_cp.patches.transformers.models import sparse_attention

        sparse_attention.CHUNK_BYTES = 4 * 2 * 53 * 4  # four queries of the longer row
        return engine.train_one_step(*arguments)

    model = ModelSpec("minimax_m3_vl_text")
    groups = [[BatchSpec("dense", 1, 53)], [BatchSpec("dense", 1, 17)]]
    config = engine.json_config(config_of("ring", 2), 3, 1, 1, 2)
    results = workers(4).run(step, model, config, groups)
    losses = [[truth(model, batch).loss for batch in group] for group in groups]
    engine.check(results, truth(model, *(batch for group in groups for batch in group)), losses)


@pytest.mark.parametrize("model_type", EVERYTHING)
def test_a_call_with_a_cache_still_masks_keys_that_were_not_chosen(workers, model_type):
    def with_cache():
        import ds_cp

        model = families.build(model_type).eval()
        ids = torch.randint(5, VOCAB - 10, (1, 29), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            want = model(input_ids=ids).logits
            ds_cp.context_parallel(model, config_of("ring", 2))
            first = model(input_ids=ids[:, :28], use_cache=True)
            cached = {name: first[name] for name in ("cache", "past_key_values") if name in first}
            last = model(input_ids=ids[:, 28:], use_cache=True, **cached)
        return (torch.cat([first.logits, last.logits], dim=1) - want).abs().max().item()

    assert workers(2).run(with_cache)[0] < 1e-4


@pytest.mark.parametrize("model_type", ["deepseek_v32", "minimax_m3_vl_text"])
def test_a_mask_of_the_users_own_is_refused(workers, model_type):
    def own_mask():
        model = subject.changed_model(ModelSpec(model_type), config_of("ring", 2))
        ids = torch.full((1, 8), 7)
        model(input_ids=ids, labels=ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool).tril())

    workers(2).run_expecting_error(own_mask, "chooses among the keys that a mask of its own shows")


# ---- broken on purpose -------------------------------------------------------------------------------------


def a_query_chooses_from_another_documents_keys(patch):
    from ds_cp.mask.queries import Queries

    of = Queries.of
    patch(
        Queries,
        "of",
        lambda *_: [Queries(each.query_index, each.positions, each.key_index.roll(1, 0)) for each in of(*_)],
    )


def heads_follow_the_first_groups_choice(patch):
    from ds_cp.attention.selected import SelectedKeys

    from_local_queries = SelectedKeys.from_local_queries
    patch(
        SelectedKeys,
        "from_local_queries",
        lambda mesh, cut, chosen, *_: from_local_queries(mesh, cut, chosen[:, :1], *_),
    )


@pytest.mark.parametrize(
    "fault",
    [
        a_query_chooses_from_another_documents_keys,
        pytest.param(heads_follow_the_first_groups_choice, marks=pytest.mark.slow),
    ],
)
def test_the_parity_check_detects_a_fault(workers, fault):
    def broken(*arguments):
        fault(lambda owner, name, function: setattr(owner, name, staticmethod(function)))
        return subject.loss_and_gradients(*arguments)

    model = ModelSpec("minimax_m3_vl_text")
    results = workers(2).run(broken, model, config_of("ring", 2), [PACKED], torch.float64)
    with pytest.raises(AssertionError):
        subject.check(results, truth(model, PACKED), torch.float64)
