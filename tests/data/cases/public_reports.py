"""Reports of users of other projects, one line per report, and what this project's tests say about each.

There are three kinds of lines. :class:`Parity` is a case that ``parity/test_public_reports.py`` runs. :class:`Elsewhere`
names the tests that cover the report. :class:`NotOurs` gives the reason why it does not apply.
"""

from dataclasses import dataclass

from harness.batches import BatchSpec
from harness.models import ModelSpec


@dataclass(frozen=True)
class Parity:
    """Loss and gradients of these batches, one per data-parallel group, equal those of one process."""

    method: str
    size: int
    batches: tuple = (BatchSpec(),)
    model: ModelSpec = ModelSpec("llama")
    checkpointing: str | None = None
    layout: str = "auto"


class Elsewhere(tuple):
    """Tests, as "file::function", that cover the report; files are relative to tests/, without suffix."""

    def __new__(cls, *tests):
        return super().__new__(cls, tests)


@dataclass(frozen=True)
class NotOurs:
    """A report that does not apply here."""

    reason: str


def rows(kind="dense", rows=1, length=37, **more):
    return (BatchSpec(kind, rows, length, **more),)


def packed(*lengths, rows=1, **more):
    return (BatchSpec("packed", rows, sum(lengths), documents=lengths, **more),)


UNEVEN = (BatchSpec("dense", 1, 48, "first_eighth"), BatchSpec("dense", 1, 48, seed=1))
WINDOW = (("sliding_window", 20),)  # between the shard's length and the sequence's

REPORTS = {
    # ---- loss and gradient normalisation
    "DeepSpeed#6841: a preference loss under ZeRO-3 has the wrong gradient norm": Elsewhere(
        "parity/test_probes::test_a_loss_that_the_user_computes_from_the_logits_is_exact"
    ),
    "DeepSpeed#5419: later ranks report a far larger loss": Parity("ulysses", 4, rows(length=64)),
    "DeepSpeed#7473: the loss does not fall": Elsewhere(
        "patches/transformers/test_trainer::test_logged_losses_tokens_and_weights_equal_a_run_without_the_key"
    ),
    "transformers#42812: the loss is never computed when the collator emits labels only": Elsewhere(
        "patches/transformers/test_trainer::test_logged_losses_tokens_and_weights_equal_a_run_without_the_key"
    ),
    "transformers#47073: shards with few and many valid tokens weigh the same": Parity("ring", 2, UNEVEN),
    "360-LLaMA-Factory#72, #1, verl#2857: the loss depends on accumulation": Elsewhere(
        "parity/test_zero::test_losses_gradients_and_updated_weights_equal_those_of_one_process",
        "patches/transformers/test_loaders::test_training_equals_a_run_without_the_key",
    ),
    "verl#1136: the normalised mini-batch ignores the groups and halves the gradient": Elsewhere(
        "patches/deepspeed/test_refused_features::test_the_users_batch_size_is_checked_by_groups"
    ),
    "Megatron-LM#673, #906: the loss is scaled by the group's size twice or never": Parity(
        "ring", 2, (BatchSpec(), BatchSpec(seed=1))
    ),
    "SkyRL#1420: a metric that every rank of a group holds is summed over them": Elsewhere(
        "patches/transformers/test_trainer::test_logged_losses_tokens_and_weights_equal_a_run_without_the_key"
    ),
    "verl#4250: the log-probability at the cut is an outlier": Elsewhere(
        "parity/test_probes::test_evaluation_returns_the_logits_of_the_whole_batch_on_every_rank"
    ),
    "DeepSpeed#8457: the target at a shard's border is lost": Parity(
        "ulysses", 2, rows(length=8, labels="middle")
    ),
    "mcore-bridge#104: a rank without labels divides 0 by 0": Parity(
        "ring", 4, rows(length=64, labels="last_eighth"), layout="contiguous"
    ),
    "Megatron-Bridge#3117: NaN at padded positions poisons the loss": Elsewhere(
        "attention/test_attend::test_rows_that_see_no_key_merge_to_zero_without_nan"
    ),
    "Automodel#587: loss and gradient norm drift over steps": Elsewhere(
        "patches/transformers/test_trainer::test_logged_losses_tokens_and_weights_equal_a_run_without_the_key"
    ),
    "ms-swift#10185: labels are shifted a second time by the user's own loss": Elsewhere(
        "patches/transformers/test_loaders::test_training_equals_a_run_without_the_key",
        "patches/transformers/losses/test_label_smoothing::test_losses_outside_of_the_model_equal_a_run_without_the_key",
    ),
    "ms-swift#10035: weights per token are not shared like labels": Elsewhere(
        "parity/test_probes::test_a_loss_that_the_user_computes_from_the_logits_is_exact"
    ),
    # ---- packing, masks, padding
    "axolotl#2495: documents are not seen by the shared attention": Parity(
        "ring", 4, packed(13, 3, 40, 8), layout="contiguous"
    ),
    "trl#6843: packing under context parallelism lets documents see each other": Elsewhere(
        "parity/test_probes::test_a_changed_token_moves_the_rest_of_its_document_and_nothing_else"
    ),
    "TransformerEngine#1930: a document of 7 tokens is taken for 6": Parity("ring", 2, packed(7, 7, 7)),
    "TransformerEngine#3331: the last real keys before the padding are dropped": Parity(
        "ring", 4, rows("right_pad", 2, 51)
    ),
    "Megatron-Bridge#1292: packing fails as soon as there is a group": Parity("allgather", 2, packed(5, 11, 9, rows=2)),
    "transformers#46634: a mask of ones hides the documents": Parity("ulysses", 2, rows("packed_with_ones_mask", 1, 64)),
    "ms-swift#10180: shifted boundaries of an extra field": Parity("ring", 2, packed(3, 5, extras=("shift_labels",))),
    "ms-swift#9903: documents of one token are merged": Parity("ring", 2, packed(1, 1, 6, 1)),
    "OpenRLHF#468: only the last rank meets ignored labels": Parity(
        "ring", 2, rows(length=64, labels="first_eighth"), layout="contiguous"
    ),
    "ms-swift#3215: left padding is refused": Parity("ring", 2, rows("left_pad", 2, 37)),
    "Automodel#2622: a mask that is not causal is dropped": Elsewhere(
        "parity/test_masks::test_a_dense_mask_of_the_user_is_exact"
    ),
    # ---- sequence length and divisibility
    "DeepSpeed#5177: a length that the group does not divide": Parity("ulysses", 4, rows(length=33)),
    "EasyContext#47: 750, 750, 750 and 749 tokens": Parity("ring", 4, rows(length=47), layout="zigzag"),
    "long-context-attention#154: a length coprime to both axes": Parity("hybrid", 4, rows(length=53)),
    "ring-flash-attention#51: every packed document must be divisible": Parity("ring", 4, packed(5, 9, 2)),
    "pytorch#159706: 4 tokens on 2 zigzag ranks": Parity("ring", 2, rows(length=4), layout="zigzag"),
    "prime-rl#1305: padding by S % m": Elsewhere("core/test_layout::test_shards_hold_each_token_once_and_unshard_restores_their_order"),
    # ---- heads and groups
    "DeepSpeed#6774: three heads per rank": Parity("ulysses", 2, model=ModelSpec(heads=6, kv_heads=6)),
    "DeepSpeed#5808: three rows in the batch": Parity("ulysses", 2, rows(rows=3)),
    "DeepSpeed#5664, #8317: the all-to-all has the right size and the wrong data": Elsewhere(
        "attention/test_attend::test_ulysses_sends_each_head_to_its_rank_and_back"
    ),
    "vllm-omni#5716: 28 query heads and 7 key heads on two ranks": Parity("ulysses", 2, model=ModelSpec(heads=28, kv_heads=7)),
    "DeepSpeed#4674: more ranks than heads allow": Elsewhere("core/test_planner::test_the_method_follows_from_heads_and_node"),
    "sglang#39291: slices are contiguous for one row only": Parity("ring", 2, rows(rows=2)),
    "DeepSpeed#7672: the second group's backward uses global ranks": Parity(
        "ulysses", 2, (BatchSpec(), BatchSpec(seed=1))
    ),
    "pytorch#187924: peers of strided groups": Parity("hybrid", 4, rows("packed", 2, 64)),
    "pytorch#147793: torch's own context_parallel does not train on CPU": NotOurs(
        "it is neither used nor taken for an oracle; the oracle is one process"
    ),
    # ---- windows, sinks, softcap, dropout
    "prime-rl#2418: the window is applied only if a shard is longer": Parity(
        "ring", 4, rows(length=64), ModelSpec("mistral", overrides=WINDOW)
    ),
    "prime-rl#2828, ring-flash-attention#35: the window is lost": Parity(
        "ulysses", 2, rows("packed", 1, 64), ModelSpec("gemma3_text")
    ),
    "ring-flash-attention#36: dropout draws other numbers in the backward": Elsewhere(
        "parity/test_masks::test_attention_dropout_is_reproducible_and_independent_of_the_sharding"
    ),
    "prime-rl#2418, VeOmni#1085: softcap is refused": Parity("ring", 2, rows(length=53), ModelSpec("gemma2")),
    # ---- positions
    "Seq1F1B#6: every shard counts its positions from 0": Parity("ring", 4, rows(length=64)),
    "ms-swift#6229, #6243, #6477, #2972, #4277: image tokens are cut before the images are put in": Elsewhere(
        "parity/test_vision_language::test_loss_outputs_and_gradients_equal_those_of_one_process"
    ),
    "ms-swift#4581: packed rows with images lose their loss": Elsewhere(
        "parity/test_vision_language::test_packed_documents_with_images_equal_each_document_alone"
    ),
    "verl#2603, Megatron-LM#1612: positions of three axes are cut along the wrong dim": Elsewhere(
        "parity/test_vision_language::test_loss_outputs_and_gradients_equal_those_of_one_process"
    ),
    "DeepSpeed#8114, twinkle#138, xtuner#1529: recurrent layers restart their state on every rank": Elsewhere(
        "patches/transformers/models/test_recurrent::test_gradients_equal_each_document_alone"
    ),
    # ---- attention silently not parallel
    "ms-swift#10061: a key without a consumer": Elsewhere("core/test_config::test_a_wrong_key_says_what_is_wrong_and_what_is_allowed"),
    "axolotl#3173, #3204: an upgrade of transformers breaks the attention": Elsewhere(
        "attention/kernels/test_flash_attention::test_the_bindings_accept_every_recorded_signature",
        "parity/test_families::test_the_table_names_every_type_of_the_installed_transformers",
    ),
    # ---- data feeding
    "DeepSpeed#7484, #5582: every rank of a group reads another chunk": Elsewhere(
        "patches/accelerate/test_accelerate::test_accelerate_gives_the_ranks_of_a_group_the_same_batches",
        "patches/deepspeed/test_engine_features::test_deepspeeds_own_loader_samples_by_group",
        "parity/test_probes::test_a_batch_that_differs_inside_a_group_is_refused_on_every_rank",
    ),
    "axolotl#3920: loader workers are seeded by global rank": Elsewhere(
        "patches/transformers/test_trainer::test_random_collators_in_loader_workers_agree_inside_a_group"
    ),
    "ms-swift#4553, #4663, #5145, #5140, #9356, #3954, transformers#38286, DeepSpeed#7298: steps and epochs": Elsewhere(
        "patches/transformers/test_trainer::test_logged_losses_tokens_and_weights_equal_a_run_without_the_key"
    ),
    "FastVideo#158, #617, EasyContext#32: nobody can tell what a batch size means": Elsewhere(
        "patches/deepspeed/test_refused_features::test_the_users_batch_size_is_checked_by_groups",
        "cli/test_commands::test_plan_says_what_was_decided_and_why",
    ),
    "LlamaFactory#10559: ranks of a group read other batches of a stream": Elsewhere(
        "patches/transformers/test_loaders::test_training_equals_a_run_without_the_key",
        "patches/transformers/test_loaders::test_a_stream_resumes_from_its_checkpoint",
    ),
    # ---- hangs
    "ring-attention-pytorch PR#9: lone sends and receives hang": Parity("ring", 3, rows(length=64)),
    "verl#6176, EasyR1#11012: data-parallel workers with unequal numbers of batches": NotOurs(
        "it is the same with and without the key: plain data parallelism over groups; inside a group batches are equal"
    ),
    "the tiled MLP of DeepSpeed's tutorial: ranks with fewer tiles stop supplying their ZeRO-3 shards": Elsewhere(
        "patches/transformers/memory/test_chunked_mlp::test_every_zero_stage_is_exact_with_different_numbers_of_chunks_per_rank",
        "patches/transformers/losses/test_causal_lm::test_every_zero_stage_is_exact_with_different_numbers_of_chunks_per_rank",
    ),
    "pytorch#121386: torch.compile breaks the ring": Elsewhere("parity/test_compile::test_five_packings_are_exact_and_compile_once"),
    # ---- ZeRO, adapters
    "DeepSpeed#7458: ZeRO-3 parameters are not sharded": Elsewhere(
        "patches/transformers/test_trainer::test_from_pretrained_inside_zero_init_holds_a_shard_of_each_parameter"
    ),
    "DeepSpeed#7729, accelerate#3889: a PEFT model is no PreTrainedModel": Elsewhere(
        "parity/test_peft::test_lora_gradients_are_exact_and_the_base_stays_frozen"
    ),
    "DeepSpeed#6582: adapters fail under stage 3": Elsewhere(
        "parity/test_peft::test_gradients_of_adapters_are_exact_and_the_base_has_none"
    ),
    "DeepSpeed#4752, Megatron-DeepSpeed#305: universal checkpoints": Elsewhere(
        "patches/deepspeed/test_checkpoints::test_a_universal_checkpoint_resumes_at_another_world_size"
    ),
    "transformers#46868, #43517, DeepSpeed#7821: evaluation is whole on every rank, or wants the training's sizes": Elsewhere(
        "patches/transformers/test_evaluation::test_losses_predictions_and_metrics_equal_a_run_without_the_key"
    ),
    "ms-swift#4753: metrics see every sample twice": Elsewhere(
        "patches/transformers/test_evaluation::test_losses_predictions_and_metrics_equal_a_run_without_the_key"
    ),
    "OpenRLHF#1168: a reward model pools a shard's last token": Elsewhere(
        "parity/test_task_heads::test_loss_outputs_and_gradients_equal_those_of_one_process",
        "patches/trl/test_trainers::test_logs_and_weights_equal_a_run_without_the_key",
    ),
    "LlamaFactory#10555: sizes that do not divide the world": Elsewhere(
        "core/test_config::test_a_wrong_key_says_what_is_wrong_and_what_is_allowed"
    ),
    # ---- numerics
    "ring-flash-attention#42, #22, #67: bf16 error grows with the ring": Elsewhere(
        "attention/test_attend::test_bf16_error_does_not_grow_with_the_ring",
        "attention/test_attend::test_bf16_blocks_are_accumulated_in_fp32",
    ),
    "Megatron-LM#1464, #1465, Automodel#3157: gradients of the bare operation": Elsewhere(
        "attention/test_attend::test_any_lengths_heads_and_bands_equal_one_process"
    ),
    "OpenTau#303: rows that see no key poison the softmax": Elsewhere(
        "attention/test_attend::test_rows_that_see_no_key_merge_to_zero_without_nan",
        "attention/test_terms::test_a_query_without_visible_keys_has_zero_output_and_zero_gradient",
    ),
    # ---- install and versions
    "ring-flash-attention#61, OpenRLHF#1222: one version of transformers works": Elsewhere(
        "core/test_packaging::test_an_installed_wheel_activates_and_finds_its_patches_outside_the_clone"
    ),
    "long-context-attention#64, axolotl#3981: another flash-attn has another signature": Elsewhere(
        "attention/kernels/test_flash_attention::test_every_version_of_every_package_equals_the_formulas",
        "attention/kernels/test_flash_attention::test_a_renamed_argument_is_named_in_the_error",
        "attention/kernels/test_available::test_without_a_card_the_real_checks_find_no_package",
    ),
    # ---- speed and memory
    "ring-flash-attention#23, #49: a rank holds as much as one process": Elsewhere(
        "parity/test_memory::test_a_rank_of_four_holds_a_quarter"
    ),
    "ms-swift#5522, prime-rl#2418, maxtext#4687: figures of other projects": NotOurs(
        "they are measurements; docs/performance.md holds ours"
    ),
}  # fmt: skip
