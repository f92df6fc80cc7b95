"""Patches are listed and undone, engines in one process are independent, and nothing changes without the key."""

import gc
import importlib
import re
import sys
import weakref

import pytest
import torch

from harness import batches, engine, models, oracle, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec

LLAMA = ModelSpec("llama")
RING = {"size": 2, "method": "ring"}
DENSE = BatchSpec("dense", 1, 37)


def fingerprint():
    """Every object that a patch may replace, by name."""
    import accelerate.accelerator
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from transformers import AttentionInterface, AttentionMaskInterface, Trainer
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
    from transformers.loss.loss_utils import LOSS_MAPPING

    owners = [DeepSpeedConfig, DeepSpeedEngine, HfDeepSpeedConfig, HfTrainerDeepSpeedConfig, Trainer,
              accelerate.accelerator.Accelerator]  # fmt: skip
    state = {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}
    state |= {f"attention.{name}": value for name, value in AttentionInterface._global_mapping.items()}
    state |= {f"mask.{name}": value for name, value in AttentionMaskInterface._global_mapping.items()}
    state |= {f"loss.{name}": value for name, value in LOSS_MAPPING.items()}
    state["prepare_data_loader"] = accelerate.accelerator.prepare_data_loader
    return {name: value for name, value in state.items() if callable(value)}


def changed(before, after):
    return sorted(name for name in before.keys() | after.keys() if before.get(name) is not after.get(name))


def test_an_attached_model_is_freed_when_it_is_no_longer_referenced(workers):
    def come_and_go():
        import ds_cp
        from ds_cp import patches

        def attached(config):
            model = type(base)(config)
            ds_cp.context_parallel(model, RING)
            model(**batches.make(DENSE).inputs).loss.backward()
            return model

        def listed():
            return sum(patch.target.startswith("model ") for patch in patches.installed())

        base = models.build(LLAMA)
        config = base.config  # shared between models, as in a hyperparameter search
        first, second = attached(config), attached(config)
        alive = [[weakref.ref(module) for module in model.modules()] for model in (first, second)]
        del first
        gc.collect()
        assert not any(part() for part in alive[0]) and listed() == 1
        assert config._attn_implementation == "ds_cp"  # set by the second model
        second(**batches.make(DENSE).inputs).loss.backward()
        del second
        gc.collect()
        assert not any(part() for part in alive[1]) and listed() == 0
        return config._attn_implementation

    assert workers(2).run(come_and_go) == ["sdpa"] * 2


def test_every_patch_is_listed_and_restore_undoes_all_of_them(workers):
    def install_and_restore():
        from ds_cp import patches

        patches.restore()
        clean = fingerprint()
        engine.activate()
        patches.on_import("deepspeed.runtime.config")
        patches.on_import("accelerate.utils.deepspeed")
        model = subject.changed_model(LLAMA, RING)
        inputs = batches.make(DENSE).inputs
        shared = model(**inputs).loss.item()
        listed = [patch.target for patch in patches.installed()]
        touched = changed(clean, fingerprint())
        assert all(patch.why for patch in patches.installed())
        patches.restore()
        assert changed(clean, fingerprint()) == []
        assert patches.installed() == ()
        assert model.config._attn_implementation == "sdpa"
        assert not model.model._forward_pre_hooks and not hasattr(model, "_loss_function")
        return listed, touched, shared, model(**inputs).loss.item()

    for listed, touched, shared, alone in workers(2).run(install_and_restore):
        assert shared == pytest.approx(alone, rel=1e-6)
        assert "model LlamaForCausalLM" in listed
        assert len(touched) >= 8
        for name in touched:
            assert any(name.split(".")[-1] in target for target in listed), f"{name} is not listed in {listed}"


def test_without_the_key_or_with_size_1_the_run_is_bit_for_bit_the_same(workers):
    def one_step(context_parallel):
        model = models.build(LLAMA)
        made = engine.initialize(engine.json_config(context_parallel, 2, dp=2), model)
        spec = BatchSpec("dense", 1, 37, seed=torch.distributed.get_rank())
        return engine.step(made, [batches.make(spec).inputs])

    def untouched():
        from ds_cp import patches

        patches.restore()
        return one_step(None)

    plain = workers(2).run(untouched)
    for key in (None, {"size": 1}):
        for got, want in zip(workers(2).run(one_step, key), plain):
            assert got[0] == want[0]
            for a, b in zip(got[1:], want[1:]):
                assert all(torch.equal(a[name], b[name]) for name in b)


def test_two_engines_with_different_keys_live_in_one_process(workers):
    keys = [{"size": 4, "method": "ring"}, {"size": 2, "method": "ulysses"}, None]
    specs = [BatchSpec("packed", 1, 53), BatchSpec("dense", 1, 37), BatchSpec("dense", 1, 37)]

    def three_engines():
        made = []
        for key, stage in zip(keys, (2, 3, 1)):
            size = key["size"] if key else 1
            made.append(engine.initialize(engine.json_config(key, stage, dp=4 // size), models.build(LLAMA)))
        losses = [one(**batches.make(spec).inputs).loss for one, spec in zip(made, specs)]
        for one, loss in reversed(list(zip(made, losses))):
            one.backward(loss)
        return [(loss.item(), engine.full_gradients(one.module)) for one, loss in zip(made, losses)]

    for results in workers(4, timeout=110).run(three_engines):
        for (loss, gradients), spec in zip(results, specs):
            want = oracle.truth(LLAMA, spec)
            oracle.assert_close_loss(loss, want.loss, 1e-6)
            oracle.assert_close_gradients(gradients, want.gradients, 1e-5)


def test_a_missing_or_changed_patch_target_is_named_and_no_patch_remains(workers):
    def message(spoil):
        from ds_cp import patches

        patches.restore()
        spoil()
        try:
            patches.install()
            from ds_cp.patches.transformers import trainer

            trainer._install_trainer()
        except patches.MissingTargetError as error:
            return str(error), [patch.target for patch in patches.installed()]
        return "", []

    for spoil, missing in SPOILED:
        said, left = workers(1).run(message, spoil)[0]
        assert re.search(missing, said) and "Nothing was started" in said and "take the key out" in said, (
            said,
            missing,
        )
        assert not left or "Trainer" in missing, left


def _without(module, owner, name):
    def spoil():
        delattr(getattr(importlib.import_module(module), owner), name)

    return spoil


def _not_knowing(module, owner, name):
    """Replaces a function by one that does not use the expected names, as after a change in its library."""

    def spoil():
        def other(*args, **kwargs): ...

        place = importlib.import_module(module)
        place = getattr(place, owner) if owner else place
        other.__module__ = module
        setattr(place, name, property(other) if isinstance(vars(place)[name], property) else other)

    return spoil


def _unimportable(module):
    def spoil():
        sys.modules[module] = None

    return spoil


SPOILED = [
    (_without("deepspeed.runtime.engine", "DeepSpeedEngine", "deepspeed_io"), r"deepspeed [\d.]+ has no .*\.deepspeed_io"),
    (_not_knowing("deepspeed.runtime.config", "DeepSpeedConfig", "__init__"), r"DeepSpeedConfig\.__init__ .* not know mpu"),
    (_not_knowing("deepspeed.utils.z3_leaf_module", "", "z3_leaf_module"), r"deepspeed [\d.]+ has .* not know _z3_leaf"),
    (_not_knowing("accelerate.accelerator", "", "prepare_data_loader"), r"not know num_processes, process_index"),
    (_not_knowing("transformers", "PreTrainedModel", "loss_function"), r"transformers [\d.]+ has .*know _loss_function"),
    (_unimportable("accelerate.parallelism_config"), r"accelerate\.parallelism_config"),
    (_without("transformers", "Trainer", "get_tp_size"), r"transformers [\d.]+ has no .*Trainer\.get_tp_size"),
    (_not_knowing("transformers", "Trainer", "compute_loss"), r"Trainer\.compute_loss that .* get_tp_size"),
    (_not_knowing("transformers", "Trainer", "evaluation_loop"), r"Trainer\.evaluation_loop that .* gather_function"),
]  # fmt: skip


def test_a_function_patched_by_another_library_is_not_inspected():
    from ds_cp import patches

    class Owner:
        __module__ = "some_library.trainer"

        def method(self): ...

    patches.require(Owner, "method", "why", "a name")  # the function is defined in another library than its owner
    Owner.method.__module__ = Owner.__module__
    with pytest.raises(patches.MissingTargetError, match="some_library has a .*Owner.method that does not know a name"):
        patches.require(Owner, "method", "why", "a name")
