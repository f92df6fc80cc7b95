"""Bad batches, calls and layers raise the same error on all ranks of a group."""

import copy

import pytest
import torch

from harness import batches, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec

CP2 = {"size": 2, "method": "ring", "timeout": 5}
LLAMA = ModelSpec("llama")


def call_with(change, config=CP2):
    """One forward after `change(inputs, rank, model)`."""
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
    """Replaces the mask function of the decoder, as models with images do."""

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


def labels_of_one_row_of_two(inputs, rank, model):
    inputs["input_ids"] = inputs["input_ids"].expand(2, -1)


def a_list_where_a_tensor_belongs_on_rank_1(inputs, rank, model):
    inputs["attention_mask"] = torch.ones(1, 37) if rank == 0 else [[1] * 37]


def logits_of_a_shard(inputs, rank, model):
    model(**inputs).logits.float()


def logits_of_a_shard_compared(inputs, rank, model):
    logits = copy.deepcopy(model(**inputs)["logits"])
    assert not hasattr(logits, "cpu") and hasattr(logits, "whole") and logits.local.shape[-1] == 128
    assert logits != 0 or logits == 0


BATCHES = [
    (mask_of_a_part, r"attention_mask is a Tensor of shape \(1, 1, 37, 36\): that is not the whole mask of this batch"),
    (integer_mask_of_all_pairs, r"not the whole mask .* or a mask \[1, 1, 37, 37\] of bool or of what is added"),
    (whole_mask_that_would_train, "a whole mask that requires grad, and ds_cp computes no gradient for it"),
    (mask_of_another_length, r"attention_mask has shape \(1, 36\) for a batch of 1 x 37 tokens"),
    (want_attentions, "output_attentions"),
    (other_tokens_on_rank_1, "ranks of a context-parallel group got different batches in forward 0"),
    (other_labels_on_rank_1, "got different batches .* DistributedSampler.*dp_size"),
    (other_length_on_rank_1, r"rank 0: 1 x 37 tokens.* rank 1: 1 x 36 tokens"),
    (bad_boundaries_on_rank_1, r"cu_seqlens .* must rise .*\(found on rank 1, raised on all of its group\)"),
    (neftune_noise, "NEFTune scales its noise by the length that it sees"),
    (other_shift_labels_on_rank_1, "got different batches"),
    (no_labels_on_rank_1, "rank 0: 1 x 37 tokens, hidden states kept local.* rank 1: 1 x 37 tokens, hidden states gathered"),
    (seq_idx_of_another_length, r"seq_idx has shape \(1, 30\) for a batch of 1 x 37 tokens"),
    (flat_positions_on_rank_1, r"position_ids has shape \(37,\).*\(found on rank 1, raised on all of its group\)"),
    (short_labels_on_rank_1, r"labels has shape \(1, 36\).*found on rank 1"),
    (labels_of_one_row_of_two, r"labels has shape \(1, 37\) for a batch of 2 x 37 tokens"),
    (a_list_where_a_tensor_belongs_on_rank_1, "attention_mask is a list.*found on rank 1"),
    (logits_of_a_shard, "logits.float: in training with labels a rank has the logits of its own tokens only"),
    (logits_of_a_shard_compared, "logits in !=: in training with labels a rank has the logits of its own tokens only"),
    (other_attention, "0 of 2 attention or recurrent layers went through ds_cp"),
    (layer_that_masks_by_itself, "LlamaAttention got nothing instead of the mask of the shared sequence"),
    (passing(block_indices=torch.zeros(1)), r"LlamaAttention \(layer 1\) passes block_indices to its attention"),
    (passing(position_bias=torch.zeros(1)), r"LlamaAttention \(layer 1\) passes position_bias to its attention"),
    (masks_made_by(lambda embeds: NoFunction()), "NoFunction object .* is no plain function"),
    (looks_tokens_up_in_a_packed_row, "mask looks_tokens_up.<lambda> looks tokens up by their index in the row"),
    (keys_of_another_sequence, "asks for a mask of 20 queries and 5 keys in a shared forward"),
    (masks_made_by(blocks_of_another_length), r"holds a tensor of shape \(1, 7\), neither of the row's 37 tokens nor"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", BATCHES, ids=[message for _, message in BATCHES])
def test_a_bad_batch_or_layer_raises_on_all_ranks(workers, change, message):
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


def test_the_first_training_step_is_compared_after_an_evaluation(workers):
    def trained_after_an_evaluation():
        model = subject.changed_model(LLAMA, CP2).eval()
        inputs = batches.make(BatchSpec("dense", 1, 37)).inputs
        with torch.no_grad():
            model(**inputs)
        tokens = inputs["input_ids"].roll(torch.distributed.get_rank())
        model.train()(**{**inputs, "input_ids": tokens})

    workers(2).run_expecting_error(trained_after_an_evaluation, "different batches in forward 1")


def test_documents_are_compared_on_every_step(workers):
    def packed_in_another_way():
        model = subject.changed_model(LLAMA, CP2).train()
        inputs = batches.make(BatchSpec("dense", 1, 37)).inputs
        model(**inputs)
        border = 20 + torch.distributed.get_rank()
        positions = torch.cat([torch.arange(border), torch.arange(37 - border)])[None]
        model(input_ids=inputs["input_ids"], labels=inputs["labels"], position_ids=positions)

    workers(2).run_expecting_error(packed_in_another_way, "different batches in forward 1")


def test_whole_logits_without_labels_have_a_size_limit(workers):
    def without_labels():
        from ds_cp.patches.transformers import task_head

        task_head.LOGITS_LIMIT = 37 * 128 * 4 - 1
        model = subject.changed_model(LLAMA, CP2)
        inputs = subject.inputs_without_labels(batches.make(BatchSpec("dense", 1, 37)))
        assert model(**inputs, logits_to_keep=1).logits.shape[1] == 1
        model(**inputs)

    workers(2).run_expecting_error(
        without_labels, "called without labels, so each rank would hold the logits of all 1 x 37"
    )
