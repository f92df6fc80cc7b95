"""Layers in chunks of tokens with K and V in host memory: exact for every method and mask, with bounded memory."""

import contextlib
import functools
from contextlib import contextmanager

import pytest
import torch
import torch.utils.checkpoint

from data.models import TYPES_WITHOUT_KV_HEADS
from harness import batches, engine, memory, models, oracle, subject
from harness.batches import BatchSpec
from harness.cases import config_of, name_of
from harness.models import HEAD_DIM, ModelSpec
from harness.oracle import truth
from harness.pairwise import covering

RING = config_of("ring", 2) | {"offload_kv": 16}
BATCH = BatchSpec("packed", 3, 53)

FACTORS = {
    "way": [("ring", 2), ("ring", 3), ("ulysses", 2), ("hybrid", 4)],
    "layout": ["zigzag", "contiguous", "auto"],
    "type": ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"],
    "kind": ["dense", "packed", "right_pad", "left_pad"],
    "extras": [(), ("shift_labels", "num_items_in_batch as a tensor")],
    "shape": [(1, 150), (3, 37)],
    "block": [7, 16, 64],
    "checkpointing": [None, "reentrant", "non-reentrant"],
    "memory": [(), ("recompute_attention",), ("offload_activations",)],
    "dtype": [torch.float32, torch.float64],
}
CONSTRAINTS = [
    # terms of the gradient of gpt_oss's router bias cancel, which leaves an error of 1e-5 in fp32 without chunks as well
    (("type", "dtype"), lambda type, dtype: type != "gpt_oss" or dtype == torch.float64),
]
CASES = covering(FACTORS, CONSTRAINTS)


@contextmanager
def double_inside_of_tiles(dtype):
    """The layers run inside an autograd function, where a mode of torch functions set outside is inactive."""
    from ds_cp.chunked import layer as chunked_layer

    current_autocast = chunked_layer.current_autocast

    def in_double(device):
        autocast = current_autocast(device)

        @contextmanager
        def both():
            with autocast(), subject.in_full_precision(dtype):
                yield

        return both

    chunked_layer.current_autocast = in_double
    with contextlib.ExitStack() as done:
        done.callback(setattr, chunked_layer, "current_autocast", current_autocast)
        yield


def in_tiles(*args, dtype, **kwargs):
    with double_inside_of_tiles(dtype):
        return subject.loss_and_gradients(*args, dtype, **kwargs)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_chunked_layers_are_exact(workers, case):
    (method, size), dtype = case["way"], case["dtype"]
    spec = ModelSpec(case["type"], kv_heads=8 if case["type"] in TYPES_WITHOUT_KV_HEADS else 2)
    batch = BatchSpec(case["kind"], *case["shape"], extras=case["extras"])
    config = config_of(method, size, case["layout"]) | dict.fromkeys(case["memory"], True)
    config["offload_kv"] = case["block"]
    results = workers(size).run(in_tiles, spec, config, [batch], dtype=dtype, checkpointing=case["checkpointing"])
    subject.check(results, truth(spec, batch), dtype)


def on_a_host_of_its_own():
    """Host memory as numpy arrays, which the probe of torch storages does not count."""
    from ds_cp.attention import host_kv
    from ds_cp.patches.transformers.memory import offload_activations

    class NumpyRows(host_kv.HostRows):
        def __init__(self, shape, dtype, device):
            super().__init__((0,), dtype, device)
            self._rows = torch.zeros(shape, dtype=dtype).numpy()

        def write(self, start, rows):
            self._rows[start : start + len(rows)] = rows.numpy()

        def read(self, start, stop):
            return torch.from_numpy(self._rows[start:stop]).clone()

    host_kv.HostRows = NumpyRows
    offload_activations.to_host = lambda x: (
        x if isinstance(x, torch.nn.Parameter) or x.dim() < 3 else x.detach().numpy().copy()
    )
    offload_activations.from_host = lambda x: x if isinstance(x, torch.Tensor) else torch.from_numpy(x)


def with_a_host(*arguments):
    on_a_host_of_its_own()
    return memory.per_token(*arguments)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_the_peak_per_token_is_five_hidden_states(workers, method):
    """At the peak, a token holds the input and output of a layer or their gradients, ids and rotary angles."""
    config = config_of(method, 2) | {"offload_activations": True}
    hidden = 4 * ModelSpec("llama").heads * HEAD_DIM
    whole, tiled = (
        workers(2).run(with_a_host, ModelSpec("llama"), config | extra, "non-reentrant", (96, 192))[0]
        for extra in ({}, {"offload_kv": 16})
    )
    assert tiled <= 5 * hidden < whole / 3


@pytest.mark.parametrize("stage", [0, 3])
def test_every_zero_stage_is_exact_with_different_numbers_of_chunks_per_rank(workers, stage):
    """The two data-parallel groups have sequences of different lengths, so their ranks run different numbers of chunks."""
    spec, groups = ModelSpec("llama"), [[BatchSpec("packed", 1, 23), BatchSpec("dense", 1, 37)],
                                        [BatchSpec("dense", 1, 150, "middle"), BatchSpec("packed", 1, 53)]]  # fmt: skip
    config = engine.json_config(config_of("ring", 2) | {"offload_kv": 16}, stage, 1, 2, 2)
    results = workers(4).run(engine.train_one_step, spec, config, groups, None)
    losses = [[truth(spec, batch).loss for batch in group] for group in groups]
    engine.check(results, truth(spec, *(batch for group in groups for batch in group)), losses)


@pytest.mark.parametrize("name, checkpointing, dtype", [("qwen3_next", None, torch.float64),
                                                        ("nemotron_h", "non-reentrant", torch.float32),
                                                        ("beam", None, torch.float64)])  # fmt: skip
def test_layers_that_are_not_chunked_and_further_arguments_of_layers_are_exact(workers, name, checkpointing, dtype):
    spec, batch = ModelSpec(name), BatchSpec("packed", 3, 53)
    results = workers(2).run(in_tiles, spec, RING, [batch], dtype=dtype, checkpointing=checkpointing)
    subject.check(results, truth(spec, batch), dtype)


def test_two_forwards_before_one_backward(workers):
    spec, batch_specs = ModelSpec("gemma2"), [BatchSpec("packed", 1, 53), BatchSpec("dense", 1, 64, seed=1)]
    config = config_of("hybrid", 4) | {"offload_kv": 5}
    results = workers(4).run(subject.loss_and_gradients_of_two_forwards, spec, config, batch_specs)
    subject.check(results, truth(spec, *batch_specs))


def test_backward_with_retain_graph_may_run_twice(workers):
    def twice():
        model = subject.changed_model(ModelSpec("llama"), RING).train()
        loss = model(**batches.make(BATCH).inputs).loss
        loss.backward(retain_graph=True)
        once = oracle.gradients_of(model)
        loss.backward()
        return once, oracle.gradients_of(model)

    for once, both in workers(2).run(twice):
        for name, gradient in once.items():
            torch.testing.assert_close(both[name], 2 * gradient)


def test_evaluation(workers):
    spec, other = ModelSpec("llama"), config_of("ring", 2)
    for tiled, plain in zip(*(workers(2).run(subject.full_logits, spec, c, BATCH) for c in (RING, other))):
        torch.testing.assert_close(tiled, plain)


@pytest.mark.parametrize("targets", [["k_proj"], ["v_proj", "down_proj"], ["q_proj", "o_proj"]])
def test_adapters_on_frozen_layers_have_exact_gradients(workers, targets):
    peft = pytest.importorskip("peft")

    def adapted(config):
        import ds_cp

        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        model = peft.get_peft_model(models.build(ModelSpec("llama")), lora).train()
        if config:
            ds_cp.context_parallel(model, config)
        loss = model(**batches.make(BatchSpec("dense", 1, 64)).inputs).loss
        loss.backward()
        return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    loss, gradients = workers(1).run(adapted, None)[0]
    subject.check(workers(2).run(adapted, RING), oracle.Truth(loss, gradients, []))


def test_chunked_layers_send_as_many_bytes_as_the_ring(workers):
    def sent(config):
        import ds_cp

        model = subject.changed_model(ModelSpec("llama"), config).train()
        model(**batches.make(BATCH).inputs).loss.backward()
        ring = attachment(model).mesh.ring_group
        return ring.sent["forward"], ring.sent["backward"], ds_cp.traffic(model)

    from ds_cp.patches.transformers.attach import attachment

    whole, tiled = (workers(2).run(sent, config_of("ring", 2) | extra)[0] for extra in ({}, {"offload_kv": 16}))
    assert tiled == whole


def test_a_long_prompt_fills_the_cache(workers):
    def generated(config):
        from ds_cp.patches.transformers import prefill

        prefill.MIN_PROMPT_TOKENS = 30
        model = subject.changed_model(ModelSpec("llama"), config).eval()
        ids = batches.make(BatchSpec("dense", 2, 37)).inputs["input_ids"]
        return model.generate(ids, max_new_tokens=4, do_sample=False)

    tiled, plain = (workers(2).run(generated, config) for config in (RING, config_of("ring", 2)))
    assert all(torch.equal(one, plain[0]) for one in tiled)


def in_bf16(extra, autocast, checkpointed=False):
    """Gradients under autocast of fp32 weights or with bf16 weights, and with or without a custom checkpoint around each layer."""
    dtype = torch.float32 if autocast else torch.bfloat16
    model = subject.changed_model(ModelSpec("llama"), config_of("ring", 2) | extra, dtype).train()
    for layer in model.model.layers if checkpointed else ():
        layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batches.make(BATCH).inputs).loss
    loss.backward()
    return oracle.gradients_of(model)


def distance(gradients, want):
    both = [(gradients[name].double(), want[name].double()) for name in want]
    return (sum((a - b).square().sum() for a, b in both) / sum(b.square().sum() for _, b in both)).sqrt()


@pytest.mark.parametrize("autocast, checkpointed", [(True, False), (False, True)])
def test_low_precision_is_exact_under_autocast_and_a_custom_checkpoint(workers, autocast, checkpointed):
    exact = truth(ModelSpec("llama"), BATCH).gradients
    plain, tiled = (
        oracle.mean_over_ranks(workers(2).run(in_bf16, *way))
        for way in (({}, autocast), ({"offload_kv": 16}, autocast, checkpointed))
    )
    assert distance(tiled, exact) <= 1.1 * distance(plain, exact)
    assert distance(tiled, plain) > 1e-4, "another order of summation, in bf16"


@pytest.mark.parametrize("again", [False, True])
def test_attention_is_computed_once_unless_recompute_attention_is_set(workers, again):
    def forwards():
        from ds_cp.attention.kernels.torch_flash import TorchKernel

        calls, forward = [], TorchKernel.forward
        TorchKernel.forward = lambda *args: calls.append(1) or forward(*args)
        model = subject.changed_model(ModelSpec("llama"), RING | {"recompute_attention": again}).train()
        loss = model(**batches.make(BATCH).inputs).loss
        first = len(calls)
        loss.backward()
        return first, len(calls)

    for first, both in workers(2).run(forwards):
        assert first and both == first * (2 if again else 1)


def test_mlps_of_layers_that_are_not_chunked_are_chunked(workers):
    def tiled():
        from ds_cp.patches.transformers.memory import chunked_mlp

        rows, run = [], chunked_mlp.run_in_chunks
        chunked_mlp.run_in_chunks = lambda module, *args: rows.append(module) or run(module, *args)
        model = subject.changed_model(ModelSpec("bamba"), RING | {"tiled_mlp": True}).train()
        model(**batches.make(BatchSpec("dense", 1, 64)).inputs).loss.backward()
        others = [layer for layer in model.model.layers if not hasattr(layer, "self_attn")]
        return len(set(rows)), len(others)

    for bound, others in workers(2).run(tiled):
        assert bound == others > 0


def bidirectional_blocks(length):
    where = torch.arange(length) // 10
    return (where[:, None] >= where[None, :]).expand(2, 1, length, length)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_dense_masks_and_dropout_are_independent_of_chunks(workers, method):
    """A dense mask, and dropout that draws by global positions."""

    def dropped(config):
        spec = ModelSpec("llama", overrides=(("attention_dropout", 0.3),))
        model = subject.changed_model(spec, config).train()
        inputs = batches.make(BatchSpec("dense", 2, 53)).inputs | {"attention_mask": bidirectional_blocks(53)}
        torch.manual_seed(7)
        loss = model(**inputs).loss
        loss.backward()
        return loss.item(), oracle.gradients_of(model)

    config = config_of(method, 2)
    plain = workers(2).run(dropped, config)
    want = oracle.Truth(plain[0][0], oracle.mean_over_ranks([gradients for _, gradients in plain]), [])
    subject.check(workers(2).run(dropped, config | {"offload_kv": 5}), want)
