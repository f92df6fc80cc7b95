"""PEFT: gradients of every kind of adapter equal those of one process under every ZeRO stage, and the base stays frozen."""

import json

import pytest
import torch
from deepspeed.utils import safe_get_full_grad

from harness import batches, engine, models, oracle
from harness.batches import BatchSpec
from harness.models import ModelSpec

LLAMA = ModelSpec("llama")
BATCH = BatchSpec("dense", 2, 37)
TOKENS = 5  # virtual tokens of a prompt


def lora(**more):
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj", "down_proj"]} | more)


def ia3():
    from peft import IA3Config

    return IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])


def prompt():
    from peft import PromptTuningConfig

    return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS)


def p_tuning():
    from peft import PromptEncoderConfig

    return PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS, encoder_hidden_size=16)


def adaption_prompt():
    from peft import AdaptionPromptConfig

    return AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=TOKENS, adapter_layers=1)


ADAPTERS = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "modules to save": lambda: lora(modules_to_save=["lm_head", "norm"]),
    "embeddings and head": lambda: lora(target_modules=["embed_tokens", "lm_head", "o_proj"]),
    "ia3": ia3,
    "prompt": prompt,
    "p-tuning": p_tuning,
    "adaption prompt": adaption_prompt,
    "trainable tokens": lambda: lora(trainable_token_indices={"embed_tokens": [3, 5, 7]}),
    "mlps only": lambda: lora(target_modules=["down_proj"]),
}


def adapted(name, quantised=None):
    """The model with an adapter of random weights. LoRA's B is zero by default, which makes the gradient of A zero."""
    from peft import get_peft_model

    model = models.build(LLAMA) if quantised is None else four_bits(quantised)
    model = get_peft_model(model, ADAPTERS[name]())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def four_bits(folder):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    return model.train()  # otherwise bitsandbytes repacks the weights for inference


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def one_process(name, quantised=None):
    model = adapted(name, quantised)
    loss = model(**batches.make(BATCH).inputs).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.double() for name, parameter in trainable(model).items()}


def shared(name, config, folder, quantised=None):
    from ds_cp.patches.transformers.attach import attachment

    made = engine.initialize(config, adapted(name, quantised))
    loss = made(**batches.make(BATCH).inputs).loss
    made.backward(loss)
    gradients = {name: safe_get_full_grad(parameter).double() for name, parameter in trainable(made.module).items()}
    made.step()
    if config["zero_optimization"]["stage"] < 3:
        made.module.save_pretrained(folder)
    return loss.item(), gradients, attachment(made.module).forwards


def check(workers, folder, name, stage, cp, quantised=None):
    loss, gradients = workers(1).run(one_process, name, quantised)[0]
    config = engine.json_config(cp, stage, BATCH.rows)
    for got, own, forwards in workers(2).run(shared, name, config, folder, quantised):
        assert forwards == 1  # the forward was sharded
        assert got == pytest.approx(loss, rel=1e-5)
        assert set(own) == set(gradients)
        oracle.assert_close_gradients(own, gradients, oracle.TOLERANCE[torch.float32])


CASES = [(name, (1, 2, 3)[index % 3], ("ring", "ulysses")[index % 2]) for index, name in enumerate(ADAPTERS)]


@pytest.mark.parametrize(
    "name, stage, method", [*CASES, ("lora", 3, "ring"), ("dora", 3, "ulysses"), ("mlps only", 3, "ring")]
)
def test_gradients_of_adapters_are_exact_and_the_base_has_none(workers, tmp_path, name, stage, method):
    check(workers, tmp_path, name, stage, {"size": 2, "method": method})
    saved = tmp_path / "adapter_config.json"
    assert not saved.exists() or "ds_cp" not in json.dumps(json.loads(saved.read_text()))


def test_chunked_layers_train_behind_frozen_embeddings(workers, tmp_path):
    """No input of the first layer requires a gradient."""
    check(workers, tmp_path, "lora", 3, {"size": 2, "method": "ring", "offload_kv": 16})


@pytest.mark.parametrize("stage", [2, 3])
def test_qlora_over_a_base_of_four_bits_is_exact(workers, tmp_path, stage):
    pytest.importorskip("bitsandbytes", reason="QLoRA's base is quantised by bitsandbytes")
    models.build(ModelSpec("llama", kv_heads=4)).save_pretrained(tmp_path / "base")
    check(workers, tmp_path, "lora", stage, {"size": 2, "method": "ring"}, quantised=tmp_path / "base")


def test_prefix_tuning_is_refused(workers):
    from peft import PrefixTuningConfig

    def attached():
        from peft import get_peft_model

        config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS)
        engine.initialize(engine.json_config({"size": 2}, 1), get_peft_model(models.build(LLAMA), config))

    workers(2).run_expecting_error(attached, 'adapter "default" is a prefix .* nothing would be shared .*prompt tuning')


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

            ds_cp.context_parallel(model, {"size": 2, "method": "ring"})
        loss = model(**batches.make(BatchSpec("dense", 1, 37)).inputs).loss
        loss.backward()
        assert all(p.grad is None for name, p in model.named_parameters() if "lora" not in name)
        return loss.item(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}

    loss, gradients = workers(1).run(lora, False)[0]
    ranks = workers(2).run(lora, True)
    oracle.assert_close_loss(ranks[0][0], loss, 1e-6)
    oracle.assert_close_gradients(oracle.mean_over_ranks([g for _, g in ranks]), gradients, 1e-5)
