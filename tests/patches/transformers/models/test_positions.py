"""Positions that a model counts itself: they are counted on the whole batch, not on a shard."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
import transformers.models.auto  # noqa: F401

from ds_cp.agreement import BatchError
from ds_cp.cli import compare
from ds_cp.cli.shrink import tiny_config
from ds_cp.cli.sizes import VOCAB
from harness import families

PAD = 0  # tiny_config's padding id


def ids_with(*rows):
    """Random ids [B, S] with `PAD` at the given places of each row."""
    ids = torch.randint(5, VOCAB - 10, (len(rows), 23), generator=torch.Generator().manual_seed(2))
    for row, places in zip(ids, rows):
        row[list(places)] = PAD
    return ids


def dense(model, ids, shifted=True):
    """Dense rows without a mask."""
    return {"input_ids": ids, "labels": ids}, [
        ({"input_ids": row, "labels": row}, row.size(1) - shifted) for row in ids.split(1)
    ]


def left_padded(model, lengths=(23, 9), pads_count=False):
    """Left-padded rows of different lengths with a mask. `pads_count`: the model counts positions from the padding."""
    ids = ids_with(*[()] * len(lengths))
    mask = torch.stack([(torch.arange(23) >= 23 - n).long() for n in lengths])
    rows = [row[None, 23 - n :] for row, n in zip(ids, lengths)]
    labels = ids.masked_fill(mask == 0, -100)
    labels[torch.arange(len(lengths)), [23 - n for n in lengths]] = -100  # its prediction comes from a padding position

    def from_pad(n):
        return {"position_ids": torch.arange(23 - n, 23)[None]} if pads_count else {}

    return {"input_ids": ids, "labels": labels, "attention_mask": mask}, [
        ({"input_ids": row, "labels": row} | from_pad(row.size(1)), row.size(1) - 1) for row in rows
    ]


def packed_rows(model, lengths=((9, 14), (4, 19)), shifted=False):
    """Two rows that are packed differently."""
    ids = ids_with((), ())
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    documents = [part[None] for row, sizes in zip(ids, lengths) for part in row.split(sizes)]
    return {"input_ids": ids, "labels": ids, "position_ids": positions}, [
        ({"input_ids": part, "labels": part}, part.size(1) - shifted) for part in documents
    ]


pads_inside = partial(dense, ids=ids_with((3, 4, 20), (0, 1, 2)))
no_pads = partial(dense, ids=ids_with((), ()))
CASES = [
    ("roberta", {}, pads_inside),  # padding ids inside of a row have no position
    ("xlm-roberta-xl", {}, pads_inside),
    ("opt", {}, left_padded),  # positions are counted on the mask
    ("biogpt", {}, partial(left_padded, pads_count=True)),
    ("bart", {}, packed_rows),  # takes positions [L] only, so different rows are flattened
    ("blenderbot", {}, packed_rows),
    ("trocr", {"use_learned_position_embeddings": False}, partial(dense, ids=ids_with((3,), ()), shifted=False)),
    ("xglm", {"max_position_embeddings": 8}, no_pads),  # its table grows with the length
    ("roformer", {"rotary_value": True}, no_pads),
    (
        "xlm",
        {"causal": False},
        partial(dense, ids=ids_with((21, 22), ()), shifted=False),
    ),  # its mask is computed from lengths
    ("xlm", {"causal": True}, partial(dense, ids=ids_with((22,), ()), shifted=False)),
]


@pytest.mark.parametrize("model_type, overrides, make", CASES, ids=[case[0] for case in CASES])
def test_a_rank_uses_the_positions_of_the_whole_batch(workers, model_type, overrides, make):
    def compared():
        import ds_cp

        model = families.build(model_type, tiny_config(model_type, **overrides))
        inputs, alone = make(model)
        batch = compare.Batch("batch", inputs, tuple(alone))
        truth = compare.reference(model, batch, families.in_double)
        shared = copy.deepcopy(model)
        ds_cp.context_parallel(shared, {"size": 2, "method": "ring", "unverified": "allow"})
        loss, gradients = compare.context_parallel(shared, batch)
        return compare.errors(loss, gradients, truth).worst, truth.tolerance, families.shared_forwards(shared)

    error, tolerance, shared_forwards = workers(2).run(compared)[0]
    assert error <= tolerance and shared_forwards == 1


def test_a_refused_batch_leaves_nothing_behind(workers):
    def refused_then_good():
        import ds_cp

        model = families.build("xlm", tiny_config("xlm"))
        ds_cp.context_parallel(model, {"size": 2, "method": "ring", "unverified": "allow"})
        mask = torch.ones(1, 23, dtype=torch.long)
        alive = weakref.ref(mask)
        try:
            model(input_ids=ids_with(()), attention_mask=mask, output_attentions=True)
        except BatchError:
            del mask
        model(input_ids=ids_with(()))
        gc.collect()
        return alive() is None

    assert workers(2).run(refused_then_good) == [True, True]


@pytest.mark.parametrize("name", ["cache_length", "past_key_values_length"])
def test_a_position_table_is_recognized_by_either_name_of_its_offset(name):
    """transformers 5.24 renamed the argument. An unknown table would count each shard from 0 without an error."""
    from ds_cp.patches.transformers.models import positions

    names: dict = {}
    exec(f"def forward(self, input_ids, {name}=0, position_ids=None): ...", names)
    kind = type("SomePositionalEmbedding", (torch.nn.Embedding,), {"forward": names["forward"]})
    kind.__module__ = "transformers.models.auto"  # any imported module
    assert positions._hooks_for(kind(4, 2)) is positions._hook_position_embedding
