"""Patches are listed and undone; engines and forwards do not see each other; without the key nothing changes."""

import gc
import importlib
import re
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch

from harness import batches, engine, models, oracle, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec

LLAMA = ModelSpec("llama")
RING = {"size": 2, "method": "ring"}
DENSE = BatchSpec("dense", 1, 37)


def fingerprint():
    """Every place that ds_cp may touch."""
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


def test_an_attached_model_goes_when_nobody_holds_it(workers):
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
        config = base.config  # as a search over hyperparameters shares it between its models
        first, second = attached(config), attached(config)
        alive = [[weakref.ref(module) for module in model.modules()] for model in (first, second)]
        del first
        gc.collect()
        assert not any(part() for part in alive[0]) and listed() == 1
        assert config._attn_implementation == "ds_cp"  # the second's
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


def test_dropout_differs_between_ranks_inside_the_region_and_is_equal_outside(workers):
    def draws():
        from peft import LoraConfig, get_peft_model

        model = models.build(LLAMA)
        model = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj", "lm_head"]))
        import ds_cp

        ds_cp.context_parallel(model, RING)
        model.train()
        masks = {"q_proj": [], "lm_head": []}
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Dropout) and (".0." in name or "lm_head" in name):
                kind = "lm_head" if "lm_head" in name else "q_proj"
                module.register_forward_hook(lambda m, i, out, kind=kind: masks[kind].append((out == 0)[:, :8].clone()))
        torch.manual_seed(5)
        inputs = subject.inputs_without_labels(batches.make(BatchSpec("dense", 1, 64)))
        for _ in range(2):
            model(**inputs)  # without labels hidden states are gathered: the head works on equal tokens
        return masks, torch.rand(3)

    (first, after_first), (second, after_second) = workers(2).run(draws)
    again = workers(2).run(draws)[0]
    assert not torch.equal(first["q_proj"][0], second["q_proj"][0])
    assert not torch.equal(first["q_proj"][0], first["q_proj"][1]), "the next forward draws anew"
    assert all(torch.equal(a, b) for a, b in zip(first["lm_head"], second["lm_head"]))
    assert torch.equal(after_first, after_second)
    assert torch.equal(first["q_proj"][1], again[0]["q_proj"][1]), "the seed reproduces it"


def test_a_model_without_dropout_draws_no_random_numbers(workers):
    def numbers():
        model = subject.changed_model(LLAMA, RING)
        torch.manual_seed(3)
        model(**batches.make(DENSE).inputs)
        return torch.rand(1).item()

    torch.manual_seed(3)
    assert workers(2).run(numbers) == [torch.rand(1).item()] * 2


def test_lora_gradients_are_exact_and_the_base_stays_frozen(workers):
    def lora(shared):
        from peft import LoraConfig, get_peft_model

        model = models.build(LLAMA)
        torch.manual_seed(1)
        model = get_peft_model(
            model, LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        if shared:
            import ds_cp

            ds_cp.context_parallel(model, RING)
        loss = model(**batches.make(DENSE).inputs).loss
        loss.backward()
        assert all(p.grad is None for name, p in model.named_parameters() if "lora" not in name)
        return loss.item(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}

    loss, gradients = workers(1).run(lora, False)[0]
    ranks = workers(2).run(lora, True)
    oracle.assert_close_loss(ranks[0][0], loss, 1e-6)
    oracle.assert_close_gradients(oracle.mean_over_ranks([g for _, g in ranks]), gradients, 1e-5)


def test_generation_runs_whole_on_every_rank(workers):
    def generate(shared):
        model = models.build(LLAMA)
        if shared:
            import ds_cp

            ds_cp.context_parallel(model, RING)
        prompt = batches.make(DENSE).inputs["input_ids"]
        return model.eval().generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)

    want = workers(1).run(generate, False)[0]
    for tokens in workers(2).run(generate, True):
        assert torch.equal(tokens, want)


def test_what_another_library_lacks_is_named_and_nothing_is_left_behind(workers):
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
    """The function is there and does something else, as after a change of its library."""

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


def test_a_patch_of_somebody_elses_is_not_asked_what_it_names():
    from ds_cp import patches

    class Owner:
        __module__ = "some_library.trainer"

        def method(self): ...

    patches.require(Owner, "method", "why", "a name")  # this file is another library than Owner's
    Owner.method.__module__ = Owner.__module__
    with pytest.raises(patches.MissingTargetError, match="some_library has a .*Owner.method that does not know a name"):
        patches.require(Owner, "method", "why", "a name")


DECLARED = [
    "transformers<6,>=5.2", "deepspeed>=0.1", 'trl>=1.5; extra == "trl"', "nobody-has-this>=3",
    'transformers<5.9,>=5.2; extra == "tested"', 'trl<1.9,>=1.5; extra == "tested"',
]  # fmt: skip
VERSIONS = [  # what is installed, and what a run is told: nothing, one line, a refusal
    ({"transformers": "5.2.0", "trl": "1.8.7"}, "", ""),
    ({"transformers": "5.2.0.dev0", "trl": "1.5"}, "", r"transformers 5\.2\.0\.dev0 \(<6,>=5\.2\)"),
    ({"transformers": "5.9.1", "trl": "1.5"}, r"run with transformers 5\.9\.1 \(.*ds_cp verify", ""),
    ({"transformers": "6.0", "trl": "2.0"}, "", r"transformers 6\.0 "),
    ({"transformers": "5.3+local", "trl": "1.10"}, r"run with trl 1\.10 \(", ""),
    ({"transformers": "5.3", "trl": "1.4"}, "", r"trl 1\.4 "),
]


@pytest.mark.parametrize("installed, told, refused", VERSIONS)
def test_versions_outside_of_the_range_are_told_or_refused(monkeypatch, installed, told, refused):
    from ds_cp import patches
    from ds_cp.config import ConfigError
    from ds_cp.patches import versions

    def check(rank):
        versions.ranges.cache_clear()
        monkeypatch.setenv("RANK", rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            versions.check()
        return [str(each.message) for each in caught]

    with monkeypatch.context() as patched:
        patched.setattr(versions.metadata, "requires", lambda name: DECLARED)
        patched.setattr(versions.metadata, "version", lambda name: installed.get(name, "0.2"))
        for name in ("trl", "nobody_has_this"):
            patched.setitem(sys.modules, name, sys) if name == "trl" else patched.delitem(sys.modules, name, False)
        if refused:
            with pytest.raises(ConfigError, match=refused):
                check("0")
            before = patches.installed()
            with pytest.raises(ConfigError, match=refused):
                patches.install()  # what reading a key with size > 1 calls
            assert patches.installed() == before
        else:
            said = check("0")
            assert (len(said), said == [] or bool(re.search(told, said[0]))) == (bool(told), True)
            assert check("1") == []
    versions.ranges.cache_clear()


def test_the_pinned_versions_are_inside_of_what_is_declared():
    from ds_cp.patches import versions

    lines = (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and line[0] != "#")
    tested = versions.ranges(versions.TESTED)
    assert set(tested) >= {"torch", "deepspeed", "transformers", "accelerate", "trl", "peft"}
    for declared in (tested, versions.ranges(), versions.ranges("trl"), versions.ranges("test")):
        for name, allowed in declared.items():
            assert pins[name] in allowed if name in pins else name in ("packaging", "setuptools"), (name, allowed)
