"""Recurrent layers and short convolutions: results equal those of one process that runs each document alone."""

import dataclasses
import importlib.util
import inspect
import pkgutil

import pytest
import torch
import torch.utils.checkpoint
import transformers.models

from harness import batches, engine, models, oracle, subject
from harness.batches import BatchSpec
from harness.cases import config_of
from harness.models import ModelSpec
from harness.oracle import truth

DENSE, PACKED = BatchSpec("dense", 2, 37), BatchSpec("packed", 3, 53)
OF_THE_HEAD = ("shift_labels", "num_items_in_batch as a tensor")
LEFT, RIGHT = BatchSpec("left_pad", 3, 37), BatchSpec("right_pad", 3, 37)
TWO_HEADS = (("linear_num_value_heads", 2), ("linear_num_key_heads", 1))

CASES = [
    # delta rules: grouped heads, fewer heads than ranks, uneven channels
    ("qwen3_next", (), ("ring", 2), PACKED),
    ("qwen3_next", (), ("ulysses", 2), LEFT),
    ("qwen3_next", (), ("ring", 3), RIGHT),
    ("qwen3_next", TWO_HEADS, ("ring", 3), PACKED),
    ("kimi_linear", (), ("hybrid", 4), PACKED),
    # Mamba-2: groups shared by all heads, more or fewer groups than ranks
    ("bamba", (), ("allgather", 3), dataclasses.replace(PACKED, extras=OF_THE_HEAD)),
    ("mamba2", (), ("ring", 4), LEFT),
    ("nemotron_h", (), ("ulysses", 2), DENSE),
    ("falcon_h1", (), ("hybrid", 4), LEFT),
    ("zamba2", (), ("ring", 2), PACKED),
    # Mamba: B and C are shared by all channels; uneven channels
    ("jamba", (), ("ring", 3), PACKED),
    ("mamba", (), ("ulysses", 2), RIGHT),
    # xLSTM: the matrix memory is a module
    ("xlstm", (("mode", "train"), ("chunk_size", 1)), ("ring", 3), PACKED),
    # short convolutions, shifted tokens
    ("lfm2", (), ("ring", 3), PACKED),
    ("rwkv", (), ("ring", 3), RIGHT),
    # layers that run on whole sequences
    ("minimax", (), ("ulysses", 2), PACKED),
    ("minimax", (), ("ring", 3), BatchSpec("dense", 2, 2)),  # one rank has no token
    ("recurrent_gemma", (), ("ring", 2), PACKED),
    ("zaya", (), ("ring", 3), LEFT),
]


@pytest.mark.parametrize(
    "model_type, overrides, way, batch", CASES, ids=[f"{t}-{way[0]}{way[1]}-{batch.kind}" for t, _, way, batch in CASES]
)
def test_gradients_equal_each_document_alone(workers, model_type, overrides, way, batch):
    model = ModelSpec(model_type, overrides=overrides)
    results = workers(way[1]).run(subject.loss_and_gradients, model, config_of(*way), [batch], torch.float64)
    subject.check(results, truth(model, batch), torch.float64)


# ---- gradient checkpointing --------------------------------------------------------------------------------


def step(model_spec, config, specs, checkpointing):
    """Forwards, then one backward, in fp32."""
    model = subject.changed_model(model_spec, config).train()
    subject.enable_checkpointing(model, checkpointing)
    loss = sum(model(**batches.make(spec).inputs).loss for spec in specs) / len(specs)
    loss.backward()
    return loss.item(), oracle.gradients_of(model)


@pytest.mark.parametrize("kind, again", [("reentrant", False), ("non-reentrant", True)], ids=str)
@pytest.mark.parametrize(
    "model, ranks",
    [(ModelSpec("qwen3_next", overrides=TWO_HEADS), 3), (ModelSpec("rwkv"), 2), (ModelSpec("zaya"), 2)],
    ids=lambda value: getattr(value, "type", value),
)
def test_a_recomputed_layer_finds_the_region_of_its_forward(workers, model, ranks, kind, again):
    """Two forwards with sequences of different lengths precede the backward pass, so that a wrong region raises."""
    config = config_of("ring", ranks) | {"recompute_attention": again}
    specs = [RIGHT if model.type == "rwkv" else PACKED, BatchSpec("dense", 2, 64)]
    plain = workers(ranks).run(step, model, config, specs, None)
    for got, want in zip(workers(ranks).run(step, model, config, specs, kind), plain, strict=True):
        assert got[0] == want[0]
        oracle.assert_close_gradients(got[1], want[1], 1e-6)  # a reentrant checkpoint accumulates in another order


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_custom_checkpoint_around_a_recurrent_layer_is_refused(workers, use_reentrant):
    def step():
        model = subject.changed_model(ModelSpec("lfm2"), config_of("ring", 2)).train()
        for layer in model.model.layers:
            layer.forward = _checkpointing(layer.forward, use_reentrant)
        model(**batches.make(DENSE).inputs).loss.backward()

    workers(2).run_expecting_error(step, "Lfm2ShortConv is recomputed .* Use the model's gradient checkpointing")


def _checkpointing(forward, use_reentrant):
    def checkpointed(hidden, **kwargs):
        return torch.utils.checkpoint.checkpoint(lambda x: forward(x, **kwargs), hidden, use_reentrant=use_reentrant)

    return checkpointed


# ---- messages, engines, evaluation -------------------------------------------------------------------------


def counted(model_spec, config, spec):
    from ds_cp.patches.transformers.attach import attachment

    model = subject.changed_model(model_spec, config).train()
    loss = model(**batches.make(spec).inputs).loss
    group = attachment(model).mesh.cp_group
    before = dict(group.calls), dict(group.sent)
    loss.backward()
    return before, (dict(group.calls), dict(group.sent))


def test_each_function_sends_one_message_in_each_direction(workers):
    """lfm2 has one convolution of 64 channels. A rank sends half of x [B, L, 64], and half of the output in return."""
    length, elements = 40, 2 * 20 * 32
    for before, after in workers(2).run(
        counted, ModelSpec("lfm2"), config_of("ring", 2), BatchSpec("dense", 2, length)
    ):
        for (calls, sent), phase in ((before, "forward"), (after, "backward")):
            assert calls[phase] == 2
            assert sent[phase] == 2 * elements * 4


@pytest.mark.parametrize("model_type", ["bamba", "minimax"])
def test_zero_3_takes_the_same_step(workers, model_type):
    """The groups have different numbers of documents. The gathers of ZeRO-3 must not depend on them."""
    model = ModelSpec(model_type)
    groups = [[BatchSpec("packed", 1, 53)], [BatchSpec("dense", 1, 37)]]
    config = engine.json_config(config_of("ring", 2), 3, 1, 1, 2)
    results = workers(4).run(engine.train_one_step, model, config, groups)
    losses = [[truth(model, batch).loss for batch in group] for group in groups]
    engine.check(results, truth(model, *(batch for group in groups for batch in group)), losses)


@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba", "rwkv", "zamba2"])
def test_generation_and_calls_with_a_cache_are_those_of_one_process(workers, model_type):
    def differences(model_type):
        import ds_cp

        model = models.build(ModelSpec(model_type)).eval()
        ids = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(4))
        asked = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
        with torch.no_grad():
            want = model.generate(ids, **asked), model(input_ids=ids, use_cache=True).logits
            ds_cp.context_parallel(model, config_of("ring", 2))
            got = model.generate(ids, **asked), model(input_ids=ids, use_cache=True).logits
        return [not torch.equal(a, b) for a, b in zip(got, want)]

    assert workers(2).run(differences, model_type) == [[False, False]] * 2


def test_evaluation_gives_the_whole_logits(workers):
    want = truth(ModelSpec("qwen3_next"), LEFT).logits[0]
    for logits in workers(2).run(subject.full_logits, ModelSpec("qwen3_next"), config_of("ring", 2), LEFT):
        oracle.assert_close_logits(logits[0], want, 1e-4)


def test_a_recurrent_layer_that_bypasses_ds_cp_raises(workers):
    def step():
        model = subject.changed_model(ModelSpec("lfm2"), config_of("ring", 2))
        model.model.layers[0].conv = torch.nn.Identity()
        model.model.layers[0].conv.forward = lambda hidden_states, **_: hidden_states
        model(**batches.make(DENSE).inputs)

    workers(2).run_expecting_error(step, "1 of 2 attention or recurrent layers went through ds_cp")


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "causal_conv1d_fn"])
def test_a_layer_that_bypasses_a_patched_function_raises(workers, name):
    """In some versions of transformers a layer keeps a reference to the function, or binds a kernel later."""

    def step():
        from transformers.models.qwen3_next import modeling_qwen3_next as kind

        model = subject.changed_model(ModelSpec("qwen3_next"), config_of("ring", 2))
        setattr(kind, name, inspect.unwrap(getattr(kind, name)))
        model(**batches.make(DENSE).inputs)

    said = rf"Qwen3NextGatedDeltaNet of transformers .* did not call {name}"
    workers(2).run_expecting_error(step, said)


def test_an_initial_state_is_refused(workers):
    def step():
        from transformers.models.qwen3_next import modeling_qwen3_next as kind

        model = subject.changed_model(ModelSpec("qwen3_next"), config_of("ring", 2))
        function = kind.torch_chunk_gated_delta_rule
        state = torch.zeros(2, 8, 8, 8)
        kind.torch_chunk_gated_delta_rule = lambda *args, **given: function(*args, **given | {"initial_state": state})
        model(**batches.make(DENSE).inputs)

    workers(2).run_expecting_error(
        step, "torch_chunk_gated_delta_rule gets initial_state, of which ds_cp does not know"
    )


def test_patches_are_listed_and_undone(workers):
    def differences():
        import ds_cp.patches as patches

        kind = importlib.import_module("transformers.models.lfm2.modeling_lfm2")
        before = kind.causal_conv1d_fn
        model = subject.changed_model(ModelSpec("lfm2"), config_of("ring", 2))
        targets = [patch.target for patch in patches.installed()]
        assert kind.causal_conv1d_fn is not before
        assert "transformers.models.lfm2.modeling_lfm2.causal_conv1d_fn" in targets
        patches.restore()
        assert kind.causal_conv1d_fn is before
        assert not any("forward" in vars(module) for module in model.modules())
        return model(**batches.make(DENSE).inputs).loss.item()

    alone = models.build(ModelSpec("lfm2"))(**batches.make(DENSE).inputs).loss.item()
    assert workers(2).run(differences) == [alone] * 2


# ---- tables of functions -----------------------------------------------------------------------------------


def modeling_files():
    for package in pkgutil.iter_modules(transformers.models.__path__):
        name = f"transformers.models.{package.name}.modeling_{package.name}"
        if importlib.util.find_spec(name):
            yield name


def test_the_tables_name_the_first_parameters_of_every_function():
    from ds_cp.patches.transformers.models import recurrent_tables

    found = set()
    for name in (name for name in modeling_files() if "causal_conv1d_fn" in source(name) or "rwkv" in name):
        module = importlib.import_module(name)
        for function, (layouts, _) in recurrent_tables.FUNCTIONS.items():
            if hasattr(module, function):
                parameters = [*inspect.signature(getattr(module, function)).parameters]
                assert parameters[: len(layouts)] == [*layouts], (name, function)
                found.add(function)
    assert found == set(recurrent_tables.FUNCTIONS)


def source(name):
    return importlib.util.find_spec(name).loader.get_source(name)


# ---- broken on purpose -------------------------------------------------------------------------------------


def the_order_of_tokens_is_not_restored(patch):
    from ds_cp.layout import Layout

    patch(Layout, "unshard_index", property(lambda self: torch.arange(self.seq_len)))


def a_state_leaks_into_the_next_document(patch):
    from ds_cp.recurrent.per_document import PerDocument

    patch(PerDocument, "of", staticmethod(lambda *_: PerDocument(None)))


def a_rank_keeps_the_gradient_of_its_own_tokens(patch):
    from ds_cp.recurrent.channels import HeadExchange

    to_tokens = HeadExchange.to_tokens
    patch(
        HeadExchange, "to_tokens", lambda self, x, phase: [t * (phase == "forward") for t in to_tokens(self, x, phase)]
    )


@pytest.mark.parametrize(
    "fault", [the_order_of_tokens_is_not_restored, a_state_leaks_into_the_next_document,
              a_rank_keeps_the_gradient_of_its_own_tokens],
    ids=lambda fault: fault.__name__,
)  # fmt: skip
def test_the_parity_check_detects_a_fault(workers, fault):
    def broken(*arguments):
        fault(setattr)
        return subject.loss_and_gradients(*arguments)

    model, config = ModelSpec("lfm2"), config_of("ring", 2)
    results = workers(2).run(broken, model, config, [PACKED], torch.float64)
    with pytest.raises(AssertionError):
        subject.check(results, truth(model, PACKED), torch.float64)
