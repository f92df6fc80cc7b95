"""TRL's trainers with the key: logs and weights equal those of a run without it on one rank per group."""

import pytest
import torch

from data.cases.trl_trainers import CASES, KINDS, WORDS, prompts
from harness import engine, models, training
from harness.models import ModelSpec

pytest.importorskip("trl", reason="TRL is an extra")

LLAMA = ModelSpec("llama")
RATE = 0.05
CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }} "
    "{% else %}<bot> {% generation %}{{ m.content }} <eos> {% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)
TIMES = ("runtime", "per_second", "time", "mfu")


def tokenizer():
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT
    )


def model_for(trainer, folder):
    """A model loaded from a folder, from which TRL also loads the reference model."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if trainer != "RewardTrainer":
        return AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model = models.build(LLAMA)
    model.config.num_labels, model.config.pad_token_id = 1, 0
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(model.config, dtype=torch.float32)


def trained(folder, ds_config, kind):
    """The logs without times, and the weights."""
    import trl
    from datasets import load_from_disk

    engine.activate()
    trainer_name, config_name, rows, config, more = KINDS[kind]
    model = model_for(trainer_name, folder)
    defaults = dict(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=1, max_steps=2,
        logging_steps=1, save_strategy="no", report_to=[], learning_rate=RATE, lr_scheduler_type="constant", bf16=False,
        max_grad_norm=0.0, seed=7, disable_tqdm=True, optim="sgd", deepspeed=ds_config, gradient_checkpointing=False,
        eval_strategy="no", include_num_input_tokens_seen="all" if trainer_name == "RewardTrainer" else "no",
    )  # fmt: skip
    args = getattr(trl, config_name)(**defaults | config)
    datasets = {"train_dataset": load_from_disk(folder / "train")}
    if rows is not prompts:
        datasets["eval_dataset"] = load_from_disk(folder / "eval")
    if "peft_config" in more:
        from peft import LoraConfig

        more = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "down_proj"])}
    if "teacher_model" in more:
        more = {"teacher_model": models.build(ModelSpec("llama", seed=1))}
    trainer = getattr(trl, trainer_name)(model=model, args=args, processing_class=tokenizer(), **datasets, **more)
    trainer.train()
    logs = [dict(log) for log in trainer.state.log_history]
    if "eval_dataset" in datasets:
        logs.append(trainer.evaluate())
    kept = [{k: v for k, v in log.items() if not any(word in k for word in TIMES)} for log in logs]
    return kept, engine.full_weights(trainer.model_wrapped.module)


def marked(case):
    slow = case[0] in ("sft packed wrapped", "sft dft", "dpo ipo", "kto", "rloo")  # similar to a faster case
    return pytest.param(*case, id=case[0], marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("kind, ranks, cp, stage", [marked(case) for case in CASES])
def test_logs_and_weights_equal_a_run_without_the_key(workers, tmp_path, kind, ranks, cp, stage):
    from datasets import Dataset

    models.build(LLAMA).save_pretrained(tmp_path / "base")
    for part, rows in (("train", 16), ("eval", 5)):
        Dataset.from_list(KINDS[kind][2](rows)).save_to_disk(tmp_path / part)

    def run(world, key):
        ds_config = training.json_for(key, stage, optimizer={"type": "SGD", "params": {"lr": RATE}})
        return workers(world, timeout=110).run(trained, tmp_path, ds_config, kind)

    logs, weights = run(ranks // 2, None)[0]
    assert {"loss", "grad_norm"} <= set(logs[0])
    for got_logs, got_weights in run(ranks, cp):
        assert len(got_logs) == len(logs)
        for got, want in zip(got_logs, logs):
            assert set(got) == set(want)
            for name, value in want.items():
                if name.endswith("rewards/accuracies") and abs(want[name.replace("accuracies", "margins")]) < 1e-5:
                    continue  # policy and reference are equal, so the sign of the margin is a rounding error
                assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        for name, weight in weights.items():
            assert (got_weights[name] - weight).norm() <= 1e-5 * weight.norm(), name


def test_vllm_server_mode_is_refused(workers, tmp_path):
    def configured():
        from trl import GRPOConfig

        engine.activate()
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, use_vllm=True, vllm_mode="server", bf16=False,
                   deepspeed=training.json_for({"size": 2}, 2))  # fmt: skip

    workers(2).run_expecting_error(configured, 'vllm_mode": "server" .*is refused.*colocate')
