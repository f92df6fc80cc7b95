"""Masks, scores and head shapes of real model types: loss and gradients equal those of one process.

The cases are a pairwise covering selection of model, method and batch.
"""

import copy
import dataclasses

import pytest
import torch

from harness import batches, models, oracle, subject
from harness.attention import Largest
from harness.batches import BatchSpec
from harness.cases import config_of, name_of
from harness.models import ModelSpec
from harness.oracle import truth
from harness.pairwise import covering

WINDOWED = ("sliding_window", 7)
DYNAMIC = ("rope_parameters", models.Fixed(rope_type="dynamic", factor=4.0, rope_theta=1e4))
MODELS = {
    "gemma2": ModelSpec("gemma2"),
    "gemma3_text": ModelSpec("gemma3_text"),
    "gemma4_text": ModelSpec("gemma4_text"),  # full layers have another head dim and other key heads
    "gpt_oss": ModelSpec("gpt_oss"),
    "mistral windowed": ModelSpec("mistral", overrides=(WINDOWED,)),
    "window wider than a shard": ModelSpec("mistral", overrides=(("sliding_window", 30),)),
    "qwen3 with mixed layers": ModelSpec(
        "qwen3", overrides=(("use_sliding_window", True), WINDOWED, ("max_window_layers", 1))
    ),
    "olmo3": ModelSpec("olmo3"),
    "cohere2": ModelSpec("cohere2"),
    "llama4_text": ModelSpec("llama4_text"),
    "deepseek_v3": ModelSpec("deepseek_v3"),
    "minicpm3": ModelSpec("minicpm3"),
    "phi3 with longrope": ModelSpec("phi3"),
    "llama with dynamic rope": ModelSpec("llama", overrides=(("max_position_embeddings", 16), DYNAMIC)),
    "bloom": ModelSpec("bloom"),
    "falcon": ModelSpec("falcon"),
    "mpt": ModelSpec("mpt"),
    "gemma2 with 9 and 3 heads": ModelSpec("gemma2", 9, 3),
    "gpt_oss with 9 and 3 heads": ModelSpec("gpt_oss", 9, 3),
}  # fmt: skip
LENGTH_MATTERS = ("phi3 with longrope", "llama with dynamic rope")
VARIANTS = (
    "window wider than a shard", "llama with dynamic rope", "gemma2 with 9 and 3 heads", "gpt_oss with 9 and 3 heads",
)  # fmt: skip
WAYS = [("ring", 2), ("ring", 4), ("ulysses", 2), ("ulysses", 4), ("hybrid", 4), ("allgather", 2), ("allgather", 4)]
FACTORS = {
    "model": list(MODELS),
    "way": WAYS,
    "kind": ["dense", "packed", "left_pad", "right_pad"],
    "dtype": [torch.float32, torch.float64],
}
CONSTRAINTS = [
    # bloom and mpt take no position_ids, so transformers ignores packing as well
    (("model", "kind"), lambda model, kind: model not in ("bloom", "mpt") or kind != "packed"),
    # the length that matters is that of the longest row in the model, and of each document in the oracle
    (("model", "kind"), lambda model, kind: model not in LENGTH_MATTERS or kind in ("dense", "left_pad")),
    (("model", "dtype"), lambda model, dtype: model not in LENGTH_MATTERS or dtype == torch.float32),
    # a few methods suffice for variants; 9 query heads on two ulysses ranks are 6 and 3
    (("model", "way"), lambda model, way: model not in VARIANTS or way in [("ring", 4), ("ulysses", 2), ("hybrid", 4)]),
]


@pytest.mark.parametrize("case", covering(FACTORS, CONSTRAINTS), ids=name_of)
def test_loss_and_gradients_equal_those_of_one_process(workers, case):
    spec, batch = MODELS[case["model"]], BatchSpec(case["kind"], 2, 37)
    config = config_of(*case["way"])
    results = workers(config["size"]).run(subject.loss_and_gradients, spec, config, [batch], case["dtype"])
    subject.check(results, truth(spec, batch), case["dtype"])


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("model", ["gpt_oss", "llama4_text", "falcon"])
def test_gradient_checkpointing_changes_nothing(workers, model, checkpointing):
    spec, batch, config = MODELS[model], BatchSpec("packed", 2, 37), config_of("hybrid", 4)
    arguments = (spec, config, [batch], torch.float32, checkpointing)
    subject.check(workers(4).run(subject.loss_and_gradients, *arguments), truth(spec, batch))


@pytest.mark.parametrize("model", ["gemma2", "gpt_oss"])
def test_outside_of_a_region_softcap_and_sinks_are_kept(workers, model):
    """With a cache no region is opened, and the model's eager attention runs, since SDPA has neither softcap nor sinks."""

    def with_cache():
        changed = subject.changed_model(MODELS[model], config_of("ring", 2), torch.float32).eval()
        ids = batches.make(BatchSpec("left_pad", 2, 12)).inputs
        given = {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"]}
        plain = models.build(MODELS[model], torch.float32, attention="eager").eval()
        with torch.no_grad():
            got, want = (m(**given, use_cache=True).logits for m in (changed, plain))
        real = given["attention_mask"].bool()
        return (got - want)[real].abs().max().item()

    assert max(workers(2).run(with_cache)) < 1e-6


def largest_tensor(spec, config, length):
    from ds_cp.attention.kernels import reference

    reference.BLOCK = 64
    model = subject.changed_model(spec, config).train()
    inputs = batches.make(BatchSpec("dense", 1, length)).inputs
    with Largest() as largest:
        model(**inputs).loss.backward()
    return largest.elements


@pytest.mark.parametrize("model", ["gemma2", "gpt_oss", "falcon", "bloom", "llama4_text", "mistral windowed"])
def test_no_model_allocates_a_tensor_of_all_pairs_of_tokens(workers, model):
    length = 640
    spec = dataclasses.replace(MODELS[model], overrides=(*MODELS[model].overrides, ("max_position_embeddings", length)))
    for elements in workers(2).run(largest_tensor, spec, config_of("ring", 2), length):
        assert elements < length * length / 3  # tensors per token are smaller


# ---- masks: dense in one process, transformers' mask functions with ds_cp ----------------------------------------

BLOCKS = [
    -1, -1, -1, 0, 0, 0, 0, -1, -1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2,
    -1, -1, -1, -1, 3, 3, 3, 3, -1, 3, 3, -1,
]  # fmt: skip
LENGTH = 37


def block_ids():
    ids = torch.tensor([BLOCKS + [-1] * (LENGTH - len(BLOCKS)), [0] * 9 + [-1] * 20 + [5] * 8])
    return ids


def image_blocks(ids):
    from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks

    return or_masks(causal_mask_function, blockwise_overlay(ids))


def image_blocks_in_a_window(ids):
    from transformers.masking_utils import and_masks, sliding_window_overlay

    return and_masks(image_blocks(ids), sliding_window_overlay(6))


def window_or_blocks(ids):
    from transformers.masking_utils import blockwise_overlay, or_masks, sliding_window_causal_mask_function

    return or_masks(sliding_window_causal_mask_function(5), blockwise_overlay(ids))


def prefix(ids):
    """Prefix-LM: the first 11 tokens are one block."""
    return image_blocks(torch.where(torch.arange(LENGTH) < 11, 0, -1).expand_as(ids))


def bidirectional_window(ids):
    from transformers.masking_utils import sliding_window_bidirectional_mask_function

    return sliding_window_bidirectional_mask_function(4)


def chunks_or_blocks(ids):
    from transformers.masking_utils import blockwise_overlay, chunked_causal_mask_function, or_masks

    return or_masks(chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)), blockwise_overlay(ids))


def by_index(ids):
    """A mask that no rule expresses: every third key, and the token itself."""
    from transformers.masking_utils import and_masks, causal_mask_function

    return and_masks(causal_mask_function, lambda batch, head, q, k: (k % 3 == batch) | (k == q))


def by_tokens(ids):
    """A mask that no rule expresses and that indexes a tensor by token."""
    return lambda batch, head, q, k: ((ids[batch, k] >= 0) & (k < q)) | (k == q)


def everything(ids):
    from transformers.masking_utils import causal_mask_function, or_masks

    return or_masks(causal_mask_function, lambda *args: torch.tensor(True))


FUNCTIONS = [
    image_blocks, image_blocks_in_a_window, window_or_blocks, prefix, bidirectional_window, chunks_or_blocks, by_index,
    by_tokens, everything,
]  # fmt: skip


def painted(make, pad):
    """The dense mask [2, 1, S, S] of a mask function, with padding visible to itself only."""
    index = torch.arange(LENGTH)
    pairs = torch.arange(2).view(-1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.long), index.view(-1, 1), index
    seen = make(block_ids())(*pairs).expand(2, 1, LENGTH, LENGTH).clone()
    return seen & pad[:, None, None, :] | torch.eye(LENGTH, dtype=torch.bool)


def truth_with(mask, inputs, spec=ModelSpec("llama")):
    model = models.rounded(models.build(spec, attention="eager"), torch.float32).eval()
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    with models.TransformersInDouble():
        loss = model(**inputs | {"attention_mask": added}).loss
        loss.backward()
    return oracle.Truth(loss.item(), oracle.gradients_of(model), [])


def with_mask_function(make, config, inputs):
    from transformers import masking_utils
    from transformers.models.llama import modeling_llama

    from ds_cp.patches.transformers.ambient import current_region

    def create(config, inputs_embeds, **kwargs):
        ids = current_region().shard(block_ids(), pad_value=-1)
        return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["ds_cp"](2, LENGTH, LENGTH, mask_function=make(ids))

    if make is prefix:  # its tensor is indexed by position and must be whole

        def make(ids, make=make):
            return make(block_ids())

    modeling_llama.create_causal_mask = create
    return loss_and_gradients(config, inputs)


def loss_and_gradients(config, inputs, spec=ModelSpec("llama")):
    model = subject.changed_model(spec, config, torch.float64).train()
    with models.TransformersInDouble():
        loss = model(**inputs).loss
        loss.backward()
    return loss.item(), oracle.gradients_of(model)


@pytest.mark.parametrize("way, kind", [(("ring", 2), "right_pad"), (("hybrid", 4), "dense")])
@pytest.mark.parametrize("make", FUNCTIONS, ids=lambda make: make.__name__)
def test_a_mask_function_equals_its_mask(workers, make, way, kind):
    inputs = batches.make(BatchSpec(kind, 2, LENGTH)).inputs
    pad = inputs.get("attention_mask", torch.ones(2, LENGTH)).bool()
    want = truth_with(painted(make, pad), inputs)
    config = config_of(*way)
    subject.check(workers(config["size"]).run(with_mask_function, make, config, inputs), want, torch.float64)


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("way", [("ring", 4), ("ulysses", 2)])
def test_a_dense_mask_of_the_user_is_exact(workers, way, kind):
    inputs = batches.make(BatchSpec("dense", 2, LENGTH)).inputs
    mask = painted(window_or_blocks, torch.ones(2, LENGTH, dtype=torch.bool))
    want = truth_with(mask, inputs)
    if kind == "added":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    config = config_of(*way)
    results = workers(config["size"]).run(loss_and_gradients, config, inputs | {"attention_mask": mask})
    subject.check(results, want, torch.float64)


@pytest.mark.parametrize("way", [("ring", 2), ("ulysses", 4)])
@pytest.mark.parametrize("type", ["llama", "mistral"])
def test_a_decoder_with_is_causal_false_attends_in_both_directions(workers, type, way):
    spec = ModelSpec(type, overrides=(("is_causal", False), *((WINDOWED,) if type == "mistral" else ())))
    inputs = batches.make(BatchSpec("right_pad", 2, LENGTH)).inputs
    pad = inputs["attention_mask"].bool()
    mask = painted((lambda ids: lambda b, h, q, k: (q - k).abs() <= 7) if type == "mistral" else everything, pad)
    want = truth_with(mask, inputs, ModelSpec(type))
    config = config_of(*way)
    results = workers(config["size"]).run(loss_and_gradients, config, inputs, spec)
    subject.check(results, want, torch.float64)


# ---- an encoder --------------------------------------------------------------------------------------------------


def bert(dtype):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, vocab_size=models.VOCAB,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.15, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForMaskedLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    models._make_every_parameter_matter(model)
    return model.to(dtype)


def masked_lm(kind):
    inputs = batches.make(BatchSpec(kind, 2, LENGTH)).inputs
    return inputs | {"token_type_ids": (torch.arange(LENGTH) > 15).long().expand(2, -1)}


def shared_bert(config, inputs):
    import ds_cp

    model = ds_cp.context_parallel(bert(torch.float64), config)
    with models.TransformersInDouble():
        loss = model(**inputs).loss
        loss.backward()
    return loss.item(), oracle.gradients_of(model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["right_pad", "left_pad"])
def test_an_encoder_attends_in_both_directions(workers, way, kind):
    inputs, model = masked_lm(kind), bert(torch.float64)
    with models.TransformersInDouble():
        loss = model(**inputs).loss
        loss.backward()
    want = oracle.Truth(loss.item(), oracle.gradients_of(model), [])
    config = config_of(*way)
    subject.check(workers(config["size"]).run(shared_bert, config, inputs), want, torch.float64)


# ---- dropout -----------------------------------------------------------------------------------------------------


def with_dropout(config, rate, checkpointing=None, forwards=1):
    model = subject.changed_model(ModelSpec("llama", overrides=(("attention_dropout", rate),)), config, torch.float64)
    model.train()
    subject.enable_checkpointing(model, checkpointing)
    inputs = batches.make(BatchSpec("packed", 2, LENGTH)).inputs
    torch.manual_seed(7)
    losses = [model(**inputs).loss for _ in range(forwards)]
    losses[0].backward()
    return [loss.item() for loss in losses], oracle.gradients_of(model)


def test_attention_dropout_is_reproducible_and_independent_of_the_sharding(workers):
    want = None
    for way in [("ring", 2), ("ulysses", 4), ("hybrid", 4), ("allgather", 2)]:
        for checkpointing in (None, "non-reentrant"):
            config = config_of(*way)
            results = workers(config["size"]).run(with_dropout, config, 0.3, checkpointing)
            gradients = oracle.mean_over_ranks([gradients for _, gradients in results])
            want = want or oracle.Truth(results[0][0][0], copy.deepcopy(gradients), [])
            for losses, _ in results:
                oracle.assert_close_loss(losses[0], want.loss, 1e-6)
            oracle.assert_close_gradients(gradients, want.gradients, 1e-5)


def test_attention_dropout_differs_between_steps(workers):
    losses = workers(2).run(with_dropout, config_of("ring", 2), 0.3, None, 3)[0][0]
    plain = workers(2).run(with_dropout, config_of("ring", 2), 0.0, None, 2)[0][0]
    assert len({*losses, plain[0]}) == 4
    assert plain[0] == plain[1]
