"""MLPs in chunks of tokens: exact under every ZeRO stage, for any number of chunks."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness import batches, engine, models, oracle, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec
from harness.oracle import truth

MLP = 96  # intermediate size of the harness's models
RING = {"size": 2, "method": "ring", "tiled_mlp": True}
LONG = BatchSpec("packed", 3, 150)


def with_small_tiles(tokens=7, dtype=torch.float32):
    from ds_cp.patches.transformers.memory import chunked_mlp

    chunked_mlp.CHUNK_BYTES = tokens * MLP * dtype.itemsize


class Intermediate(TorchDispatchMode):
    """The largest number of tokens whose intermediate activation any operation returns."""

    tokens = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dim() > 1 and made.size(-1) == MLP and made.is_contiguous():
            self.tokens = max(self.tokens, made.numel() // MLP)
        return made


def measured(spec, config, batch, checkpointing=None, dtype=torch.float32, compiled=False):
    with_small_tiles(dtype=dtype)
    model = subject.changed_model(spec, config, dtype).train()
    subject.enable_checkpointing(model, checkpointing)
    run = torch.compile(model, backend="eager") if compiled else model
    with Intermediate() as widest, subject.in_full_precision(dtype):
        loss = run(**batches.make(batch).inputs).loss
        loss.backward()
    return (loss.item(), oracle.gradients_of(model)), widest.tokens


CASES = [
    (ModelSpec("llama"), None, torch.float64, False),
    (ModelSpec("llama"), "reentrant", torch.float32, False),
    (ModelSpec("gemma2"), "non-reentrant", torch.float32, False),
    (ModelSpec("phi"), None, torch.float32, False),
    (ModelSpec("phi3", kv_heads=4), None, torch.float32, False),
    (ModelSpec("moshi"), None, torch.float64, False),  # its MLP requires three dims
    (ModelSpec("llama"), None, torch.float32, True),
]


@pytest.mark.parametrize("spec, checkpointing, dtype, compiled", CASES)
def test_a_model_with_chunked_mlps_is_exact_and_allocates_few_rows(workers, spec, checkpointing, dtype, compiled):
    results = workers(2).run(measured, spec, RING, LONG, checkpointing, dtype, compiled)
    subject.check([result for result, _ in results], truth(spec, LONG), dtype)
    # the probe also counts weights: 64 x 96 as 64 rows, the joined projection of phi3 as 128
    assert all(tokens <= 2 * 64 for _, tokens in results), results[0][1]


@pytest.mark.parametrize("switch", ["auto", False])
def test_few_tokens_are_not_chunked_by_default(workers, switch):
    results = workers(2).run(measured, ModelSpec("llama"), RING | {"tiled_mlp": switch}, LONG)
    assert all(tokens == 3 * 75 for _, tokens in results)


def test_auto_chunks_mlps_with_large_activations(workers):
    def large():
        from ds_cp.patches.transformers.memory import chunked_mlp

        chunked_mlp.LARGE_BYTES = 3 * 75 * MLP * 4 - 1
        return measured(ModelSpec("llama"), RING | {"tiled_mlp": "auto"}, LONG)

    results = workers(2).run(large)
    subject.check([result for result, _ in results], truth(ModelSpec("llama"), LONG))
    assert all(tokens < 3 * 75 for _, tokens in results)


def stepped(spec, config, groups, checkpointing):
    with_small_tiles()
    return engine.train_one_step(spec, config, groups, checkpointing)


@pytest.mark.parametrize("stage, checkpointing", [(0, None), (2, "reentrant"), (3, None), (3, "non-reentrant")])
def test_every_zero_stage_is_exact_with_different_numbers_of_chunks_per_rank(workers, stage, checkpointing):
    """The two data-parallel groups have sequences of different lengths, so their ranks run different numbers of chunks."""
    spec, groups = ModelSpec("llama"), [[BatchSpec("packed", 1, 23), BatchSpec("dense", 1, 37)],
                                        [BatchSpec("dense", 1, 150, "middle"), BatchSpec("packed", 1, 53)]]  # fmt: skip
    results = workers(4).run(stepped, spec, engine.json_config(RING, stage, 1, 2, 2), groups, checkpointing)
    losses = [[truth(spec, batch).loss for batch in group] for group in groups]
    engine.check(results, truth(spec, *(batch for group in groups for batch in group)), losses)


def test_an_adapter_inside_an_mlp_has_exact_gradients(workers):
    peft = pytest.importorskip("peft")

    def adapted(config):
        import ds_cp

        with_small_tiles()
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, target_modules=["gate_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(models.build(ModelSpec("llama")), lora).train()
        if config:
            ds_cp.context_parallel(model, config)
        loss = model(**batches.make(BatchSpec("dense", 2, 37)).inputs).loss
        loss.backward()
        return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    loss, gradients = workers(1).run(adapted, None)[0]
    ranks = workers(2).run(adapted, RING)
    for got, _ in ranks:
        oracle.assert_close_loss(got, loss, 1e-6)
    oracle.assert_close_gradients(oracle.mean_over_ranks([g for _, g in ranks]), gradients, 1e-5)
