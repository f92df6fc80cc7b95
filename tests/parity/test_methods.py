"""Every method, layout, kernel and kind of batch: loss and gradients equal those of one process.

The cases are a covering selection: every pair of values that can occur together occurs at least once.
"""

import pytest
import torch

from data.models import TYPES, TYPES_WITHOUT_KV_HEADS
from harness import subject
from harness.batches import BatchSpec
from harness.cases import config_of, name_of
from harness.models import ModelSpec
from harness.oracle import truth
from harness.pairwise import covering, possible_pairs

WAYS = [
    (method, size, layout)
    for method, sizes in {
        "ring": [2, 3, 4],
        "ulysses": [2, 3, 4],
        "hybrid": [4],
        "allgather": [2, 3, 4],
    }.items()
    for size in sizes
    for layout in ["zigzag", "contiguous"]
]
FACTORS = {
    "way": WAYS,
    "kind": ["dense", "packed", "right_pad", "left_pad", "packed_with_ones_mask", "packed_by_cu_seq_lens",
             "packed_by_positions_and_cu_seq_lens", "packed_by_seq_idx"],
    "type": ["llama", "qwen2", "qwen3", "mistral", "gpt2", "olmo2"],
    "heads": [(8, 1), (8, 2), (8, 8), (9, 3), (6, 3), (6, 2)],
    "labels": ["all", "first_eighth", "last_eighth", "middle", "documents_predict_the_next_document"],
    "length": [37, 53, 64],
    "rows": [1, 3],
    "dtype": [torch.float32, torch.float64],
    "kernel": ["torch", "reference"],
}  # fmt: skip


def ulysses_can_split_these_heads(way, heads):
    method, size, _ = way
    return heads[0] % {"ulysses": size, "hybrid": 2}.get(method, 1) == 0


CONSTRAINTS = [
    (("way", "heads"), ulysses_can_split_these_heads),
    (("type", "heads"), lambda type, heads: type not in TYPES_WITHOUT_KV_HEADS or heads[0] == heads[1]),
    (("kind", "rows"), lambda kind, rows: "cu_seq_lens" not in kind or rows == 1),
    # The first padding positions of a left-padded row see no key, so no label may depend on their predictions.
    (
        ("kind", "labels"),
        lambda kind, labels: not (kind == "left_pad" and labels.startswith("documents_predict")),
    ),
]

CASES = covering(FACTORS, CONSTRAINTS)


def specs_of(case):
    model = ModelSpec(case["type"], *case["heads"])
    return model, BatchSpec(case["kind"], case["rows"], case["length"], case["labels"])


def test_the_cases_cover_every_legal_pair_of_values():
    held = {
        ((one, case[one]), (other, case[other])) for case in CASES for one in case for other in case if one != other
    }
    assert not [pair for pair in possible_pairs(FACTORS, CONSTRAINTS) if pair not in held]
    assert set(FACTORS["type"]) <= set(TYPES)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_loss_and_gradients_equal_those_of_one_process(workers, case):
    model, batch = specs_of(case)
    config = config_of(*case["way"], case["kernel"])
    want = truth(model, batch)
    results = workers(config["size"]).run(subject.loss_and_gradients, model, config, [batch], case["dtype"])
    subject.check(results, want, case["dtype"])


@pytest.mark.parametrize("method", ["ring", "ulysses", "allgather"])
@pytest.mark.parametrize("kind", ["packed", "left_pad"])
def test_two_groups_with_batches_of_different_shape_average_like_data_parallelism(workers, method, kind):
    model = ModelSpec("llama")
    batches = [BatchSpec("dense", 1, 53), BatchSpec(kind, 3, 37, seed=1)]
    want = truth(model, *batches)
    results = workers(4).run(subject.loss_and_gradients, model, config_of(method, 2), batches)
    losses = [truth(model, batch).loss for batch in batches for _ in range(2)]
    subject.check(results, want, losses=losses)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("kind", ["dense", "packed", "left_pad"])
@pytest.mark.parametrize("method", ["ring", "ulysses", "hybrid", "allgather"])
def test_gradient_checkpointing_changes_nothing(workers, method, kind, checkpointing):
    model, batch = ModelSpec("qwen2"), BatchSpec(kind, 3, 53)
    config = config_of(method, 4 if method == "hybrid" else 2)
    arguments = (model, config, [batch], torch.float32, checkpointing)
    results = workers(config["size"]).run(subject.loss_and_gradients, *arguments)
    subject.check(results, truth(model, batch))
