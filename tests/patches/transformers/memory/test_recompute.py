"""Gradient checkpointing: layers run twice, their attention runs once, and no message is sent twice."""

import copy
import gc

import deepspeed
import pytest
import torch
import torch.utils.checkpoint

from harness import batches, models, oracle, subject
from harness.batches import BatchSpec
from harness.cases import config_of
from harness.models import ModelSpec
from harness.oracle import truth

LLAMA = ModelSpec("llama")
PACKED = BatchSpec("packed", 3, 53)
KINDS = ["reentrant", "non-reentrant"]
WAYS = [("ring", 2), ("ulysses", 2), ("allgather", 4), ("hybrid", 4)]


class Counted:
    """Counts kernel calls, messages and bytes of this rank."""

    def __init__(self, model):
        from ds_cp.attention.kernels.reference import ReferenceKernel
        from ds_cp.attention.kernels.torch_flash import TorchKernel
        from ds_cp.patches.transformers.attach import attachment

        self.mesh, self.kernel_calls = attachment(model).mesh, {"forward": 0, "backward": 0}
        for kind in (TorchKernel, ReferenceKernel):
            for phase in self.kernel_calls:
                setattr(kind, phase, self._counting(getattr(kind, phase), phase))

    def _counting(self, method, phase):
        def counting(*args):
            self.kernel_calls[phase] += 1
            return method(*args)

        return counting

    def so_far(self):
        found = {"kernel " + phase: calls for phase, calls in self.kernel_calls.items()}
        for axis in (self.mesh.ring_group, self.mesh.ulysses_group):
            for phase in ("forward", "backward"):
                found[f"{axis.name} {phase} messages"] = axis.calls[phase]
                found[f"{axis.name} {phase} bytes"] = axis.sent[phase]
        return found


def counted_step(model_spec, config, specs, checkpointing, dtype=torch.float32):
    """Forwards, then one backward: the counts before and after the backward pass, the loss and the gradients."""
    model = subject.changed_model(model_spec, config, dtype).train()
    subject.enable_checkpointing(model, checkpointing)
    count = Counted(model)
    torch.manual_seed(3)
    with subject.in_full_precision(dtype):
        loss = sum(model(**batches.make(spec).inputs).loss for spec in specs) / len(specs)
        between = count.so_far()
        loss.backward()
    return between, count.so_far(), loss.item(), oracle.gradients_of(model)


def assert_equal(got, want):
    """Bitwise equality: a recomputed layer repeats its computation and reuses its saved attention."""
    assert got[2] == want[2]
    different = [name for name in want[3] if not torch.equal(got[3][name], want[3][name])]
    assert not different, different


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_attention_runs_once_and_no_message_is_sent_twice(workers, way, kind):
    specs = [PACKED, BatchSpec("dense", 1, 37)]  # two forwards precede the backward
    arguments = (LLAMA, config_of(*way), specs)
    plain = workers(way[1]).run(counted_step, *arguments, None)
    kept = workers(way[1]).run(counted_step, *arguments, kind)
    for got, want in zip(kept, plain, strict=True):
        assert_equal(got, want)
        assert got[0] == want[0], "in the forward passes"
        bytes_of_ulysses = {"ulysses backward bytes"}
        differ = {name for name in want[1] if got[1][name] != want[1][name]}
        assert differ <= bytes_of_ulysses, differ
    subject.check([result[2:] for result in kept], truth(LLAMA, *specs))


@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (8, 1), (9, 3)], ids=str)
def test_ulysses_sends_in_the_backward_pass_what_its_two_forwards_would_have_sent(workers, heads, kv_heads):
    """Per layer, with h' heads after repetition: forward e L d (2H + 2h') / 2 in two messages, backward twice that."""
    layers, length, spec = 2, 40, ModelSpec("llama", heads, kv_heads)
    ranks = workers(2).run(counted_step, spec, config_of("ulysses", 2), [BatchSpec("dense", 1, length)], "reentrant")
    assert all(after["ulysses forward messages"] == 2 * layers for _, after, *_ in ranks)
    assert all(after["ulysses backward messages"] == 2 * layers for _, after, *_ in ranks)
    repeated = max(kv_heads, 2)
    per_layer = 4 * (length // 2) * models.HEAD_DIM * (2 * heads + 2 * repeated) // 2
    for phase, times in (("forward", 1), ("backward", 2)):
        sent = sum(after[f"ulysses {phase} bytes"] for _, after, *_ in ranks)
        assert sent == 2 * layers * times * per_layer, phase


@pytest.mark.parametrize("way", [("ring", 2), ("ulysses", 2)], ids=str)
def test_with_recompute_attention_attention_runs_twice(workers, way):
    config = config_of(*way) | {"recompute_attention": True}
    plain = workers(2).run(counted_step, LLAMA, config_of(*way), [PACKED], None)
    again = workers(2).run(counted_step, LLAMA, config, [PACKED], "non-reentrant")
    for got, want in zip(again, plain, strict=True):
        assert_equal(got, want)
        assert got[1]["kernel forward"] == 2 * want[1]["kernel forward"]
        assert got[1][f"{way[0]} forward messages"] == 2 * want[1][f"{way[0]} forward messages"]
        assert got[1][f"{way[0]} backward bytes"] == want[1][f"{way[0]} backward bytes"]


TYPES = [
    # (model, method, kind of checkpointing)  # special property
    (ModelSpec("gpt_oss", 8, 2), ("ulysses", 2), "reentrant"),  # sinks and windows
    (ModelSpec("gpt_oss", 8, 2), ("hybrid", 4), "non-reentrant"),
    (ModelSpec("minicpm3", 8, 8), ("ulysses", 2), "non-reentrant"),  # v narrower than q and k
    (ModelSpec("minicpm3", 8, 8), ("hybrid", 4), "reentrant"),
    (ModelSpec("bloom", 8, 8), ("ulysses", 2), "non-reentrant"),  # ALiBi; padded, not packed
    (ModelSpec("gemma2", 8, 2), ("hybrid", 4), "non-reentrant"),  # softcap
    (ModelSpec("llama", 9, 3), ("ulysses", 2), "non-reentrant"),  # uneven heads
    (ModelSpec("llama", 8, 1), ("hybrid", 4), "reentrant"),  # one key head, repeated
    (ModelSpec("gemma4_text", 8, 2), ("ulysses", 2), "non-reentrant"),  # head dims differ by layer
]


@pytest.mark.parametrize("model, way, kind", TYPES, ids=lambda value: getattr(value, "type", str(value)))
def test_every_kind_of_attention_can_be_saved(workers, model, way, kind):
    batch = BatchSpec("left_pad", 3, 53) if model.type == "bloom" else PACKED
    plain = workers(way[1]).run(counted_step, model, config_of(*way), [batch], None)
    kept = workers(way[1]).run(counted_step, model, config_of(*way), [batch], kind)
    for got, want in zip(kept, plain, strict=True):
        assert_equal(got, want)
        assert got[1]["kernel forward"] == want[1]["kernel forward"] > 0
    subject.check([result[2:] for result in kept], truth(model, batch))


DROPOUT = (("attn_pdrop", 0.2), ("resid_pdrop", 0.2), ("embd_pdrop", 0.2))


@pytest.mark.parametrize("way", [("ring", 2), ("ulysses", 2)], ids=str)
def test_dropout_is_equal_in_both_runs_of_a_layer(workers, way):
    """The dropout seed of attention is drawn in the first run only, which must not advance the random stream of the layer."""
    model = ModelSpec("gpt2", overrides=DROPOUT)
    plain = workers(2).run(counted_step, model, config_of(*way), [PACKED], None)
    for kind in KINDS:
        for recompute in (False, True):
            config = config_of(*way) | {"recompute_attention": recompute}
            for got, want in zip(workers(2).run(counted_step, model, config, [PACKED], kind), plain, strict=True):
                assert_equal(got, want)


# ---- who sets the checkpoint function, and when ------------------------------------------------------------


def step_with(config, prepare, before):
    model = models.build(LLAMA).train()
    import ds_cp

    steps = [lambda: prepare(model), lambda: ds_cp.context_parallel(model, config)]
    for step in steps if before else reversed(steps):
        step()
    count = Counted(model)
    loss = model(**batches.make(PACKED).inputs).loss
    loss.backward()
    return count.so_far()["kernel forward"], count.so_far()["kernel backward"], loss.item(), oracle.gradients_of(model)


def transformers_own(model):
    subject.enable_checkpointing(model, "non-reentrant")


def deepspeeds(model):
    model._set_gradient_checkpointing(gradient_checkpointing_func=deepspeed.checkpointing.checkpoint)


def every_second_layer(model):
    model.activation_checkpointing_enable(every_n_layers=2)


def the_users_own(model):
    for layer in model.model.layers:
        layer.forward = _checkpointing(layer.forward, use_reentrant=False)


def the_users_own_reentrant(model):
    for layer in model.model.layers:
        layer.forward = _checkpointing(layer.forward, use_reentrant=True)


def _checkpointing(forward, use_reentrant):
    def checkpointed(hidden, **kwargs):
        return torch.utils.checkpoint.checkpoint(lambda x: forward(x, **kwargs), hidden, use_reentrant=use_reentrant)

    return checkpointed


@pytest.mark.parametrize("way", [("ring", 2), ("ulysses", 2)], ids=str)
@pytest.mark.parametrize(
    "prepare, before, runs",
    [
        (transformers_own, True, 1),
        (transformers_own, False, 1),
        (deepspeeds, False, 1),
        (every_second_layer, True, 1),
        (the_users_own, False, 2),
        (the_users_own_reentrant, True, 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_gradients_are_equal_for_every_checkpoint_function(workers, way, prepare, before, runs):
    """Layers of transformers save their attention under any checkpoint function. A custom checkpoint around them recomputes it."""
    ranks = workers(2).run(step_with, config_of(*way), prepare, before)
    plain = workers(2).run(counted_step, LLAMA, config_of(*way), [PACKED], None)
    for got, want in zip(ranks, plain, strict=True):
        assert_equal(got, want)
        assert got[0] == runs * want[1]["kernel forward"]
        assert got[1] == want[1]["kernel backward"]


# ---- lifetime of saved attention ---------------------------------------------------------------------------


def boxes():
    from ds_cp.attention.saved_attention import SavedAttention

    # `isinstance` reads `__class__`, which raises for a weak proxy of a freed object.
    return [each for each in gc.get_objects() if type(each) is SavedAttention]


def backend_that_lets_go_of_messages_late():
    """Holds all sent and received tensors, since threads of a backend may release them late."""
    from ds_cp import mesh

    held = []

    def holding(function):
        def communicate(*args, **kwargs):
            held.append((args, kwargs))
            return function(*args, **kwargs)

        return communicate

    for name in (
        "all_reduce",
        "all_to_all_single",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "batch_isend_irecv",
    ):
        if hasattr(mesh.dist, name):
            setattr(mesh.dist, name, holding(getattr(mesh.dist, name)))
        setattr(torch.distributed, name, holding(getattr(torch.distributed, name)))
    return held


def what_is_left(config, kind):
    messages = backend_that_lets_go_of_messages_late()
    model = subject.changed_model(LLAMA, config).train()
    subject.enable_checkpointing(model, kind)
    inputs = batches.make(PACKED).inputs
    loss = model(**inputs).loss
    held = sum(len(box._calls) for box in boxes())
    loss.backward(retain_graph=True)
    first = oracle.gradients_of(model)
    after_backward = sum(len(box._calls) for box in boxes())
    model.zero_grad()
    loss.backward()  # the saved attention has been freed, so attention runs again
    second = oracle.gradients_of(model)
    del loss
    gc.collect()
    gone = len(boxes())
    with torch.no_grad():
        model(**inputs)
    model.eval()(**inputs)
    without_graph = len(boxes())
    unused = model.train()(**inputs).loss
    del unused
    gc.collect()
    never_used = len(boxes())
    same = all(torch.equal(first[name], second[name]) for name in first)
    return len(messages) > 0, held, after_backward, gone, without_graph, never_used, same


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [("ring", 2), ("ulysses", 2)], ids=str)
def test_saved_attention_is_freed_after_use_and_not_saved_without_a_graph(workers, way, kind):
    for result in workers(2).run(what_is_left, config_of(*way), kind):
        assert result == (True, LLAMA.layers, 0, 0, 0, 0, True)


def step_that_counts_what_leaves(config):
    from ds_cp.patches.transformers.memory import offload_activations

    left = []

    def to_host(tensor):
        left.append(tuple(tensor.shape))
        return tensor.device, tensor.clone()

    offload_activations.to_host = to_host
    return left, counted_step(LLAMA, config, [PACKED], "reentrant")


@pytest.mark.parametrize("way", [("ring", 2), ("ulysses", 2)], ids=str)
def test_saved_attention_is_offloaded_with_the_inputs_of_the_layers(workers, way):
    out = (3, LLAMA.heads, 28 if way[0] == "ring" else 27, models.HEAD_DIM)  # 53 tokens on two ranks, padded
    plain = workers(2).run(counted_step, LLAMA, config_of(*way), [PACKED], None)
    ranks = workers(2).run(step_that_counts_what_leaves, config_of(*way) | {"offload_activations": True})
    for (left, got), want in zip(ranks, plain, strict=True):
        assert left.count(out) == LLAMA.layers
        assert_equal(got, want)


def copied_and_undone(config):
    from ds_cp import patches
    from ds_cp.patches.transformers.memory import recompute

    model = subject.changed_model(LLAMA, config).train()
    subject.enable_checkpointing(model, "non-reentrant")
    inputs = batches.make(PACKED).inputs
    model(**inputs).loss.backward()  # layers are wrapped now
    alone = oracle.gradients_of(model)
    model.zero_grad()
    twin = copy.deepcopy(model)
    losses = [each(**inputs).loss for each in (model, twin)]
    both = []
    for loss, each in zip(losses, (model, twin)):
        loss.backward()
        both.append(oracle.gradients_of(each))
    wrapped = [layer._gradient_checkpointing_func for layer in model.model.layers]
    patches.restore()
    undone = [layer._gradient_checkpointing_func for layer in model.model.layers]
    assert all(map(recompute._is_wrapped, wrapped)) and not any(map(recompute._is_wrapped, undone))
    return alone, both


def test_a_copy_has_its_own_saved_attention_and_restore_unwraps_the_layers(workers):
    for alone, both in workers(2).run(copied_and_undone, config_of("ulysses", 2)):
        for gradients in both:
            assert all(torch.equal(gradients[name], alone[name]) for name in alone)
