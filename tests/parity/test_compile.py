"""torch.compile of an attached model: exact, and compiled once for all packings."""

import pytest
import torch

from harness import batches, oracle, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec

PACKINGS = [BatchSpec("packed", 1, 53, turn=turn) for turn in range(5)]
CP2 = {"size": 2, "method": "ring"}


def compiled_steps(model_spec, config, batch_specs, checkpointing=None):
    """For each step: (loss, gradients, number of compiled graphs, number of attention calls so far)."""
    from torch._dynamo.utils import counters

    from ds_cp.patches.transformers.attach import attachment

    model = subject.changed_model(model_spec, config).train()
    subject.enable_checkpointing(model, checkpointing)
    calls = attachment(model).mesh.attention_calls
    model.compile(backend="aot_eager")
    results = []
    with torch._dynamo.config.patch(error_on_recompile=False):
        for spec in batch_specs:
            model.zero_grad()
            loss = model(**batches.make(spec).inputs).loss
            loss.backward()
            frames = counters["stats"]["unique_graphs"]
            gradients = {n: g.clone() for n, g in oracle.gradients_of(model).items()}
            results.append((loss.item(), gradients, frames, dict(calls)))
    return results


def test_compiled_checkpointed_layers_reuse_their_saved_attention(workers):
    spec = ModelSpec("llama")
    ranks = workers(2).run(compiled_steps, spec, {"size": 2, "method": "ulysses"}, PACKINGS[:2], "non-reentrant")
    for index, batch in enumerate(PACKINGS[:2]):
        subject.check([rank[index][:2] for rank in ranks], oracle.truth(spec, batch))
        for rank in ranks:
            assert rank[index][2] == rank[0][2], "recompiled"
            assert rank[index][3] == {"forward": spec.layers * (index + 1), "backward": spec.layers * (index + 1)}


@pytest.mark.parametrize("config", [CP2, {"size": 2, "method": "ulysses"}], ids=["ring", "ulysses"])
def test_five_packings_are_exact_and_compile_once(workers, config):
    spec = ModelSpec("llama")
    ranks = workers(2).run(compiled_steps, spec, config, PACKINGS)
    graphs = [step[2] for step in ranks[0]]
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs == [graphs[0]] * len(PACKINGS), f"recompiled: graphs after each step {graphs}"
    for index, batch in enumerate(PACKINGS):
        subject.check([rank[index][:2] for rank in ranks], oracle.truth(spec, batch))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["deepseek_v4", "minimax_m3_vl_text"])
def test_layers_that_gather_the_sequence_are_excluded_from_compilation(workers, model_type):
    """Compressed KV and indexers need the whole sequence. The other layers are compiled."""
    spec, batch = ModelSpec(model_type), BatchSpec("packed", 3, 53)
    ranks = workers(2, 180).run(compiled_steps, spec, CP2, [batch])
    assert ranks[0][0][2] > 0, "nothing was compiled"
    got = oracle.mean_over_ranks([rank[0][1] for rank in ranks])
    assert oracle.total_error(got, oracle.truth(spec, batch).gradients) < 1e-5
