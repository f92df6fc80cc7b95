"""TRL's trainers: their data sets, and their arguments."""

import torch

from harness import models

WORDS = ["<pad>", "<eos>", "<unk>", "<user>", "<bot>", *(f"w{i}" for i in range(models.VOCAB - 5))]


def words(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(5, models.VOCAB, (length,), generator=generator))


def chat(seed):
    return [
        {"role": "user", "content": words(seed, 4)}, {"role": "assistant", "content": words(seed + 1, 5 + seed % 9)},
        {"role": "user", "content": words(seed + 2, 3)}, {"role": "assistant", "content": words(seed + 3, 4 + seed % 5)},
    ]  # fmt: skip


def texts(rows):
    return [{"text": words(i, 9 + 7 * (i % 4))} for i in range(rows)]


def chats(rows):
    return [{"messages": chat(5 * i)} for i in range(rows)]


def preferences(rows):
    return [
        {"prompt": words(i, 6), "chosen": words(i + 50, 5 + i % 7), "rejected": words(i + 90, 8 - i % 5)}
        for i in range(rows)
    ]


def judged(rows):
    return [{"prompt": words(i, 6), "completion": words(i + 50, 4 + i % 7), "label": i % 3 > 0} for i in range(rows)]


def prompts(rows):
    return [{"prompt": words(i, 5 + i % 4)} for i in range(rows)]


def favours_even_tokens(completion_ids, **kwargs):
    return [sum(token % 2 == 0 for token in ids) / 3 + len(ids) for ids in completion_ids]


def sft(dataset, **config):
    return "SFTTrainer", "SFTConfig", dataset, {"max_length": 40} | config, {}


def rollouts(name, **config):
    sizes = {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 2, "beta": 0.1}
    more = {"reward_funcs": favours_even_tokens}
    return f"{name}Trainer", f"{name}Config", prompts, sizes | {"gradient_accumulation_steps": 2} | config, more


KINDS = {
    "sft": sft(texts),
    "sft unequal": sft(texts, gradient_accumulation_steps=2, per_device_train_batch_size=1),
    "sft packed": sft(texts, packing=True),
    "sft packed wrapped": sft(texts, packing=True, packing_strategy="wrapped"),
    "sft padding free": sft(texts, padding_free=True, max_length=None),
    "sft assistant only": sft(chats, assistant_only_loss=True),
    "sft dft": sft(texts, loss_type="dft"),
    "dpo": ("DPOTrainer", "DPOConfig", preferences, {"max_length": 32}, {}),
    "dpo ipo": ("DPOTrainer", "DPOConfig", preferences, {"loss_type": "ipo", "precompute_ref_log_probs": True}, {}),
    "dpo lora": ("DPOTrainer", "DPOConfig", preferences, {"max_length": 32}, {"peft_config": "lora"}),
    "kto": ("KTOTrainer", "KTOConfig", judged, {"max_length": 32}, {}),
    "reward": ("RewardTrainer", "RewardConfig", preferences, {"max_length": 32}, {}),
    "grpo": rollouts("GRPO"),
    "grpo window": rollouts("GRPO", steps_per_generation=4, num_iterations=2, loss_type="grpo"),
    "rloo": rollouts("RLOO"),
    "distillation": (
        "DistillationTrainer",
        "DistillationConfig",
        prompts,
        {"max_completion_length": 6, "gradient_accumulation_steps": 2},
        {"teacher_model": "base"},
    ),
}


CASES = [
    # (kind, ranks, key, stage)
    ("sft", 2, {"size": 2, "method": "ring"}, 2),
    ("sft unequal", 4, {"size": 2}, 3),
    ("sft packed", 2, {"size": 2}, 2),
    ("sft packed wrapped", 2, {"size": 2, "method": "ring"}, 1),
    ("sft padding free", 2, {"size": 2, "method": "ring"}, 3),
    ("sft assistant only", 4, {"size": 2, "method": "ring"}, 2),
    ("sft dft", 2, {"size": 2}, 2),
    ("dpo", 2, {"size": 2, "method": "ring"}, 2),
    ("dpo ipo", 4, {"size": 2}, 2),
    ("dpo lora", 2, {"size": 2, "method": "ring"}, 3),
    ("kto", 4, {"size": 2, "method": "ring"}, 2),
    ("reward", 4, {"size": 2}, 2),
    ("grpo", 4, {"size": 2, "method": "ring"}, 2),
    ("grpo window", 4, {"size": 2}, 3),
    ("rloo", 2, {"size": 2, "method": "ring"}, 2),
    ("distillation", 4, {"size": 2, "method": "ring"}, 2),
]
