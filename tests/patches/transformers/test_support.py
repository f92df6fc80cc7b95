"""Models that would train wrong are refused when they are attached, before anything is changed."""

import functools
import warnings

import pytest
import torch
import torch.utils.checkpoint

from harness import models, subject
from harness.models import ModelSpec

CP2 = {"size": 2, "method": "ring", "timeout": 5}
LLAMA = ModelSpec("llama")


MODELS = [
    ({"index_topk": 4}, r"its layers choose the keys of each query by an index \(index_topk = 4\)"),
    ({"index_topk_blocks": 4}, r"its layers choose the keys of each query by an index \(index_topk_blocks = 4\)"),
    ({"layer_types": ["linear_attention", "full_attention"]}, r'not shared yet in layers.0 \(LlamaDecoderLayer\), of kind "linear_attention"'),
    ({"layerdrop": 0.5}, "layerdrop would drop other layers on each rank"),
    ({"encoder_layerdrop": 0.5}, "encoder_layerdrop would drop other layers on each rank"),
    ({"model_type": "brand_new"}, 'model type "brand_new" is not in the tested table .*unverified": "allow"'),
]  # fmt: skip


@pytest.mark.parametrize("override, message", MODELS, ids=[next(iter(override)) for override, _ in MODELS])
def test_a_model_that_would_train_wrong_is_named_with_the_reason(workers, override, message):
    def with_override():
        import ds_cp

        model = models.build(LLAMA)
        for name, value in override.items():
            if name == "model_type":
                type(model.config).model_type = value
            else:
                setattr(model.config, name, value)
        implementation = model.config._attn_implementation
        try:
            ds_cp.context_parallel(model, CP2)
        finally:
            assert model.config._attn_implementation == implementation, "half attached"

    workers(2).run_expecting_error(with_override, f"LlamaForCausalLM cannot be shared exactly:\n- .*{message}")


def encoder_that_pools_by_itself():
    from transformers import AlbertConfig, AlbertModel

    return AlbertModel(AlbertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8))


def encoder_with_a_bias_of_all_pairs():
    from transformers import Pop2PianoConfig, Pop2PianoForConditionalGeneration

    sizes = dict(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_decoder_layers=1, num_heads=2, vocab_size=16)
    return Pop2PianoForConditionalGeneration(Pop2PianoConfig(**sizes))


def encoder_of_sound():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
             (("layers", 1), ("attention_heads", 4), ("ffn_dim", 8))}  # fmt: skip
    return WhisperForConditionalGeneration(
        WhisperConfig(vocab_size=64, d_model=8, num_mel_bins=4, **sides, pad_token_id=0)
    )


def stacks_that_are_plain_modules():
    from transformers import FSMTConfig, FSMTForConditionalGeneration

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
             (("layers", 1), ("attention_heads", 4), ("ffn_dim", 8))}  # fmt: skip
    config = FSMTConfig(langs=["en", "de"], src_vocab_size=16, tgt_vocab_size=16, d_model=8, **sides)
    return FSMTForConditionalGeneration(config)


def decoder_that_rotates_by_length_inside_a_layer():
    model = models.build(LLAMA)
    model.model.layers[1].self_attn.rotary = torch.nn.Identity()
    model.model.layers[1].self_attn.rotary.rope_type = "dynamic"
    return model


OTHERS = [
    (
        decoder_that_rotates_by_length_inside_a_layer,
        "layers.1.self_attn.rotary computes rotary embeddings that depend on the sequence length inside a layer",
    ),
    (encoder_of_sound, "its WhisperEncoder takes input_features, which is no sequence of tokens that ds_cp could cut"),
    (encoder_that_pools_by_itself, "its pooler, a Linear, gets the first token .*add_pooling_layer=False"),
    (stacks_that_are_plain_modules, "layers.0.self_attn"),
    (encoder_with_a_bias_of_all_pairs, "relative position bias .* S x S"),
]


@pytest.mark.parametrize("build, message", OTHERS, ids=[build.__name__ for build, _ in OTHERS])
def test_a_kind_of_model_that_would_train_wrong_is_named(workers, build, message):
    def attach_it():
        import ds_cp

        ds_cp.context_parallel(build(), CP2 | {"unverified": "allow"})

    workers(2).run_expecting_error(attach_it, message)


def test_a_model_without_a_transformers_model_inside_is_refused(workers):
    def plain():
        import ds_cp

        ds_cp.context_parallel(torch.nn.Sequential(torch.nn.Linear(2, 2)), CP2)

    workers(2).run_expecting_error(plain, "shares the sequences of transformers models, but Sequential holds none")


def test_a_second_model_warns(workers):
    def distilled():
        import ds_cp

        with pytest.warns(
            UserWarning, match="ModuleList holds several models; only the first, LlamaForCausalLM, .*"
        ) as told:
            ds_cp.context_parallel(torch.nn.ModuleList([models.build(LLAMA), models.build(LLAMA)]), CP2)
        assert sum("several models" in str(each.message) for each in told) == 1
        assert "LlamaForCausalLM runs on whole rows" in str(told[0].message)  # not the decoder inside of it
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ds_cp.context_parallel(torch.nn.ModuleList([models.build(LLAMA)]), CP2)

    workers(2).run(distilled)


def test_a_copy_of_an_attached_model_is_refused(workers):
    def copied():
        import copy

        import ds_cp

        ds_cp.context_parallel(copy.deepcopy(subject.changed_model(LLAMA, CP2)), CP2)

    workers(2).run_expecting_error(copied, "is a copy of a model that is attached")


def test_activated_lora_is_refused(workers):
    def activated():
        from peft import LoraConfig, get_peft_model

        import ds_cp

        config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6])
        ds_cp.context_parallel(get_peft_model(models.build(LLAMA), config), CP2)

    workers(2).run_expecting_error(activated, "alora_invocation_tokens")


def test_a_second_key_for_the_same_model_is_refused(workers):
    def twice():
        import ds_cp

        model = subject.changed_model(LLAMA, CP2)
        ds_cp.context_parallel(model, CP2)
        ds_cp.context_parallel(model, CP2 | {"method": "allgather"})

    workers(2).run_expecting_error(twice, "is attached already with another")


def test_a_layer_that_is_recomputed_without_its_region_is_refused(workers):
    def recomputed():
        import ds_cp
        from harness import families

        model = families.build("openai-gpt")
        ds_cp.context_parallel(model, CP2 | {"unverified": "allow"})
        block = model.transformer.h[0]
        block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
        ids = torch.full((1, 8), 7)
        model(input_ids=ids, labels=ids).loss.backward()

    workers(2).run_expecting_error(recomputed, "Attention is recomputed in the backward pass")


def test_rows_longer_than_doges_keep_window_size_are_refused(workers):
    def long_rows():
        import ds_cp
        from ds_cp.cli.shrink import tiny_config
        from harness import families

        model = families.build("doge", tiny_config("doge", keep_window_size=16))
        ds_cp.context_parallel(model, CP2 | {"unverified": "allow"})
        ids = torch.full((1, 17), 7)
        model(input_ids=ids, labels=ids)

    workers(2).run_expecting_error(long_rows, r"keeps the 16 keys of the largest bias \(keep_window_size\)")
