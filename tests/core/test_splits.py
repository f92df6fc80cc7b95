"""The split of a batch: packed rows take the fastest by predicted time, all others that of the plan."""

import numpy as np
import pytest
import torch

from ds_cp import splits
from ds_cp.config import read
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL
from ds_cp.planner import ModelFacts, resolve
from harness import batches, models, oracle, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec
from harness.oracle import truth


def plan(size, heads=(32, 8), node=8, **key):
    return resolve(read({"size": size, **key}), ModelFacts("TestModel", (heads,), (128,)), node, "cpu")


def documents(*lengths):
    return Documents.find(1, sum(lengths), boundaries=np.cumsum([0, *lengths]))


@pytest.mark.parametrize("size, heads, node, key, names", [
    (8, (32, 8), 8, {}, ["ulysses", "ring", "hybrid 4 x 2", "hybrid 2 x 4"]),
    (16, (32, 8), 8, {}, ["hybrid 2 x 8", "ring", "hybrid 8 x 2", "hybrid 4 x 4"]),
    (2, (9, 3), 8, {}, ["ring"]),
    (2, (8, 2), 8, {}, ["ulysses", "ring"]),
    (8, (32, 8), 8, {"method": "ulysses"}, ["ulysses"]),
    (8, (32, 8), 8, {"method": "ring"}, ["ring"]),
    (8, (32, 8), 8, {"ulysses_size": 4}, ["hybrid 2 x 4"]),
])  # fmt: skip
def test_only_auto_leaves_a_choice(size, heads, node, key, names):
    assert [split.name for split in plan(size, heads, node, **key).splits] == names


@pytest.mark.parametrize("lengths, name", [
    ([131072], "ulysses"),
    ([2048] * 64, "ring"),
    ([1000] * 131, "ring"),
])  # fmt: skip
@pytest.mark.parametrize("card", ["H100", "H100-FA2", "A100"])
def test_packed_rows_take_the_fastest(lengths, name, card):
    from dataclasses import replace

    found = documents(*lengths)
    split, layout = splits.choose(replace(plan(8), card=card), sum(lengths), found, {CAUSAL: 1})
    assert split.name == name
    assert (layout.ring, layout.ulysses) == (split.ring, split.ulysses)


def test_padding_alone_is_no_reason_to_choose():
    unmasked = np.ones((2, 4096), dtype=bool)
    unmasked[1, 1000:] = False
    found = Documents.find(2, 4096, unmasked=unmasked)
    split, _ = splits.choose(plan(8), 4096, found, {CAUSAL: 1})
    assert split == plan(8).splits[0]


DENSE, PACKED = BatchSpec("dense", 1, 64), BatchSpec("packed", 1, 96)


def two_forwards_and_one_backward(size):
    """The splits of a dense and a packed batch, and the gradients of the sum of their losses."""
    from ds_cp.patches.transformers import decoder_stacks

    chosen, choose = [], splits.choose

    def by_packing(plan, seq_len, found, layers):
        # tiny rows: the prediction is of no use here, so each packed batch takes the last split
        split, layout = choose(plan, seq_len, found, layers)
        if found.packed:
            last = plan.splits[-1]
            split, layout = last, splits.balance.choose(seq_len, *last, found, layers)
        chosen.append(split.name)
        return split, layout

    decoder_stacks.splits.choose = by_packing
    model = subject.changed_model(ModelSpec("llama"), {"size": size}, torch.float64)
    losses = []
    with models.TransformersInDouble():
        losses = [model(**batches.make(spec).inputs).loss for spec in (DENSE, PACKED)]
        sum(losses).backward()
    return chosen, [loss.item() for loss in losses], oracle.gradients_of(model)


@pytest.mark.parametrize("size, names", [(2, ["ulysses", "ring"]), (4, ["ulysses", "hybrid 2 x 2"])])
def test_batches_of_two_splits_may_precede_one_backward(workers, size, names):
    results = workers(size).run(two_forwards_and_one_backward, size)
    wanted = [truth(ModelSpec("llama"), spec) for spec in (DENSE, PACKED)]
    for chosen, losses, _ in results:
        assert chosen == names
        for loss, want in zip(losses, wanted):
            oracle.assert_close_loss(loss, want.loss, oracle.LOSS_TOLERANCE[torch.float64])
    gradients = oracle.mean_over_ranks([each for _, _, each in results])
    total = {name: wanted[0].gradients[name] + wanted[1].gradients[name] for name in wanted[0].gradients}
    oracle.assert_close_gradients(gradients, total, oracle.TOLERANCE[torch.float64])


def other_documents_on_rank_1():
    model = subject.changed_model(ModelSpec("llama"), {"size": 2, "checks": "off"})
    positions = torch.cat([torch.arange(32), torch.arange(32)]) if torch.distributed.get_rank() else torch.arange(64)
    model(input_ids=torch.arange(64)[None] % 32, position_ids=positions[None], labels=torch.arange(64)[None] % 32)


def test_other_documents_on_a_rank_raise_on_all_also_without_checks(workers):
    # rank 0 would use ulysses and rank 1 the ring: each would wait for messages that the other never sends
    workers(2).run_expecting_error(other_documents_on_rank_1, "got different batches in forward 0")
