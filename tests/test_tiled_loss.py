"""The loss in tiles of tokens: as exact as the loss of whole logits, and nobody ever holds [L, vocab]."""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ds_cp import tiled
from ds_cp.agreement import BatchError
from ds_cp.deferred import DeferredLogits
from ds_cp.head_call import LocalLogits
from harness import batches, engine, models, oracle, subject
from harness.batches import BatchSpec
from harness.models import VOCAB, ModelSpec
from harness.oracle import truth

TOKENS_PER_TILE = 5  # so that no tile is alone, and the last one is shorter


@contextmanager
def small_tiles(tokens=TOKENS_PER_TILE, vocab=VOCAB, bytes_each=4):
    before, tiled.TILE_BYTES = tiled.TILE_BYTES, tokens * vocab * bytes_each
    try:
        yield
    finally:
        tiled.TILE_BYTES = before


# ---- the function itself, against F.cross_entropy on whole logits ------------------------------------------


def problem(dtype, bias, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias_ = (torch.randn(*s, generator=generator, dtype=dtype) for s in ((23, 6), (11, 6), (11,)))
    targets = torch.randint(0, 11, (23,), generator=generator)
    targets[5:10] = -100  # a whole tile
    targets[[0, 20, 22]] = -100
    return [x.requires_grad_() for x in (hidden, weight, *((bias_,) if bias else ()))], targets


def softcapped(logits):
    return 3 * torch.tanh(logits / 3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("finish", [lambda x: x, softcapped, lambda x: x[..., :9] * 0.5], ids=["", "softcap", "cut"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sum_and_gradients_equal_those_of_whole_logits(bias, finish, smoothing):
    leaves, targets = problem(torch.float64, bias)
    targets = targets.clamp(max=8)
    with small_tiles(5, 11, 8):
        got = tiled.linear_cross_entropy(
            leaves[0], leaves[1], leaves[2] if bias else None, targets, finish, label_smoothing=smoothing
        )
    want = F.cross_entropy(finish(F.linear(*leaves)), targets, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)
    upstream = torch.tensor(0.37, dtype=torch.float64)
    for mine, true in zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream)):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-14)


def test_nothing_but_ignored_targets_is_zero_and_has_zero_gradients():
    leaves, targets = problem(torch.float32, True)
    total = tiled.linear_cross_entropy(*leaves, torch.full_like(targets, -100), lambda x: x)
    assert total.item() == 0
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_part_gets_no_gradient_and_the_other_the_same(frozen):
    leaves, targets = problem(torch.float64, False)
    leaves[frozen].requires_grad_(False)
    other = leaves[1 - frozen]
    with small_tiles(5, 11, 8):
        got = torch.autograd.grad(tiled.linear_cross_entropy(*leaves, None, targets, lambda x: x), other)[0]
    want = torch.autograd.grad(F.cross_entropy(F.linear(*leaves), targets, reduction="sum"), other)[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_exact_as_with_whole_logits(dtype):
    """Many tiles of one token each: gradients of weights must be summed in fp32."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=generator).to(dtype).requires_grad_() for s in ((512, 8), (50, 8)))
    targets = torch.randint(0, 50, (512,), generator=generator)
    precise = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = torch.autograd.grad(F.cross_entropy(F.linear(*precise), targets), precise)
    whole = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight).float(), targets), (hidden, weight))
    with small_tiles(1, 50, 4):
        total = tiled.linear_cross_entropy(hidden, weight, None, targets, lambda x: x)
    got = torch.autograd.grad(total / 512, (hidden, weight))
    for mine, its, true in zip(got, whole, want):
        assert (mine.double() - true).norm() <= 1.5 * (its.double() - true).norm()


def test_backward_may_run_twice():
    leaves, targets = problem(torch.float32, False)
    total = tiled.linear_cross_entropy(*leaves, None, targets, lambda x: x)
    first = torch.autograd.grad(2 * total, leaves, retain_graph=True)
    second = torch.autograd.grad(total, leaves)
    assert all(torch.equal(a, 2 * b) for a, b in zip(first, second))


def test_weights_that_change_before_the_backward_pass_do_not_matter():
    """Its gradients are taken in the forward pass, where plain autograd could only say that a weight was changed."""
    leaves, targets = problem(torch.float64, True)
    want = torch.autograd.grad(F.cross_entropy(F.linear(*leaves), targets, reduction="sum"), leaves)
    total = tiled.linear_cross_entropy(*leaves, targets, lambda x: x)
    with torch.no_grad():
        leaves[1].mul_(2)
    torch.testing.assert_close(torch.autograd.grad(total, leaves), want)


# ---- deferred logits: what is noted, and what computes them ------------------------------------------------


class Head(torch.nn.Linear):
    """Counts what it is asked to do."""

    asked = 0

    def forward(self, hidden, work):
        self.asked += 1
        return work(hidden, self.weight, self.bias)


NOTED = {
    "scaled": lambda x: x * 0.25,
    "divided": lambda x: x / 8.0,
    "softcapped": lambda x: torch.tanh(x / 2.0) * 2.0,
    "by a module": lambda x: torch.nn.Tanh()(x),
    "upcast": lambda x: x.float(),
    "moved where it is": lambda x: x.to("cpu").to(torch.float32),
    "cut to the true vocabulary": lambda x: x[..., :9],
    "cut, spelt otherwise": lambda x: x[:, :, :9],
    "in place on a name": lambda x: x.__truediv__(3),
    "negative": lambda x: -x,
    "times a tensor without dims": lambda x: 2 * (x * torch.tensor(0.5)),
}
COMPUTED = {
    "of some tokens": lambda x: x[:, :2],
    "of one token": lambda x: x[0, 1],
    "summed": lambda x: x.sum(-1),
    "softmax": lambda x: F.softmax(x, -1),
    "with a bias": lambda x: x + torch.arange(11.0),
    "from the left": lambda x: torch.arange(11.0) * x,
    "reciprocal": lambda x: 1 / x,
    "concatenated": lambda x: torch.cat([x, x], dim=1),
    "compared": lambda x: x > 0,
    "an attribute": lambda x: x.T,
}


def deferred(seed=0):
    torch.manual_seed(seed)
    head = Head(6, 11)
    hidden = torch.randn(2, 7, 6, requires_grad=True)
    return head, hidden, DeferredLogits.of(head, hidden)


@pytest.mark.parametrize("name", NOTED)
def test_pointwise_operations_compute_nothing(name):
    head, hidden, logits = deferred()
    found, want = NOTED[name](logits), NOTED[name](F.linear(hidden, head.weight, head.bias))
    assert isinstance(found, DeferredLogits) and head.asked == 0
    assert (found.shape, found.dtype, found.device) == (want.shape, want.dtype, want.device)
    targets = torch.randint(0, 9, (2, 7))
    got = found.cross_entropy(targets, -100)
    assert head.asked == 1
    exact = F.cross_entropy(want.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(got, exact)
    for mine, true in zip(
        torch.autograd.grad(got, [hidden, head.weight]), torch.autograd.grad(exact, [hidden, head.weight])
    ):
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("name", COMPUTED)
def test_any_other_use_computes_the_logits(name):
    head, hidden, logits = deferred()
    want = F.linear(hidden, head.weight, head.bias)
    torch.testing.assert_close(COMPUTED[name](logits / 2), COMPUTED[name](want / 2))
    assert head.asked == 1


def test_logits_of_weights_that_changed_meanwhile_are_refused():
    head = Head(6, 11)
    logits = DeferredLogits.of(head, torch.randn(1, 4, 6))
    with torch.no_grad():
        head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weight of Head was changed in place .* logits that are computed only now"):
        logits.exp()


def test_logits_changed_in_place_are_what_the_loss_sees():
    head, hidden, logits = deferred()
    targets = torch.randint(0, 9, (2, 7))
    logits[..., 9:] = torch.finfo(torch.float32).min  # chameleon hides its image tokens so
    want = F.linear(hidden, head.weight, head.bias)[..., :9]
    torch.testing.assert_close(
        logits.cross_entropy(targets, -100), F.cross_entropy(want.flatten(0, 1), targets.flatten(), reduction="sum")
    )


# ---- whole models on two ranks, against one process --------------------------------------------------------

TYPES = {
    "llama": ModelSpec("llama"),
    "tied": ModelSpec("gpt2"),
    "softcap": ModelSpec("gemma2"),
    "logit_scale": ModelSpec("cohere2"),
    "bias": ModelSpec("phi"),
    "logits_scaling": ModelSpec("granite"),
}
RING = {"size": 2, "method": "ring"}


class Largest(TorchDispatchMode):
    """The largest tensor over the vocabulary that any operation made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and VOCAB in tensor.shape:
                self.elements = max(self.elements, tensor.numel())
        return made


def measured(spec, config, batch, dtype=torch.float32, compiled=False, prepare=None):
    """(loss, gradients) as the harness has it, with small tiles, and the largest tensor made."""
    model = subject.changed_model(spec, config, dtype).train()
    if prepare:
        prepare(model)
    run = torch.compile(model, backend="eager") if compiled else model
    made = batches.make(batch)
    with small_tiles(), Largest() as largest, subject.in_full_precision(dtype):
        output = run(**made.inputs)
        output.loss.backward()
    assert isinstance(output.logits, LocalLogits)
    return (output.loss.item(), oracle.gradients_of(model)), largest.elements


LONG = BatchSpec("packed", 3, 150)  # [L, vocab] is larger than any activation or weight


@pytest.mark.parametrize("switch", ["auto", False])
@pytest.mark.parametrize("name", TYPES)
def test_a_model_is_exact_and_its_logits_exist_only_without_tiles(workers, name, switch):
    spec = TYPES[name]
    results = workers(2).run(measured, spec, RING | {"tiled_loss": switch}, LONG, torch.float64)
    subject.check([result for result, _ in results], truth(spec, LONG), torch.float64)
    local = 3 * 75 * VOCAB
    assert all((elements >= local) == (switch is False) for _, elements in results), results[0][1]


EXTRAS = [
    BatchSpec("dense", 2, 37, "first_eighth"),  # one rank has nothing but ignored labels
    BatchSpec("dense", 1, 37, "none"),
    BatchSpec("left_pad", 3, 37, extras=("num_items_in_batch",)),
    BatchSpec("packed", 1, 53, extras=("shift_labels", "num_items_in_batch as a tensor")),
]


@pytest.mark.parametrize("batch", EXTRAS, ids=str)
def test_any_labels_are_exact(workers, batch):
    results = workers(2).run(measured, TYPES["llama"], RING, batch)
    subject.check([result for result, _ in results], truth(TYPES["llama"], batch))


@pytest.mark.parametrize("name", ["llama", "softcap"])
def test_a_compiled_model_is_exact(workers, name):
    results = workers(2).run(measured, TYPES[name], RING, LONG, compiled=True)
    subject.check([result for result, _ in results], truth(TYPES[name], LONG))
    assert all(elements < 3 * 75 * VOCAB for _, elements in results)


def freeze_head(model):
    model.lm_head.weight.requires_grad_(False)


def test_a_frozen_head_still_teaches_the_layers(workers):
    results = workers(2).run(measured, TYPES["llama"], RING, LONG, prepare=freeze_head)
    want = truth(TYPES["llama"], LONG)
    for (_, gradients), _ in results:
        assert (gradients.pop("lm_head.weight") == 0).all()
    gradients = {name: value for name, value in want.gradients.items() if name != "lm_head.weight"}
    got = oracle.mean_over_ranks([gradients for (_, gradients), _ in results])
    oracle.assert_close_gradients(got, gradients, oracle.TOLERANCE[torch.float32])


def test_a_copy_projects_with_its_own_weights(workers):
    def copied():
        model = subject.changed_model(TYPES["llama"], RING).train()
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.lm_head.weight.mul_(3)
        inputs = batches.make(LONG).inputs
        with small_tiles():
            return model(**inputs).loss.item(), twin(**inputs).loss.item()

    model, inputs = models.build(TYPES["llama"]), batches.make(BatchSpec("dense", 3, 150)).inputs
    for own, scaled in workers(2).run(copied):
        oracle.assert_close_loss(own, truth(TYPES["llama"], LONG).loss, 1e-6)
        assert abs(scaled - own) > 0.1 * own
    assert model(**inputs).loss is not None


def steps_under_an_engine(spec, config, groups):
    with small_tiles():
        return engine.train_one_step(spec, config, groups)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "tied"])
def test_every_stage_takes_the_exact_step_whatever_the_numbers_of_tiles(workers, name, stage):
    """The two data-parallel groups have sequences of other lengths, so their ranks run other numbers of tiles."""
    spec, groups = TYPES[name], [[BatchSpec("packed", 1, 23), BatchSpec("dense", 1, 37)],
                                 [BatchSpec("dense", 1, 150, "middle"), BatchSpec("packed", 1, 53)]]  # fmt: skip
    config = engine.json_config(RING, stage, 1, 2, 2)
    results = workers(4).run(steps_under_an_engine, spec, config, groups)
    losses = [[truth(spec, batch).loss for batch in group] for group in groups]
    engine.check(results, truth(spec, *(batch for group in groups for batch in group)), losses)


def evaluated():
    model = subject.changed_model(TYPES["llama"], RING).eval()
    with small_tiles(), torch.no_grad(), Largest() as largest:
        output = model(**batches.make(LONG).inputs)
    return output.loss.item(), output.logits, largest.elements


def test_evaluation_with_labels_returns_whole_logits(workers):
    want = truth(TYPES["llama"], LONG)
    for loss, logits, _ in workers(2).run(evaluated):
        oracle.assert_close_loss(loss, want.loss, 1e-6)
        oracle.assert_close_logits(logits, want.logits[0], 1e-5)


def evaluated_beyond_the_limit():
    from ds_cp.patches.transformers import heads

    heads.LOGITS_LIMIT = 1
    loss, logits, elements = evaluated()
    assert isinstance(logits, LocalLogits)
    with pytest.raises(BatchError, match="those of the whole sequence take more than .* prediction_loss_only"):
        logits.argmax(-1)
    return loss, "limited", elements


def test_evaluation_of_a_loss_alone_holds_no_logits(workers):
    for loss, logits, elements in workers(2).run(evaluated_beyond_the_limit):
        oracle.assert_close_loss(loss, truth(TYPES["llama"], LONG).loss, 1e-6)
        assert logits == "limited" and elements < 3 * 75 * VOCAB


def evaluated_by_zero_3(specs, config, limit):
    """(loss, type of the logits, and those that are whole) of this group's batch."""
    from ds_cp.patches.transformers import heads

    heads.LOGITS_LIMIT = limit
    model = engine.initialize(config, models.build(TYPES["llama"]))
    model.eval()
    with small_tiles(), torch.no_grad():
        output = model(**batches.make(specs[subject.data_parallel_rank(2)]).inputs)
    kind = type(output.logits).__name__
    return output.loss.item(), kind, output.logits if kind == "Tensor" else None


def test_groups_below_and_above_the_limit_gather_weights_alike(workers):
    specs = [BatchSpec("dense", 1, 37), BatchSpec("packed", 1, 53)]
    config = engine.json_config(RING, 3, 1, 1, 2)
    results = workers(4).run(evaluated_by_zero_3, specs, config, 40 * VOCAB * 4)
    for rank, (loss, kind, logits) in enumerate(results):
        want = truth(TYPES["llama"], specs[rank // 2])
        oracle.assert_close_loss(loss, want.loss, 1e-6)
        assert kind == ("Tensor" if rank < 2 else "LocalLogits")
        if logits is not None:
            oracle.assert_close_logits(logits, want.logits[0], 1e-5)


# ---- heads that PEFT changed, and autocast -----------------------------------------------------------------

ADAPTED = {
    "an adapter on the head": dict(target_modules=["q_proj", "lm_head"]),  # its logits are computed at once
    "a head trained whole beside adapters": dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
}


def adapted(config, settings):
    import peft

    import ds_cp

    torch.manual_seed(0)
    model = peft.get_peft_model(models.build(TYPES["llama"]), peft.LoraConfig(r=4, init_lora_weights=False, **settings))
    if config:
        ds_cp.context_parallel(model, config)
    with small_tiles(), Largest() as largest:
        loss = model.train()(**batches.make(BatchSpec("dense", 3, 150)).inputs).loss
        loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    return (loss.item(), gradients), largest.elements


@pytest.mark.parametrize("name", ADAPTED)
def test_heads_changed_by_peft_are_exact(workers, name):
    (loss, gradients), _ = workers(1).run(adapted, None, ADAPTED[name])[0]
    results = workers(2).run(adapted, RING, ADAPTED[name])
    for (got, _), elements in results:
        oracle.assert_close_loss(got, loss, 1e-6)
        assert (elements < 3 * 75 * VOCAB) == ("modules_to_save" in ADAPTED[name])
    got = oracle.mean_over_ranks([found for (_, found), _ in results])
    oracle.assert_close_gradients(got, gradients, 1e-5)


def test_under_autocast_it_is_as_exact_as_with_whole_logits():
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, requires_grad=True) for shape in ((64, 16), (50, 16)))
    targets = torch.randint(0, 50, (64,))
    true = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")
    with torch.autocast("cpu", torch.bfloat16), small_tiles(7, 50):
        whole = F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")
        tiles = tiled.linear_cross_entropy(hidden, weight, None, targets, lambda x: x)
    gradients = [torch.autograd.grad(loss, (hidden, weight)) for loss in (true, whole, tiles)]
    for want, its, mine in zip(*gradients):
        assert 0 < (mine - want).norm() <= 1.2 * (its - want).norm()
