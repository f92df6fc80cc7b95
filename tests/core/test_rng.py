"""Random numbers inside and outside of a region."""

import torch

from harness import batches, models, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec

LLAMA = ModelSpec("llama")
RING = {"size": 2, "method": "ring"}
DENSE = BatchSpec("dense", 1, 37)


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
            model(**inputs)  # without labels hidden states are gathered, so the head runs on equal tokens
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
