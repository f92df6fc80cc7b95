"""Activation memory: one of four ranks holds a quarter of the memory of one process."""

import pytest
import torch

from harness import batches, models, subject
from harness.batches import BatchSpec
from harness.cases import config_of
from harness.models import ModelSpec

LLAMA = ModelSpec("llama", layers=4)
BATCH = BatchSpec("dense", 1, 2048)
LIMIT = 0.28  # of the memory of one process; the ideal is 0.25


def live_bytes(config, checkpointing):
    """Bytes of storages that a forward has created and that are alive before the backward pass."""
    from ds_cp.cli.bench.probes import LiveStorages

    model = subject.changed_model(LLAMA, config) if config else models.build(LLAMA, attention="sdpa")
    subject.enable_checkpointing(model.train(), checkpointing)
    inputs = batches.make(BATCH).inputs
    model(**inputs).loss.backward()  # the first forward creates rotary tables and schedules, which are no activations
    with LiveStorages() as storages:
        loss = model(**inputs).loss
        live = storages.live_bytes()
    assert torch.isfinite(loss)
    return live


@pytest.mark.parametrize("checkpointing", [None, "non-reentrant"])
@pytest.mark.parametrize("method", ["ring", "ulysses", "hybrid"])
def test_a_rank_of_four_holds_a_quarter(workers, method, checkpointing):
    whole = live_bytes(None, checkpointing)
    same_keys = {"tiled_loss": False, "recompute_attention": True}  # one process has neither
    for share in workers(4).run(live_bytes, config_of(method, 4) | same_keys, checkpointing):
        assert share <= LIMIT * whole
