"""What a forward leaves for its backward: a rank of four holds a quarter of what one process holds."""

import pytest
import torch

from harness import batches, models, subject
from harness.batches import BatchSpec
from harness.cases import config_of
from harness.models import ModelSpec

LLAMA = ModelSpec("llama", layers=4)
BATCH = BatchSpec("dense", 1, 2048)
LIMIT = 0.28  # of one process; 0.25 would be perfect


def live_bytes(config, checkpointing):
    """Of storages that a forward has made and that somebody still holds while its loss waits for the backward."""
    from ds_cp.cli.bench.probes import LiveStorages

    model = subject.changed_model(LLAMA, config) if config else models.build(LLAMA, attention="sdpa")
    subject.enable_checkpointing(model.train(), checkpointing)
    inputs = batches.make(BATCH).inputs
    model(**inputs).loss.backward()  # rotary tables and plans of the first forward are nobody's activations
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
