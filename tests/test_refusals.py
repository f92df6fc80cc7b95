"""What cannot be exact is refused with a sentence, by all ranks together, before anything is half done."""

import os
import time

import pytest
import torch

from harness import batches, engine, models, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec

CP2 = {"size": 2, "method": "ring", "timeout": 5}
LLAMA = ModelSpec("llama")


# ---- models ------------------------------------------------------------------------------------------------


def attach(spec, config=CP2):
    import ds_cp

    model = models.build(spec)
    before = model.config._attn_implementation, dict(model._forward_hooks), dict(model._forward_pre_hooks)
    try:
        ds_cp.context_parallel(model, config)
    except ValueError:
        after = model.config._attn_implementation, dict(model._forward_hooks), dict(model._forward_pre_hooks)
        assert after == before, "half attached"
        raise


MODELS = [
    ({"index_topk": 4}, r"its layers choose the keys of each query by an index \(index_topk = 4\)"),
    ({"layer_types": ["linear_attention", "full_attention"]}, 'layers of kind "linear_attention" mix tokens in a way that is not shared yet'),
    ({"output_router_logits": True}, "load-balancing loss of experts"),
    ({"layerdrop": 0.5}, "layerdrop would drop other layers on each rank"),
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


def encoder_with_pooler():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8))


def sparse_decoder():
    from transformers import AutoModelForCausalLM, DeepseekV32Config

    return AutoModelForCausalLM.from_config(
        DeepseekV32Config(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=8,
            vocab_size=16, moe_intermediate_size=8, n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1,
            first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
            index_n_heads=2, index_head_dim=8, index_topk=4,
        )
    )  # fmt: skip


def encoder_with_a_bias_of_all_pairs():
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16))


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
    (encoder_with_pooler, "it pools the first token inside of the shared part.*add_pooling_layer=False"),
    (sparse_decoder, r"choose the keys of each query by an index \(index_topk = 4\)"),
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


def test_a_copy_of_an_attached_model_is_refused(workers):
    def copied():
        import copy

        import ds_cp

        ds_cp.context_parallel(copy.deepcopy(subject.changed_model(LLAMA, CP2)), CP2)

    workers(2).run_expecting_error(copied, "is a copy of a model that is attached")


def test_adapters_that_count_tokens_are_refused(workers):
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


# ---- batches -----------------------------------------------------------------------------------------------


def call_with(change, config=CP2):
    """One forward, after `change(inputs, rank, model)`."""
    model = subject.changed_model(LLAMA, config).train()
    inputs = dict(batches.make(BatchSpec("dense", 1, 37)).inputs)
    change(inputs, torch.distributed.get_rank(), model)
    return model(**inputs).loss.item()


def mask_of_a_part(inputs, rank, model):
    inputs["attention_mask"] = torch.zeros(1, 1, 37, 36)


def integer_mask_of_all_pairs(inputs, rank, model):
    inputs["attention_mask"] = torch.ones(1, 1, 37, 37, dtype=torch.long)


def whole_mask_that_would_train(inputs, rank, model):
    inputs["attention_mask"] = torch.zeros(1, 1, 37, 37, requires_grad=True)


def mask_of_another_length(inputs, rank, model):
    inputs["attention_mask"] = torch.ones(1, 36, dtype=torch.long)


def want_attentions(inputs, rank, model):
    inputs["output_attentions"] = True


def other_tokens_on_rank_1(inputs, rank, model):
    inputs["input_ids"] = inputs["input_ids"].roll(rank)


def other_labels_on_rank_1(inputs, rank, model):
    inputs["labels"] = inputs["labels"].roll(rank)


def other_length_on_rank_1(inputs, rank, model):
    inputs["input_ids"] = inputs["input_ids"][:, : 37 - rank]
    inputs["labels"] = inputs["labels"][:, : 37 - rank]


def bad_boundaries_on_rank_1(inputs, rank, model):
    inputs["cu_seq_lens_q"] = torch.tensor([0, 37 if rank == 0 else 36], dtype=torch.int32)


def other_attention(inputs, rank, model):
    model.set_attn_implementation("sdpa")


def layer_that_masks_by_itself(inputs, rank, model):
    layer = model.model.layers[0].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "attention_mask": None})


def passing(**extra):
    def layer_with_an_unknown_score_rule(inputs, rank, model):
        layer = model.model.layers[1].self_attn
        forward = layer.forward
        layer.forward = lambda *args, **kwargs: forward(*args, **extra, **kwargs)

    return layer_with_an_unknown_score_rule


def masks_made_by(make):
    """The decoder's masks come from another mask function, as models with images make theirs."""

    def mask_function(inputs, rank, model):
        from transformers import masking_utils
        from transformers.models.llama import modeling_llama

        def create(config, inputs_embeds, **kwargs):
            return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["ds_cp"](
                inputs_embeds.shape[0],
                inputs_embeds.shape[1],
                inputs_embeds.shape[1],
                mask_function=make(inputs_embeds),
            )

        modeling_llama.create_causal_mask = create

    return mask_function


class NoFunction:
    def __call__(self, batch, head, q, k):
        return k <= q


def looks_tokens_up(embeds):
    kind = torch.ones(embeds.shape[:2], dtype=torch.long)
    return lambda batch, head, q, k: (k <= q) & (kind[batch, q] == kind[batch, k])


def looks_tokens_up_in_a_packed_row(inputs, rank, model):
    inputs["position_ids"] = torch.cat([torch.arange(20), torch.arange(17)])[None]
    masks_made_by(looks_tokens_up)(inputs, rank, model)


def keys_of_another_sequence(inputs, rank, model):
    from transformers import masking_utils
    from transformers.models.llama import modeling_llama

    def create(config, inputs_embeds, **kwargs):
        return masking_utils.create_bidirectional_mask(config, inputs_embeds, None, torch.zeros(1, 5, 8))

    modeling_llama.create_causal_mask = create


def blocks_of_another_length(embeds):
    from transformers.masking_utils import blockwise_overlay

    return blockwise_overlay(torch.zeros(1, 7, dtype=torch.long))


def router_loss_at_call_time(inputs, rank, model):
    inputs["output_router_logits"] = True


def neftune_noise(inputs, rank, model):
    model.get_input_embeddings().neftune_noise_alpha = 5.0


def other_shift_labels_on_rank_1(inputs, rank, model):
    inputs["shift_labels"] = inputs["labels"].roll(-1 - rank)


def no_labels_on_rank_1(inputs, rank, model):
    if rank:
        inputs.pop("labels")


def seq_idx_of_another_length(inputs, rank, model):
    inputs["seq_idx"] = torch.zeros(1, 30, dtype=torch.int32)


def flat_positions_on_rank_1(inputs, rank, model):
    inputs["position_ids"] = torch.arange(37)[None] if rank == 0 else torch.arange(37)


def short_labels_on_rank_1(inputs, rank, model):
    inputs["labels"] = inputs["labels"][:, : 37 - rank]


def a_list_where_a_tensor_belongs_on_rank_1(inputs, rank, model):
    inputs["attention_mask"] = torch.ones(1, 37) if rank == 0 else [[1] * 37]


def logits_of_a_shard(inputs, rank, model):
    model(**inputs).logits.float()


BATCHES = [
    (mask_of_a_part, r"attention_mask is a Tensor of shape \(1, 1, 37, 36\): that is not the whole mask of this batch"),
    (integer_mask_of_all_pairs, r"not the whole mask .* or a mask \[1, 1, 37, 37\] of bool or of what is added"),
    (whole_mask_that_would_train, "a whole mask that asks for a gradient, which ds_cp does not compute"),
    (mask_of_another_length, r"attention_mask has shape \(1, 36\) for a batch of 1 x 37 tokens"),
    (want_attentions, "output_attentions"),
    (other_tokens_on_rank_1, "ranks of a context-parallel group got different batches in forward 0"),
    (other_labels_on_rank_1, "got different batches .* DistributedSampler.*dp_size"),
    (other_length_on_rank_1, r"rank 0: 1 x 37 tokens.* rank 1: 1 x 36 tokens"),
    (bad_boundaries_on_rank_1, r"cu_seqlens .* must rise .*\(found on rank 1, raised on all of its group\)"),
    (router_loss_at_call_time, "output_router_logits asks for the load-balancing loss of experts"),
    (neftune_noise, "NEFTune scales its noise by the length that it sees"),
    (other_shift_labels_on_rank_1, "got different batches"),
    (no_labels_on_rank_1, "rank 0: 1 x 37 tokens, with labels.* rank 1: 1 x 37 tokens, without labels"),
    (seq_idx_of_another_length, r"seq_idx has shape \(1, 30\) for a batch of 1 x 37 tokens"),
    (flat_positions_on_rank_1, r"position_ids has shape \(37,\).*\(found on rank 1, raised on all of its group\)"),
    (short_labels_on_rank_1, r"labels has shape \(1, 36\).*found on rank 1"),
    (a_list_where_a_tensor_belongs_on_rank_1, "attention_mask is a list.*found on rank 1"),
    (logits_of_a_shard, "logits.float: in training with labels a rank has the logits of its own tokens only"),
    (other_attention, "0 of 2 attention layers went through ds_cp"),
    (layer_that_masks_by_itself, "LlamaAttention got no mask instead of the mask of the shared sequence"),
    (passing(indices=torch.zeros(1)), r"LlamaAttention \(layer 1\) passes indices to its attention, which ds_cp does not"),
    (passing(block_indices=torch.zeros(1)), r"LlamaAttention \(layer 1\) passes block_indices to its attention"),
    (passing(position_bias=torch.zeros(1)), r"LlamaAttention \(layer 1\) passes position_bias to its attention"),
    (masks_made_by(lambda embeds: NoFunction()), "NoFunction object .* is no plain function"),
    (looks_tokens_up_in_a_packed_row, "mask looks_tokens_up.<lambda> looks tokens up by their index in the row"),
    (keys_of_another_sequence, "asks for a mask of 20 queries and 5 keys in a shared forward"),
    (masks_made_by(blocks_of_another_length), r"holds a tensor of shape \(1, 7\), neither of the row's 37 tokens nor"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", BATCHES, ids=[message for _, message in BATCHES])
def test_a_bad_batch_or_layer_fails_all_ranks_together(workers, change, message):
    workers(2).run_expecting_error(call_with, message, change)


def test_contents_are_compared_on_every_step_when_asked(workers):
    def second_step_differs(checks):
        model = subject.changed_model(LLAMA, CP2 | {"checks": checks})
        inputs = batches.make(BatchSpec("dense", 1, 37)).inputs
        model(**inputs)
        tokens = inputs["input_ids"].roll(torch.distributed.get_rank())
        return model(**{**inputs, "input_ids": tokens}).loss.item()

    workers(2).run_expecting_error(second_step_differs, "different batches in forward 1", "every_step")
    workers(2).run(second_step_differs, "first_step")


def test_whole_logits_for_an_unknown_loss_have_a_limit(workers):
    def without_labels():
        from ds_cp.patches.transformers import border

        border.LOGITS_LIMIT = 37 * 128 * 4 - 1
        model = subject.changed_model(LLAMA, CP2)
        inputs = subject.inputs_without_labels(batches.make(BatchSpec("dense", 1, 37)))
        assert model(**inputs, logits_to_keep=1).logits.shape[1] == 1
        model(**inputs)

    workers(2).run_expecting_error(
        without_labels, "called without labels, so each rank would hold the logits of all 1 x 37"
    )


# ---- DeepSpeed's features and batch arithmetic ----------------------------------------------------------------

FEATURES = {
    "tensor_parallel.autotp_size": {"tensor_parallel": {"autotp_size": 2}},
    "expert_parallel": {"expert_parallel": {"enabled": True}},
    "compile.deepcompile": {"compile": {"deepcompile": True}},
    "hybrid_engine": {"hybrid_engine": {"enabled": True}},
    "zero_optimization.mics_shard_size": {"zero_optimization": {"mics_shard_size": 1}},
    "zero_optimization.zero_quantized_weights": {"zero_optimization": {"zero_quantized_weights": True}},
    "zero_optimization.zero_quantized_gradients": {"zero_optimization": {"zero_quantized_gradients": True}},
    "optimizer.type": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}},
    "curriculum_learning": {"curriculum_learning": {"enabled": True}},
    "data_efficiency": {"data_efficiency": {"enabled": True}},
    "elasticity": {"elasticity": {"enabled": True}},
    "sequence_parallel_size": {"sequence_parallel_size": 2},
    "gradient_allreduce_op": {"gradient_allreduce_op": "sum"},
    "zero_optimization.zenflow": {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
    "amp": {"amp": {"enabled": True}},
}


def test_the_table_of_refused_features_is_tested_whole():
    from ds_cp.patches.deepspeed import FEATURES as refused

    assert {name for name, *_ in refused} == set(FEATURES)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_that_would_train_wrong_is_refused_by_name(feature):
    from ds_cp.patches.deepspeed import refuse_features

    base = engine.json_config(CP2, 1)
    refuse_features(base)
    with pytest.raises(
        ValueError, match=f'"{feature}" together with "context_parallel" is refused: .*Take one of the two'
    ):
        refuse_features(base | FEATURES[feature])


def start(config, **kwargs):
    import deepspeed

    engine.activate()
    return deepspeed.initialize(model=models.build(LLAMA), config=config, **kwargs)


def test_initialize_refuses_features_and_an_mpu_before_it_builds_anything(workers):
    workers(2).run_expecting_error(start, "deepcompile", engine.json_config(CP2, 1) | FEATURES["compile.deepcompile"])

    def with_mpu():
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        start(engine.json_config(CP2, 1), mpu=parallel_state_sp)

    workers(2).run_expecting_error(with_mpu, 'both "context_parallel" and an mpu or mesh')


def test_pipeline_modules_are_refused(workers):
    def pipeline():
        import deepspeed
        from deepspeed.pipe import PipelineModule

        engine.activate()
        stages = PipelineModule(
            [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], num_stages=1, loss_fn=torch.nn.MSELoss()
        )
        deepspeed.initialize(model=stages, config=engine.json_config(CP2, 1))

    workers(2).run_expecting_error(pipeline, "PipelineModule")


def test_the_users_batch_size_is_checked_by_groups(workers):
    wrong = engine.json_config(CP2, 1) | {"train_batch_size": 2}
    workers(2).run_expecting_error(start, "2 != 1 \\* 1 \\* 1", wrong)


def test_switching_off_while_the_key_is_there_is_said_loudly(workers):
    def switched_off():
        os.environ["DS_CP_DISABLE"] = "1"
        with pytest.warns(UserWarning, match="DS_CP_DISABLE is set: NO sequence is shared"):
            engine.activate()
            made, *_ = start(engine.json_config(CP2, 1) | {"train_batch_size": 2})
        return made.module.config._attn_implementation

    assert workers(2).run(switched_off) == ["sdpa", "sdpa"]


# ---- ranks that die or hang -------------------------------------------------------------------------------------


def rank_1_stops(how, when):
    model = subject.changed_model(LLAMA, CP2 | {"timeout": 3})
    inputs = batches.make(BatchSpec("dense", 1, 37)).inputs
    model(**inputs)
    if torch.distributed.get_rank() == 1 and when == "before the next forward":
        os._exit(3) if how == "dies" else time.sleep(30)
    if torch.distributed.get_rank() == 1:

        def stop(*args):
            os._exit(3) if how == "dies" else time.sleep(30)

        model.model.layers[0].self_attn.o_proj.register_full_backward_hook(stop)
    model(**inputs).loss.backward()


STOPS = [
    ("dies", "before the next forward", "agreement on the batch of forward 1"),
    ("dies", "in backward", "'backward "),
]


@pytest.mark.parametrize("how, when, where", STOPS)
def test_a_rank_whose_neighbour_is_gone_says_so_and_where(workers, how, when, where):
    message = rf"rank 0 lost its (context-parallel|ring) group \[0, 1\] in .?{where}.*timeout 3 s"
    workers(2).run_expecting_error(rank_1_stops, message, how, when, dying=[1])


def test_a_rank_whose_neighbour_hangs_gives_up_after_the_timeout(workers):
    def rank_1_hangs():
        model = subject.changed_model(LLAMA, CP2 | {"timeout": 2})
        inputs = batches.make(BatchSpec("dense", 1, 37)).inputs
        model(**inputs)
        if torch.distributed.get_rank() == 1:
            time.sleep(6)
            raise RuntimeError("rank 0 lost its context-parallel group [0, 1] (woke up)")
        start = time.monotonic()
        try:
            model(**inputs)
        finally:
            assert time.monotonic() - start < 5

    workers(2).run_expecting_error(rank_1_hangs, r"rank 0 lost its context-parallel group \[0, 1\]")
